"""The asynchronous twin, by Dask's convention: on an asynchronous Client the same methods are awaitable.

The plain method runs in a thread, from where it uses the client's event loop as it always does. So there is one
implementation, and the loop is never blocked.

Runs on: client.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, ParamSpec, TypeVar, cast

__all__ = ["awaitable", "iterated"]

P = ParamSpec("P")
T = TypeVar("T")
_END = object()


def awaitable(method: Callable[P, T]) -> Callable[P, T]:
    """Let a method be awaited where its object says that it is ``asynchronous``; elsewhere it is as written."""

    @functools.wraps(method)
    def either(*args: P.args, **kwargs: P.kwargs) -> T:
        owner: Any = args[0]
        if not owner.asynchronous:
            return method(*args, **kwargs)
        return cast("T", asyncio.to_thread(method, *args, **kwargs))

    return either


def iterated(method: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Let a method that returns an iterator return an asynchronous one where its object is ``asynchronous``."""

    @functools.wraps(method)
    def either(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        owner: Any = args[0]
        if not owner.asynchronous:
            return method(*args, **kwargs)
        return cast("Iterator[T]", stepped(functools.partial(method, *args, **kwargs)))

    return either


async def stepped(begin: Callable[[], Iterator[T]]) -> AsyncIterator[T]:
    """Yield the items of an iterator that is made and advanced in threads; leaving early closes it."""
    iterator = await asyncio.to_thread(begin)
    try:
        while (item := await asyncio.to_thread(next, iterator, _END)) is not _END:
            yield cast("T", item)
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            await asyncio.shield(_thread(close))


def _thread(function: Callable[[], object]) -> Coroutine[Any, Any, object]:
    return asyncio.to_thread(function)
