"""``df.infer`` on pandas and dask.dataframe, and the same as functions.

Runs on: client.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from daskinfer.dataframe.asked import SAMPLING, Inference, asked, prompts_from, with_engine
from daskinfer.dataframe.partition import infer_partition, infer_through
from daskinfer.errors import ConfigError
from daskinfer.prompts import Prompter

__all__ = ["Infer", "apply", "chat", "classify", "embed", "generate", "score"]


class Infer:
    """Inference as columns: ``df.infer`` of a pandas or dask DataFrame.

    Each method returns the frame with new columns; the given frame stays as it is. On pandas they run at once, on
    dask.dataframe when the result is computed. Index, order, duplicate labels and partitions are kept.

    Parameters
    ----------
    frame : pandas.DataFrame or dask.dataframe.DataFrame

    Notes
    -----
    All methods take these:

    model : str, path, ModelSpec or Driver
        A local folder, a GGUF file, a hub name, or the whole specification. A Driver stands for its model, sampling
        parameters and policies; a pandas frame is then sent through its workers.
    output : str
        Name of the new column. The names of further ones begin with it.
    errors : {"column", "raise"}
        "column": a row that fails has nulls, and its reason in ``<output>_error``. "raise": the first one raises.
    on_long : {None, "error", "truncate"}
        What to do with a row that is too long for the model: it fails, or tokens are dropped from ``side`` ("right" or
        "left"); ``<output>_truncated_tokens`` and ``<output>_truncated_side`` then say of each row how many and where.
        None: what ``truncate`` of ``params`` or of the Driver says, else it fails.
    details : bool
        Add ``<output>_finish_reason``, ``<output>_prompt_tokens`` and ``<output>_completion_tokens``.
    **settings
        ``engine``, ``engine_options`` and the fields of :class:`~daskinfer.ModelSpec` (``dtype``, ``device``, …);
        ``batch``, ``retry``, ``health`` policies; ``output_type``, where the model's files are not on this machine;
        and what the method says.

    Dtypes are known before anything runs, from the model's JSON files at most: text is ``string[pyarrow]``, numbers are
    nullable, vectors are Arrow lists of fixed size, typed outputs are Arrow structs.

    Examples
    --------
    >>> import pandas as pd
    >>> import daskinfer.dataframe
    >>> df = pd.DataFrame({"text": ["a", ""]})
    >>> df.infer.generate("text", model="echo", engine="echo", isolation="thread")
      text output                          output_error
    0    a    <a>                                  <NA>
    1        <NA>  empty_prompt: column 'text' is empty
    """

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def generate(
        self,
        prompt: str,
        *,
        model: Any,
        output: str = "output",
        errors: str = "column",
        on_long: str | None = None,
        details: bool = False,
        **settings: Any,
    ) -> Any:
        """Answer a prompt of each row.

        Parameters
        ----------
        prompt : str
            A template over columns (``"Summarise: {text}"``), or the column that holds the prompts.
        model, output, errors, on_long, details
            See :class:`Infer`.
        **settings
            Also sampling parameters (``max_new_tokens``, ``temperature``, …, or all as ``params``), ``raw`` and ``system``
            as in :meth:`daskinfer.Driver.generate`.
        """
        made = prompts_from(self._columns, prompt, "generate")
        return self._inferred(
            made,
            model,
            task="generate",
            output=output,
            errors=errors,
            on_long=on_long,
            details=details,
            settings=settings,
        )

    def chat(
        self,
        messages: str,
        *,
        model: Any,
        output: str = "output",
        errors: str = "column",
        on_long: str | None = None,
        details: bool = False,
        **settings: Any,
    ) -> Any:
        """Answer the conversation of each row.

        Parameters
        ----------
        messages : str
            The column of conversations: lists of ``{"role": …, "content": …}``, or such a list as JSON text.
        model, output, errors, on_long, details, **settings
            As for :meth:`generate`.
        """
        made = prompts_from(self._columns, messages, "generate", messages=True)
        return self._inferred(
            made,
            model,
            task="generate",
            output=output,
            errors=errors,
            on_long=on_long,
            details=details,
            settings=settings,
        )

    def embed(
        self,
        text: str,
        *,
        model: Any,
        output: str = "vector",
        errors: str = "column",
        on_long: str | None = None,
        details: bool = False,
        **settings: Any,
    ) -> Any:
        """Turn a text of each row into a vector.

        Parameters
        ----------
        text : str
            A column, or a template over columns.
        model, output, errors, on_long, details
            See :class:`Infer`.
        **settings
            Also options of the engine, such as ``normalize=True`` or ``prompt="query: "``.
        """
        made = prompts_from(self._columns, text, "embed")
        return self._inferred(
            made, model, task="embed", output=output, errors=errors, on_long=on_long, details=details, settings=settings
        )

    def classify(
        self,
        text: str | Sequence[str],
        *,
        model: Any,
        labels: Sequence[str] | None = None,
        output: str = "label",
        errors: str = "column",
        on_long: str | None = None,
        details: bool = False,
        **settings: Any,
    ) -> Any:
        """Label a text of each row.

        Parameters
        ----------
        text : str or sequence of str
            A column, a template over columns, or two columns for a model of pairs.
        labels : sequence of str or None
            Zero-shot: these labels, with a model of natural language inference. None: the model's own.
        model, output, errors, on_long, details
            See :class:`Infer`.
        **settings
            Also options of the engine, such as ``top_k=3``.
        """
        if labels is not None:
            settings["labels"] = labels if isinstance(labels, str) else list(labels)
        made = prompts_from(self._columns, text, "classify")
        return self._inferred(
            made,
            model,
            task="classify",
            output=output,
            errors=errors,
            on_long=on_long,
            details=details,
            settings=settings,
        )

    def score(
        self,
        a: str,
        b: str,
        *,
        model: Any,
        output: str = "score",
        errors: str = "column",
        on_long: str | None = None,
        details: bool = False,
        **settings: Any,
    ) -> Any:
        """Score how well text ``b`` of each row answers text ``a``.

        Parameters
        ----------
        a, b : str
            Columns of texts. With ``rank=True`` those of ``b`` are lists of texts, which are ranked.
        model, output, errors, on_long, details
            See :class:`Infer`.
        **settings
            Also options of the engine.
        """
        made = prompts_from(self._columns, (a, b), "score")
        return self._inferred(
            made, model, task="score", output=output, errors=errors, on_long=on_long, details=details, settings=settings
        )

    def apply(  # noqa: PLR0913
        self,
        engine: str | type,
        value: str | Sequence[str] | None = None,
        *,
        messages: str | None = None,
        model: Any = "custom",
        output: str = "output",
        errors: str = "column",
        on_long: str | None = None,
        details: bool = False,
        **settings: Any,
    ) -> Any:
        """Run an engine of your own on each row.

        Parameters
        ----------
        engine : class or str
            A class with ``load`` and ``infer`` (see :class:`daskinfer.BatchEngine`), also one from a notebook; or the name
            of an engine. Its ``output_type`` decides the new column's dtype.
        value : str or sequence of str
            What it is given: a column, a template over columns, or a list of columns, which makes ``request.input`` a
            mapping of column to value.
        messages : str
            Instead: the column of conversations.
        model : str, ModelSpec or Driver
            What its ``spec.model`` says, or a specification whose engine this one takes the place of, options and all
            else as they are. A Driver has to have been made with this engine.
        output, errors, on_long, details
            See :class:`Infer`.
        **settings
            Also sampling parameters; all others are the engine's options, except where ``model`` has some already.

        Raises
        ------
        ConfigError
            The Driver has another engine.
        """
        if (value is None) == (messages is None):
            raise ConfigError("apply: give either a column, template or list of columns, or messages=")
        asks = value if messages is None else messages
        made = prompts_from(self._columns, asks, "generate", messages=messages is not None)
        if isinstance(model, str | os.PathLike):
            settings["engine"] = engine
        else:
            model = with_engine(model, engine)
        return self._inferred(
            made,
            model,
            task="generate",
            output=output,
            errors=errors,
            on_long=on_long,
            details=details,
            settings=settings,
            not_options=("engine", *SAMPLING),
        )

    # ---------------------------------------------------------------- how

    @property
    def _columns(self) -> list[Any]:
        return list(self._frame.columns)

    def _inferred(
        self,
        made: Prompter,
        model: Any,
        *,
        task: str,
        settings: Mapping[str, Any],
        not_options: Sequence[str] | None = None,
        **rest: Any,
    ) -> Any:
        if task != "generate":
            not_options = ("engine",)
        inference = asked(self._columns, made, model, task=task, not_options=not_options, settings=settings, **rest)
        if isinstance(self._frame, pd.DataFrame):
            return _eager(self._frame, model, inference)
        return _lazy(self._frame, inference)


def _eager(frame: pd.DataFrame, model: Any, inference: Inference) -> pd.DataFrame:
    from daskinfer.driver import Driver

    made = infer_through(model, frame, inference) if isinstance(model, Driver) else infer_partition(frame, inference, 0)
    assert isinstance(made, pd.DataFrame)
    return made


def _lazy(frame: Any, inference: Inference) -> Any:
    from dask._collections import new_collection

    from daskinfer.dataframe.expr import InferredFrame

    return new_collection(InferredFrame(frame.expr, inference))  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- the same as functions


def generate(frame: Any, prompt: str, **settings: Any) -> Any:
    """Answer a prompt of each row; see :meth:`Infer.generate`."""
    return _of(frame).generate(prompt, **settings)


def chat(frame: Any, messages: str, **settings: Any) -> Any:
    """Answer the conversation of each row; see :meth:`Infer.chat`."""
    return _of(frame).chat(messages, **settings)


def embed(frame: Any, text: str, **settings: Any) -> Any:
    """Turn a text of each row into a vector; see :meth:`Infer.embed`."""
    return _of(frame).embed(text, **settings)


def classify(frame: Any, text: str | Sequence[str], **settings: Any) -> Any:
    """Label a text of each row; see :meth:`Infer.classify`."""
    return _of(frame).classify(text, **settings)


def score(frame: Any, a: str, b: str, **settings: Any) -> Any:
    """Score pairs of texts; see :meth:`Infer.score`."""
    return _of(frame).score(a, b, **settings)


def apply(frame: Any, engine: str | type, value: str | Sequence[str] | None = None, **settings: Any) -> Any:
    """Run an engine of your own on each row; see :meth:`Infer.apply`."""
    return _of(frame).apply(engine, value, **settings)


def _of(frame: Any) -> Infer:
    import dask.dataframe as dd

    if not isinstance(frame, pd.DataFrame | dd.DataFrame):
        raise ConfigError(f"a {type(frame).__module__}.{type(frame).__qualname__} is no pandas or dask DataFrame")
    return Infer(frame)
