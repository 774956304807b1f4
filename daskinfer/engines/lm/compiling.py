"""Functions compiled for the processor by Numba: how they are compiled, which threads run them, and what Numba lacks.

Imported only where it is to be used, since Numba is an extra.

Runs on: worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["NUMBERS", "Team", "add_product", "exp", "line", "matrix", "pointer", "quick"]

FEW, STORE_PIECES, PIECES, NORM, TURN, GATE, CODES, NUMBERS_OF_CODES = range(8)
"""What compiled functions do."""

NUMBERS = 22
"""Integers that describe a call, addresses among them: taking arrays over from Python takes as long as norming a row."""


_LEAST, _MOST = np.float32(-126.0), np.float32(127.0)  # 2 to these powers is a normal number
_LOG2_E = np.float32(1.4426950408889634)
# 2**x for 0 <= x < 1, fitted for the least relative error, which is that of float32 (8e-8)
_P1, _P2, _P3 = np.float32(0.69314700), np.float32(0.24022983), np.float32(0.05548334)
_P4, _P5, _P6 = np.float32(0.00967884), np.float32(0.00124397), np.float32(0.00021702255)
_LANES = 8  # float32 numbers of a register; processors with others take it apart
_FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; not a number has to stay one


def quick(*signature: Any, **options: Any) -> Callable[[Any], Any]:
    """Compile a function."""
    given = {"fastmath": _FAST, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True, **options}
    return nb.njit(*signature, **given)  # type: ignore[no-any-return]


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Return a pointer to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def _as_float(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


def _panel(rows: int) -> Any:
    vector = ir.VectorType(ir.FloatType(), _LANES)
    zero, lanes = ir.Constant(ir.IntType(32), 0), ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)

    @intrinsic
    def panel(typing_context: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            out, line, x, x_line, a, row, step, n = cgutils.unpack_tuple(builder, arguments[0])
            kind = ir.FunctionType(vector, [vector] * 3)
            fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{_LANES}f32")

            def at(address: Any, kind: Any, *offsets: Any) -> Any:
                for offset in offsets:
                    address = builder.add(address, offset)
                return builder.inttoptr(address, kind.as_pointer())

            def constant(number: int) -> Any:
                return ir.Constant(ir.IntType(64), number)

            places = [
                at(out, vector, builder.mul(constant(r), line), constant(4 * _LANES * v))
                for r in range(rows)
                for v in range(2)
            ]
            sums = [cgutils.alloca_once(builder, vector) for _ in places]
            for place, total in zip(places, sums, strict=True):
                builder.store(builder.load(place, align=4, typ=vector), total)
            with cgutils.for_range(builder, n) as loop:
                begin = builder.mul(loop.index, x_line)
                xs = [
                    builder.load(at(x, vector, begin, constant(4 * _LANES * v)), align=4, typ=vector) for v in range(2)
                ]
                for r in range(rows):
                    offset = builder.add(builder.mul(constant(r), row), builder.mul(loop.index, step))
                    factor = builder.load(at(a, ir.FloatType(), offset), align=4, typ=ir.FloatType())
                    one = builder.insert_element(ir.Constant(vector, ir.Undefined), factor, zero)
                    factors = builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)
                    for v in range(2):
                        total = sums[2 * r + v]
                        added = builder.call(fused, [factors, xs[v], builder.load(total, typ=vector)])
                        builder.store(added, total)
            for place, total in zip(places, sums, strict=True):
                builder.store(builder.load(total, typ=vector), place, align=4)

        return types.void(numbers), generate

    return panel


_four_rows, _one_row = _panel(4), _panel(1)


@quick()
def add_product(out: tuple[int, int], x: tuple[int, int], a: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
    """Add a product of two matrices, as fast as the processor multiplies.

    Numba's vectoriser does not keep sums in registers, so the innermost loop is written in LLVM's own language.

    Parameters
    ----------
    out, x : tuple of int
        Addresses of sums, and of what is multiplied, and bytes from one of their rows to the next.
    a : tuple of int
        Address of the factors, bytes from those of one row of sums to the next, and from one of them to the next.
    shape : tuple of int
        Rows of sums, rows of x, and their width, a multiple of 16.
    """
    sums, line = out
    rows, rows_line = x
    factors, row, step = a
    m, n, width = shape
    fours = m - m % 4
    for q in range(0, 4 * width, 4 * 2 * _LANES):
        for i in range(0, fours, 4):
            _four_rows((sums + i * line + q, line, rows + q, rows_line, factors + i * row, row, step, n))
        for i in range(fours, m):
            _one_row((sums + i * line + q, line, rows + q, rows_line, factors + i * row, row, step, n))


@quick()
def exp(x: Any) -> Any:
    """Return e**x, as exact as x · log2(e) is in float32; for x outside -87 to 88, that of the nearest number inside."""
    power = min(max(x * _LOG2_E, _LEAST), _MOST)  # in this order, which keeps what is not a number
    whole = np.floor(power)
    f = power - whole
    p = _P5 + f * _P6
    p = _P4 + f * p
    p = _P3 + f * p
    p = _P2 + f * p
    p = _P1 + f * p
    return (np.float32(1) + f * p) * _as_float((np.int32(whole) + np.int32(127)) << np.int32(23))


@quick(inline="always")
def line(address: int, at: int, width: int) -> Any:
    """Return the float32 numbers from the one with index ``at`` on."""
    return nb.carray(pointer(address + 4 * at), (width,), np.float32)


@quick(inline="always")
def matrix(address: int, rows: int, width: int) -> Any:
    """Return rows of float32 numbers that lie one behind the other."""
    return nb.carray(pointer(address), (rows, width), np.float32)


class Team:
    """The threads that run a compiled function: as many as torch has.

    Parameters
    ----------
    compiled : callable
        Returns the function, and the process that has its threads. It takes what to do, how many threads share it, a scale,
        and ``NUMBERS`` integers.

    Raises
    ------
    RuntimeError
        Numba has no threads that several threads of a process may share, or those of the process this one was forked from.

    Attributes
    ----------
    size : int
    """

    def __init__(self, compiled: Callable[[], tuple[Any, int]]) -> None:
        threads = torch.get_num_threads()
        self.size = min(threads, nb.config.NUMBA_NUM_THREADS)
        try:
            self._function, self._process = compiled()
        finally:
            torch.set_num_threads(threads)  # OpenMP is torch's, too, and Numba starts it with a thread per core
        self._local = threading.local()
        self._gather()

    def run(self, what: int, parts: int, scale: float, *numbers: int) -> None:
        """Do something with so many threads."""
        self._gather()
        self._function(what, parts, scale, numbers + (0,) * (NUMBERS - len(numbers)))

    def _gather(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("Numba's threads did not come along when this process was forked; load the engine here")
        if not getattr(self._local, "ready", False):
            nb.set_num_threads(self.size)  # of the calling thread
            self._local.ready = True
