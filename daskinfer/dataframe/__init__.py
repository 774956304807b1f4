"""Inference as columns of a DataFrame.

Importing this gives pandas and dask DataFrames their accessor ``infer``: see :class:`Infer`.

::

    frame ─ asked ─▶ Inference ─ expr ─▶ one task per partition ─ partition ─▶ rows through a window ─ home ─▶ engine

Runs on: client, worker.
"""

from __future__ import annotations

from typing import Any

import dask.dataframe as dd
import pandas as pd
from dask.dataframe.extensions import register_dataframe_accessor

from daskinfer.dataframe.accessor import Infer, apply, chat, classify, embed, generate, score
from daskinfer.dataframe.watching import progress, release

__all__ = ["Infer", "apply", "chat", "classify", "embed", "generate", "progress", "release", "score"]


def _register(kind: Any, registrar: Any) -> None:
    if "infer" in vars(kind):  # the light one that ``import daskinfer`` left there
        del kind.infer
    registrar("infer")(Infer)


_register(pd.DataFrame, pd.api.extensions.register_dataframe_accessor)
_register(dd.DataFrame, register_dataframe_accessor)
