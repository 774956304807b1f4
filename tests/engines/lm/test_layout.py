"""Slots and memory: content survives all moves, and the budget holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.engines.lm.layout import Layout, Move, Operation, Resize, slot_sizes


class Memory:
    """Does to lists what the cache does to tensors."""

    def __init__(self) -> None:
        self.pools: dict[int, list[list[Any]]] = {}

    def apply(self, operations: list[Operation]) -> None:
        for op in operations:
            if isinstance(op, Resize):
                old = self.pools.get(op.size, [])
                fresh = [[None] * op.size for _ in range(op.rows - op.kept)]
                assert op.kept <= op.rows
                self.pools[op.size] = [list(slot) for slot in old[: op.kept]] + fresh
            else:
                source = self.pools[op.from_size][op.from_index][: op.tokens]
                self.pools[op.to_size][op.to_index][: op.tokens] = source


def test_sizes_grow_by_at_most_a_half() -> None:
    sizes = slot_sizes(64, 1500)
    assert sizes == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536]
    assert slot_sizes(64, 10) == [64]


def test_a_row_that_outgrows_its_slot_moves_and_leaves_no_hole() -> None:
    layout = Layout(1000, 8, 64)
    assert layout.reserve("a", 8)
    assert layout.reserve("b", 5)
    assert layout.reserve("a", 9)
    layout.compact()
    assert layout.places["a"].size == 12
    assert layout.rows(8) == ["b"]
    moves = [op for op in layout.take_operations() if isinstance(op, Move)]
    assert moves == [Move(8, 0, 12, 0, 8), Move(8, 1, 8, 0, 5)]


def test_no_memory_changes_nothing() -> None:
    layout = Layout(20, 8, 64)
    assert layout.reserve("a", 8)
    before = (layout.allocated, dict(layout.places), len(layout.operations))
    assert not layout.reserve("b", 16)
    assert not layout.share(13)
    assert layout.allocated <= 20
    assert dict(layout.places) == before[1]


def test_expected_length_is_reserved_only_while_there_is_memory() -> None:
    layout = Layout(24, 8, 64)
    assert layout.reserve("a", 3, expected=16)
    assert layout.places["a"].size == 16
    assert layout.reserve("b", 3, expected=16)
    assert layout.places["b"].size == 8


def test_room_that_a_pool_does_not_need_goes_to_another() -> None:
    layout = Layout(64, 8, 64)
    assert all(layout.reserve(i, 8) for i in range(8))
    for i in range(8):
        layout.release(i)
    assert layout.allocated == 64
    assert layout.reserve("long", 48)
    assert layout.allocated <= 64


@pytest.mark.parametrize(("tokens", "fits"), [(48, True), (49, False), (10_000, False)])
def test_what_fits_alone(tokens: int, fits: bool) -> None:
    assert Layout(50, 8, 64).fits_alone(tokens) is fits


Action = tuple[str, int, int]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["grow", "grow", "release", "share", "step"]), st.integers(0, 7), st.integers(1, 20)),
        max_size=60,
    ),
    st.integers(16, 200),
)
def test_content_survives_and_the_budget_holds(actions: list[Action], budget: int) -> None:
    layout, memory = Layout(budget, 8, 64), Memory()
    written: dict[int, int] = {}

    def run() -> None:
        layout.compact()
        memory.apply(layout.take_operations())
        for row, length in written.items():
            place = layout.places[row]
            slot = memory.pools[place.size][place.index]
            known = sum(1 for at in range(length) if slot[at] == (row, at))
            for at in range(length):
                slot[at] = (row, at)
            assert known >= kept.get(row, 0), f"row {row} lost content"
            kept[row] = length

    kept: dict[int, int] = {}
    for kind, row, n in actions:
        if kind == "grow":
            wanted = min(written.get(row, 0) + n, 64)
            if layout.reserve(row, wanted, expected=min(wanted + n, 64)):
                written[row] = wanted
        elif kind == "release":
            layout.release(row)
            written.pop(row, None)
            kept.pop(row, None)
        elif kind == "share":
            if not layout.share(n) and layout.shared >= n:
                layout.share(-n)
        else:
            run()
        assert layout.allocated <= budget
        assert layout.used <= layout.allocated
    run()
    for size in {place.size for place in layout.places.values()}:
        assert None not in layout.rows(size), "rows sit at the front"
