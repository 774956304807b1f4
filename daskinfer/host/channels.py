"""Two ways to an engine: a child process, or a thread. Same messages, same promises.

Runs on: worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from daskinfer.config import ModelSpec
from daskinfer.errors import RemoteError, describe
from daskinfer.host.child import HEADER, pack, unpack_length

__all__ = ["Channel", "ProcessChannel", "ThreadChannel"]

logger = logging.getLogger("daskinfer.engine")

Deliver = Callable[[tuple[Any, ...]], None]
Ended = Callable[[str], None]

MALLOC_BYTES = str(1 << 30)
_WAITING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}  # some 30 µs of GNU's OpenMP, 1 ms of LLVM's
GONE_POLL_S = 0.02
END_S = 2.0


class Channel(Protocol):
    """A way to one running engine. Callbacks come on the event loop that ``open`` ran on."""

    pid: int | None

    async def open(self, deliver: Deliver, ended: Ended) -> None:
        """Start the engine; ``deliver`` gets its messages, ``ended`` (once) the reason why no more will come."""

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message; after the end it goes nowhere."""

    async def kill(self) -> None:
        """End the engine by force, and wait until it is gone where that is possible."""


class ProcessChannel:
    """An engine in a child process with a session of its own.

    Parameters
    ----------
    spec : ModelSpec
    threads : int
        Compute threads.
    env : mapping
        Further environment variables (devices).
    """

    def __init__(self, spec: ModelSpec, threads: int, env: Mapping[str, str] | None = None) -> None:
        self._spec = spec
        self._env = {**os.environ, **child_environment(threads), **(env or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._leash: int | None = None
        self.pid: int | None = None

    async def open(self, deliver: Deliver, ended: Ended) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        leash, self._leash = os.pipe()
        fds = (theirs.fileno(), leash)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "daskinfer.host.child", *map(str, (*fds, os.getpid()))),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,
                env={**self._env, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        except BaseException:  # also when a restart is cancelled because the host closes
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(leash)
        self.pid = self._process.pid
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        self.send(("start", sys.path, pickle.dumps(self._spec)))
        log = asyncio.create_task(self._log_output())
        receive = asyncio.create_task(self._receive(reader, log, deliver, ended))
        self._tasks = [log, receive, asyncio.create_task(self._watch(reader, receive))]

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def kill(self) -> None:
        """Kill the process and everything in its session's process group."""
        if self._process is None:
            return
        if self._process.returncode is None:
            _kill_group(self._process.pid)
        await self._gone()
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others, timeout=1)
        for task in others:  # a helper with a session of its own may hold the engine's stdout for ever
            task.cancel()
        self._process._transport.close()  # type: ignore[attr-defined] # noqa: SLF001 - nothing else closes that pipe
        self._close_pipe()

    async def _gone(self) -> int:
        """Wait for the process alone: ``wait()`` also waits until everybody has closed its stdout."""
        assert self._process is not None
        while self._process.returncode is None:  # noqa: ASYNC110 - asyncio has no event for the process alone
            await asyncio.sleep(GONE_POLL_S)
        return self._process.returncode

    async def _watch(self, reader: asyncio.StreamReader, receive: asyncio.Task[None]) -> None:
        """End the messages with the process, though a child of its with another session may hold the socket."""
        await self._gone()
        assert self._process is not None
        _kill_group(self._process.pid)  # helpers that the engine started and left behind
        await asyncio.wait([receive], timeout=END_S)
        if not receive.done():
            reader.feed_eof()

    def _close_pipe(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._leash is not None:
            os.close(self._leash)
            self._leash = None

    async def _receive(
        self, reader: asyncio.StreamReader, log: asyncio.Task[None], deliver: Deliver, ended: Ended
    ) -> None:
        try:
            while True:
                header = await reader.readexactly(HEADER)
                deliver(pickle.loads(await reader.readexactly(unpack_length(header))))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - a message that cannot be read ends the conversation, not the host
            logger.warning("[%s] a message of the engine cannot be read: %s", self.pid, describe(error))
        assert self._process is not None
        self._close_pipe()  # a child that still lives ends now
        try:
            code = await asyncio.wait_for(self._gone(), 10)
        except TimeoutError:
            _kill_group(self._process.pid)
            code = await self._gone()
        await asyncio.wait([log], timeout=1)
        ended(describe_exit(code))

    async def _log_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        stream = self._process.stdout
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the stream's limit, which readline has dropped
                continue
            if not line:
                return
            logger.info("[%s] %s", self.pid, line.decode(errors="replace").rstrip())


class ThreadChannel:
    """An engine in a thread of this process: for light engines and for debugging.

    A hang cannot be ended and a crash takes the worker along.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = False
        self.pid: int | None = None

    async def open(self, deliver: Deliver, ended: Ended) -> None:
        """Start the thread."""
        from daskinfer.host.loop import serve

        loop = asyncio.get_running_loop()

        def post(call: Callable[[Any], None], value: Any) -> None:
            try:
                loop.call_soon_threadsafe(call, value)
            except RuntimeError:  # the loop is closed: nobody listens any more
                self._open = False

        def run() -> None:
            reason = "the engine's loop ended"
            try:
                serve(self._spec, self._inbox, lambda message: post(deliver, message))
            except BaseException as error:  # noqa: BLE001 - SystemExit from a model's code must not vanish
                remote = RemoteError.from_exception(error)
                logger.warning("the engine raised %s", remote.type_name)  # its text may quote a row
                reason = f"the engine raised {remote.type_name}: {remote.message}"
            post(ended, reason)

        self._open = True
        self._thread = threading.Thread(target=run, name=f"daskinfer-{self._spec.key}", daemon=True)
        self._thread.start()

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message."""
        if self._open:
            self._inbox.put(message)

    async def kill(self) -> None:
        """Ask the thread to end, and wait a little: a thread cannot be killed."""
        self._inbox.put(("close",))
        self._open = False
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 5.0)


def child_environment(threads: int) -> dict[str, str]:
    """Return what an engine's process needs to run at full speed under a Dask worker.

    Dask's nanny sets one thread for numeric libraries and a malloc trim threshold that makes torch give its memory back
    and fault it in again at every step; glibc reads these when a process starts. A thread of OpenMP that waits for others
    soon sleeps instead of spinning: where other processes want the same cores, spinning threads keep the awaited ones
    from running.
    """
    env = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    env |= {"MALLOC_TRIM_THRESHOLD_": MALLOC_BYTES, "MALLOC_MMAP_THRESHOLD_": MALLOC_BYTES}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONUNBUFFERED": "1"}
    env.setdefault("TOKENIZERS_PARALLELISM", os.environ.get("TOKENIZERS_PARALLELISM", "true"))
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", *_WAITING)):
        env |= _WAITING
    return env


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Return how a process ended, in words."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (the kernel does that when memory runs out)" if name == "SIGKILL" else ""
        return f"the engine's process was killed by {name}{hint}"
    return f"the engine's process ended with exit code {code}"
