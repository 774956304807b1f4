"""The engine's own process: ``python -m daskinfer.host.child FD LEASH PARENT``.

It has its own session and speaks its protocol on its own file descriptor; stdout and stderr belong to the model's code. It
ends when the other end of that descriptor is closed, whatever it is doing, and on Linux also when its parent dies; a SIGTERM
to everything on its machine is left to the parent, which first gives the rows back. A guard,
forked before anything is loaded, holds a leash: a pipe whose other end the parent has. When that end is closed the guard
kills the whole process group, with what the engine itself has started, even if the engine is stuck in C code.

Runs on: worker (as a child process of it).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
from typing import Any

__all__ = ["main", "pack", "unpack_length"]

_LENGTH = struct.Struct("!Q")
HEADER = _LENGTH.size


def pack(message: tuple[Any, ...]) -> bytes:
    """Return a message as one frame: its length in 8 bytes, then its pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def unpack_length(header: bytes) -> int:
    """Return the number of bytes that follow a frame's header."""
    return int(_LENGTH.unpack(header)[0])


def main(fd: int, leash: int, parent: int) -> int:
    """Serve one engine on an inherited socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # unlike SIG_IGN not inherited by what the engine starts
    _fork_guard(fd, leash)
    _die_with_parent(parent)
    os.set_inheritable(fd, False)
    channel = socket.socket(fileno=fd)
    stream = channel.makefile("rb", buffering=1 << 20)
    inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    _, sys.path[:], spec_bytes = pickle.loads(_read(stream))
    spec = pickle.loads(spec_bytes)
    threading.Thread(target=_receive, args=(stream, inbox), name="daskinfer-receive", daemon=True).start()

    from daskinfer.host.loop import serve

    serve(spec, inbox, lambda message: channel.sendall(pack(message)))
    channel.shutdown(socket.SHUT_WR)
    return 0


def _read(stream: Any) -> bytes:
    header = stream.read(HEADER)
    if len(header) < HEADER:
        raise EOFError
    body: bytes = stream.read(unpack_length(header))
    return body


def _receive(stream: Any, inbox: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Read messages for ever; the end of the stream ends the process, even in the middle of a step."""
    try:
        while True:
            inbox.put(pickle.loads(_read(stream)))
    except (EOFError, OSError):
        os._exit(0)


def _fork_guard(fd: int, leash: int) -> None:
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        for inherited in (0, 1, 2):
            os.dup2(nothing, inherited)
        os.close(fd)
        os.read(leash, 1)
        os.killpg(0, signal.SIGKILL)
    os.close(leash)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
