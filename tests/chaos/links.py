"""Workers in network namespaces of their own, each on a link that can be cut, slowed down and healed. Linux, root only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.chaos.processes import Place

__all__ = ["Link", "links", "missing_for_links"]

SLOW = (
    ["netem", "delay", "150ms", "50ms"],
    ["tbf", "rate", "128kbit", "burst", "4kb", "latency", "60s"],  # where the kernel has no netem: packets queue up
)


class Link:
    """A namespace, and the pair of network devices that joins it to this one.

    Parameters
    ----------
    number : int
        Tells the links of one cluster apart.
    """

    def __init__(self, number: int) -> None:
        name = f"{os.getpid() % 100_000}n{number}"
        self.space, self.here, self.there = f"chaos{name}", f"ch{name}", f"ct{name}"
        network = f"10.{200 + os.getpid() % 50}.{number}"
        self.host, self.address = f"{network}.1", f"{network}.2"

    def make(self) -> None:
        """Create it."""
        _ip("netns", "add", self.space)
        _ip("link", "add", self.here, "type", "veth", "peer", "name", self.there)
        _ip("link", "set", self.there, "netns", self.space)
        _ip("addr", "add", f"{self.host}/24", "dev", self.here)
        _ip("link", "set", self.here, "up")
        _ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", self.there)
        _ip("-n", self.space, "link", "set", self.there, "up")
        _ip("-n", self.space, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Delete it; does nothing where it is not."""
        for arguments in (("link", "del", self.here), ("netns", "del", self.space)):
            with suppress(subprocess.CalledProcessError):
                _ip(*arguments)

    @property
    def place(self) -> Place:
        """Where a worker runs behind this link."""
        return Place(["ip", "netns", "exec", self.space], self.host, self.address)

    def cut(self) -> None:
        """Let nothing through; both ends go on waiting, as when a cable is pulled somewhere between two switches."""
        _ip("-n", self.space, "link", "set", self.there, "down")

    def slow(self) -> None:
        """Delay what is sent in both directions."""
        for before, device in ((["-n", self.space], self.there), ([], self.here)):
            for discipline in SLOW:
                with suppress(subprocess.CalledProcessError):
                    _run("tc", *before, "qdisc", "replace", "dev", device, "root", *discipline)
                    break

    def heal(self) -> None:
        """Undo :meth:`cut` and :meth:`slow`."""
        _ip("-n", self.space, "link", "set", self.there, "up")
        for before, device in ((["-n", self.space], self.there), ([], self.here)):
            with suppress(subprocess.CalledProcessError):
                _run("tc", *before, "qdisc", "del", "dev", device, "root")


@contextmanager
def links(count: int) -> Iterator[Sequence[Link]]:
    """Make links, and remove them at the end."""
    made = [Link(number) for number in range(count)]
    try:
        for link in made:
            link.make()
        yield made
    finally:
        for link in made:
            link.remove()


def missing_for_links() -> str:
    """Return what this machine lacks for namespaces; "" where they work."""
    if os.geteuid() != 0:
        return "root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (iproute2)"
    probe = Link(250)
    try:
        probe.make()
    except subprocess.CalledProcessError as error:
        return f"network namespaces ({error.stderr.strip()})"
    finally:
        probe.remove()
    return ""


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
