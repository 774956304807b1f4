"""The engines that partitions share: one per specification and process, loaded on first use, closed when idle.

::

    acquire ─▶ loading ──▶ serving, held by n partitions ──release──▶ idle ──idle_s──▶ closed
                 │                                                     │
                 ├── failed: forgotten, the next one tries again       └──acquire──▶ serving
                 └── nobody waits any more: idle, though it still loads

Everything here runs on one event loop: that of the Dask worker, or of a thread of ours (:mod:`daskinfer.dataframe.home`).

Runs on: worker, client.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from daskinfer.config import HealthPolicy, ModelSpec
from daskinfer.errors import ModelLoadError, RemoteError
from daskinfer.host import Host, HostSettings

__all__ = ["Engines"]

logger = logging.getLogger("daskinfer.dataframe")


@dataclass(eq=False)
class _Held:
    """One engine, and how many use it."""

    host: Host
    loading: asyncio.Task[Any]
    users: int = 0
    timer: asyncio.TimerHandle | None = None


class Engines:
    """Engines by the key of their specification.

    Parameters
    ----------
    where : str
        The worker's address, or another name for this process, for messages.
    threads : int
        Compute threads of an engine whose specification does not say.
    """

    def __init__(self, where: str, threads: int) -> None:
        self.where = where
        self.threads = threads
        self.closed = False
        self._held: dict[str, _Held] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    async def acquire(self, spec: ModelSpec, health: HealthPolicy, idle_s: float) -> Host:
        """Return a running engine, loading it when there is none; pair it with :meth:`release`.

        When this is cancelled and nobody else waits, the engine is closed ``idle_s`` seconds later, loaded or not.

        Raises
        ------
        ModelLoadError
            It cannot be loaded here, or it died too often; the next caller tries again.
        """
        held = self._held.get(spec.key)
        if held is None or held.host.state in ("failed", "closed"):
            held = self._held[spec.key] = self._load(spec, health)
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None
        held.users += 1
        try:
            await asyncio.shield(held.loading)
        except RemoteError as error:
            self._forget(spec.key, held)
            raise ModelLoadError(spec.model, {self.where: str(error)}) from None
        except BaseException:
            self._left(spec.key, held, idle_s)
            raise
        return held.host

    def release(self, spec: ModelSpec, host: Host, idle_s: float) -> None:
        """Give an engine back; it is closed when nobody has asked for it again within ``idle_s`` seconds."""
        held = self._held.get(spec.key)
        if held is None or held.host is not host:
            return
        self._left(spec.key, held, idle_s)

    async def close(self, *, idle_only: bool = False) -> None:
        """Close the engines, or those that nobody uses at the moment."""
        self.closed = self.closed or not idle_only
        gone = [key for key, held in self._held.items() if not (idle_only and held.users)]
        # at exit a thread's engine can no longer be waited for, and need not be
        closed = (_closed(self._held.pop(key)) for key in gone)
        await asyncio.gather(*closed, *self._closing, return_exceptions=True)

    # ---------------------------------------------------------------- how

    def _load(self, spec: ModelSpec, health: HealthPolicy) -> _Held:
        settings = HostSettings(health, spec.threads or self.threads, {}, self.where)
        host = Host(spec, settings)
        logger.info("%s loads %s", self.where, spec.model)
        return _Held(host, asyncio.create_task(host.start()))

    def _forget(self, key: str, held: _Held) -> None:
        if self._held.get(key) is held:
            del self._held[key]

    def _left(self, key: str, held: _Held, idle_s: float) -> None:
        held.users -= 1
        if held.users == 0:
            held.timer = asyncio.get_running_loop().call_later(idle_s, self._expire, key, held)

    def _expire(self, key: str, held: _Held) -> None:
        if self._held.get(key) is held and held.users == 0:
            del self._held[key]
            logger.info("%s closes %s: nobody used it for a while", self.where, held.host.spec.model)
            closing = asyncio.create_task(_closed(held))
            self._closing.add(closing)  # the loop itself keeps no hold of its tasks
            closing.add_done_callback(self._closing.discard)


async def _closed(held: _Held) -> None:
    if held.timer is not None:
        held.timer.cancel()
    if not held.loading.done():
        held.loading.cancel()
    await held.host.close()
