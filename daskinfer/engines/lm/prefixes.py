"""Which prompts begin alike: found without being told, computed once, kept while there is memory.

Prompts are read in blocks. Each prompt is counted at every block it passes through, so the count says how many prompts
begin like this one up to there; where it falls, a shared segment ends. Counts are only hints: a row hangs on a segment
when its tokens are equal to the segment's.

A segment is not free: every step and layer has one more call for it, however many rows hang on it. On the CPU that was
measured with, a call costs as much as reading two tokens. So a row that would hang on it alone does so only when that saves
it more tokens than twice those it may write.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from daskinfer.engines.lm.sequences import Row, Segment

__all__ = ["Prefixes"]

BLOCK = 16
_DEEPEST = 4  # segments in a chain: each costs a call per layer and step
_COUNTS = 200_000
_STEP = 2  # tokens that can be read in the time that one segment costs in one step


class Prefixes:
    """The tree of shared segments.

    Parameters
    ----------
    min_tokens : int
        Shortest segment.
    min_saved : int
        A segment is made when the prompts known to share it save at least so many tokens by it.
    """

    def __init__(self, min_tokens: int = 32, min_saved: int = 128) -> None:
        self.min_tokens, self.min_saved = min_tokens, min_saved
        self.hits = self.hit_tokens = 0
        self._counts: dict[int, int] = {}  # of all prompts
        self._held: dict[int, int] = {}  # of those that wait or run
        self._children: dict[Segment | None, list[Segment]] = {None: []}
        self._clock = 0

    @property
    def segments(self) -> list[Segment]:
        """All of them."""
        return [segment for segment in self._children if segment is not None]

    def observe(self, prompt: Tokens[int]) -> None:
        """Count a prompt; :meth:`forget` it when its row is gone."""
        if len(self._counts) > _COUNTS:
            self._counts = {key: count for key, count in self._counts.items() if count > 1}
            if len(self._counts) > _COUNTS // 2:
                self._counts.clear()
        for key in _keys(prompt):
            self._counts[key] = self._counts.get(key, 0) + 1
            self._held[key] = self._held.get(key, 0) + 1

    def forget(self, prompt: Tokens[int]) -> None:
        """Count a prompt no longer as one that waits or runs."""
        for key in _keys(prompt):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    def chain(self, row: Row) -> tuple[Segment, ...]:
        """Return the chain for a row: segments that are there, then new ones that are worth it.

        The last token of the prompt is never part of it, since the answer follows from that token. The row is not counted
        as a user before :meth:`attach`; new segments join the tree then.
        """
        chain: list[Segment] = []
        parent: Segment | None = None
        found: Segment | None = None
        at, most = 0, len(row.prompt) - 1
        keys = _keys(row.prompt[:most])
        while len(chain) < _DEEPEST:
            found = self._match(parent, row.prompt, at, most)
            if found is None or not (
                found.users or self._pays(row, len(found.tokens), keys[(at + len(found.tokens)) // BLOCK - 1])
            ):
                break
            chain.append(found)
            parent, at = found, at + len(found.tokens)
        for stop in self._stops(row, at, keys) if found is None else ():
            if len(chain) == _DEEPEST:
                break
            chain.append(Segment(list(row.prompt[at:stop]), chain=tuple(chain)))
            at = stop
        return tuple(chain)

    def served(self, chain: tuple[Segment, ...]) -> None:
        """Count a row that runs behind a chain; what of it was there already, computed or under way, is a hit."""
        found = sum(len(segment.tokens) for segment in chain if segment.computed)
        self.hits += found > 0
        self.hit_tokens += found

    def attach(self, chain: tuple[Segment, ...]) -> None:
        """Count one more user of each segment of a chain, and take new ones into the tree."""
        self._clock += 1
        parent: Segment | None = None
        for segment in chain:
            if segment not in self._children:
                self._children[segment] = []
                self._children[parent].append(segment)
            segment.users += 1
            segment.used_at = self._clock
            parent = segment

    def detach(self, chain: tuple[Segment, ...]) -> list[Segment]:
        """Count one user less; return segments dropped because they were never completed."""
        for segment in chain:
            segment.users -= 1
        dropped = []
        for segment in reversed(chain):
            if segment.users == 0 and not segment.complete and not self._children[segment]:
                self._drop(segment)
                dropped.append(segment)
        return dropped

    def oldest_unused(self) -> Segment | None:
        """Return the segment without users and children that was used the longest time ago."""
        unused = [s for s, children in self._children.items() if s is not None and not s.users and not children]
        return min(unused, key=lambda segment: segment.used_at, default=None)

    def drop(self, segment: Segment) -> None:
        """Forget an unused segment."""
        assert segment.users == 0, "a segment in use is dropped"
        self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        parent = segment.chain[-1] if segment.chain else None
        self._children[parent].remove(segment)
        del self._children[segment]

    def _match(self, parent: Segment | None, prompt: list[int], at: int, most: int) -> Segment | None:
        fitting = (
            s
            for s in self._children[parent]
            if at + len(s.tokens) <= most and prompt[at : at + len(s.tokens)] == s.tokens
        )
        return max(fitting, key=lambda segment: len(segment.tokens), default=None)

    def _pays(self, row: Row, tokens: int, key: int) -> bool:
        """Whether the rows held whose prompts begin as ``key`` says save more than it costs by sharing so many tokens."""
        others = max(self._held.get(key, 1) - 1, 1)
        return others * tokens >= _STEP * row.expected

    def _stops(self, row: Row, at: int, keys: list[int]) -> list[int]:
        """Return where the segments behind ``at`` end that would be worth making."""
        counts = [self._counts.get(key, 0) for key in keys]
        stops = []
        begin = at
        for block, count in enumerate(counts):
            stop = (block + 1) * BLOCK
            after = counts[block + 1] if block + 1 < len(counts) else 0
            tokens = stop - begin
            worth = tokens >= self.min_tokens and after < count and (count - 1) * tokens >= self.min_saved
            if worth and self._pays(row, tokens, keys[block]):
                stops.append(stop)
                begin = stop
        return stops


def _keys(prompt: Tokens[int]) -> list[int]:
    """Return one number per whole block that stands for the prompt up to the block's end."""
    keys, key = [], 0
    for stop in range(BLOCK, len(prompt) + 1, BLOCK):
        key = hash((key, *prompt[stop - BLOCK : stop]))
        keys.append(key)
    return keys
