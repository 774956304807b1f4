"""What Numba compiles, as one function: compiling the threads takes longest.

Imported only where it is to be used, since Numba is an extra.

Runs on: worker.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from functools import cache
from typing import Any

import numba as nb
import numpy as np

from daskinfer.engines.lm import compiled, compiling, few, pieces
from daskinfer.engines.lm.compiled import code_rows, gate_rows, norm_rows, number_rows, turn_rows
from daskinfer.engines.lm.compiling import (
    CODES,
    FEW,
    GATE,
    NORM,
    NUMBERS,
    NUMBERS_OF_CODES,
    PIECES,
    STORE_PIECES,
    TURN,
    Team,
    quick,
)
from daskinfer.engines.lm.few import attend_few
from daskinfer.engines.lm.pieces import attend_pieces, store_pieces

__all__ = ["gathered", "version_of"]


@quick()
def _do(what: int, part: int, parts: int, scale: Any, numbers: Any) -> None:
    if what == FEW:
        attend_few(part, parts, scale, numbers)
    elif what == STORE_PIECES:
        store_pieces(part, parts, numbers)
    elif what == PIECES:
        attend_pieces(part, parts, scale, numbers)
    elif what == NORM:
        norm_rows(part, parts, numbers)
    elif what == TURN:
        turn_rows(part, parts, numbers)
    elif what == GATE:
        gate_rows(part, parts, numbers)
    elif what == CODES:
        code_rows(part, parts, numbers)
    elif what == NUMBERS_OF_CODES:
        number_rows(part, parts, numbers)


def _shared(version: int) -> Any:
    def share(what: int, parts: int, scale: Any, numbers: Any) -> None:
        _ = version  # Numba keeps what it compiled under the code of this function and what it holds
        if parts == 1:
            _do(what, np.int64(0), parts, scale, numbers)
        else:
            for part in nb.prange(parts):
                _do(what, np.int64(part), parts, scale, numbers)  # its own are unsigned: all would be compiled anew

    return share


def version_of(*modules: Any) -> int:
    """Return a number that changes with the source of modules."""
    source = "".join(inspect.getsource(module) for module in modules)
    return int(hashlib.sha256(source.encode()).hexdigest()[:15], 16)


@cache
def _compiled() -> tuple[Any, int]:
    """Compile, or find what an earlier process compiled; return the function, and the process that has its threads.

    Raises
    ------
    RuntimeError
        Numba's own pool of threads is what there is: it ends the process when two threads compute at once.
    """
    number = nb.int64
    signature = nb.void(number, number, nb.float32, nb.types.UniTuple(number, NUMBERS))
    share = _shared(version_of(compiled, compiling, few, pieces, sys.modules[__name__]))
    try:
        function = quick(signature, parallel=True, cache=True)(share)
    except RuntimeError:  # no place to keep it, neither beside this file nor in the user's home
        function = quick(signature, parallel=True)(share)
    function(GATE, 2, 1.0, (0,) * NUMBERS)  # no rows: to start the threads
    if nb.threading_layer() not in ("omp", "tbb"):
        raise RuntimeError(
            f"Numba's threads are those of its layer {nb.threading_layer()!r}; it needs OpenMP (libgomp) or TBB"
        )
    return function, os.getpid()


def gathered() -> Team:
    """Return the threads of this process.

    Raises
    ------
    RuntimeError
        Numba has no threads that several threads of a process may share, or those of the process this one was forked from.
    """
    return Team(_compiled)
