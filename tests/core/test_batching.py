"""How rows are cut into batches, and how their results come back into order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.batching import Fleet, Pending, Reorder, Speed, batch_rows, rows_wanted
from daskinfer.config import BatchPolicy
from daskinfer.records import Completed, Failed, Request, Result


def rows(*ids: int, text: str = "x") -> tuple[Request, ...]:
    return tuple(Request(i, text) for i in ids)


def ids(requests: tuple[Request, ...]) -> list[int]:
    return [request.id for request in requests]


# ---------------------------------------------------------------- sizes


def test_without_a_worker_a_batch_has_one_row_and_a_first_piece_is_read() -> None:
    assert batch_rows(BatchPolicy(), Fleet(), 0.0, None) == 1
    assert rows_wanted(BatchPolicy(), Fleet(), 1, 0) == 1_024
    assert rows_wanted(BatchPolicy(), Fleet(), 1, 2_000) == 0


def test_enough_is_read_for_half_the_slots_and_for_two_batches() -> None:
    assert rows_wanted(BatchPolicy(), Fleet(1, 8, 32), 16, 0) == 64
    assert rows_wanted(BatchPolicy(), Fleet(1, 2, 32), 16, 10) == 22
    assert rows_wanted(BatchPolicy(), Fleet(1, 8, 32), 16, 100) == 0


def test_a_given_number_of_rows_is_taken() -> None:
    assert batch_rows(BatchPolicy(rows=7), Fleet(1, 8, 32), 1e6, 3) == 7


@given(
    st.integers(1, 64), st.integers(1, 16), st.integers(1, 512), st.floats(0, 1e6), st.none() | st.integers(0, 10**9)
)
def test_a_batch_has_rows_within_bounds(
    workers: int, slots: int, capacity: int, speed: float, remaining: int | None
) -> None:
    fleet = Fleet(workers, workers * slots, workers * capacity)
    size = batch_rows(BatchPolicy(slots=slots), fleet, speed, remaining)
    assert 1 <= size <= 1 << 14
    if remaining is not None:
        assert size <= batch_rows(BatchPolicy(slots=slots), fleet, speed, None)


def test_speed_is_unknown_before_two_observations_and_forgets() -> None:
    speed = Speed()
    assert speed.rows_per_s == 0
    speed.add(100, 0.0)
    assert speed.rows_per_s == 0
    speed.add(100, 1.0)
    assert speed.rows_per_s == pytest.approx(100)
    for second in range(2, 60):
        speed.add(10, float(second))
    assert speed.rows_per_s == pytest.approx(10, rel=0.01)
    speed.add(10, 0.0)  # a clock that goes back counts as no time
    assert speed.rows_per_s > 0


# ---------------------------------------------------------------- rows that wait


def test_older_rows_go_first_and_a_batch_has_one_priority() -> None:
    pending = Pending()
    pending.push(rows(5, 6), arrival=5)
    pending.push(rows(1, 2), arrival=1)
    pending.push(rows(9), arrival=9, priority=3)
    pending.push((), arrival=10)
    assert pending.head == Request(9, "x")
    taken, size, arrival, priority = pending.cut(10, 1_000)
    assert (ids(taken), size, arrival, priority) == ([9], 2, 9, 3)
    taken, _, arrival, priority = pending.cut(3, 1_000)
    assert (ids(taken), arrival, priority) == ([1, 2, 5], 1, 0)
    assert ids(pending.cut(3, 1_000)[0]) == [6]
    assert pending.head is None
    assert len(pending) == 0


def test_a_batch_is_cut_at_its_bytes_and_one_row_always_fits() -> None:
    pending = Pending()
    pending.push(rows(0, 1, 2, text="x" * 99), arrival=0)
    assert ids(pending.cut(10, 250)[0]) == [0, 1]
    assert ids(pending.cut(10, 1)[0]) == [2]


def test_what_waits_can_be_cleared() -> None:
    pending = Pending()
    pending.push(rows(3, 4), arrival=3)
    pending.push(rows(0, 1), arrival=0)
    pending.push(rows(7), arrival=7, priority=1)
    assert [request.id for request in pending.clear()] == [7, 0, 1, 3, 4]
    assert len(pending) == 0
    assert not pending


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(-2, 2)), max_size=20), st.integers(1, 9), st.integers(1, 40))
def test_every_row_is_cut_once(blocks: list[tuple[int, int]], most: int, size: int) -> None:
    pending, pushed = Pending(), 0
    for count, priority in blocks:
        pending.push(rows(*range(pushed, pushed + count)), arrival=pushed, priority=priority)
        pushed += count
    cut: list[tuple[int, int]] = []
    while pending:
        taken, used, arrival, priority = pending.cut(most, size)
        assert 1 <= len(taken) <= most
        assert used == sum(request.size for request in taken) <= max(size, taken[0].size)
        assert arrival == taken[0].id
        cut += [(-priority, request.id) for request in taken]
    assert cut == sorted(cut)
    assert sorted(row for _, row in cut) == list(range(pushed))


# ---------------------------------------------------------------- order


@given(st.permutations(range(12)), st.integers(1, 5))
def test_c32_results_come_in_the_order_in_which_rows_were_offered(finished: list[int], at_once: int) -> None:
    offered = [5, 3, 8, *(i for i in range(12) if i not in (5, 3, 8))]
    reorder = Reorder(1_000)
    reorder.expect(offered[:6])
    reorder.expect(offered[6:])
    given_back: list[int] = []
    for start in range(0, 12, at_once):
        results: list[Result] = [Completed(i, "x") for i in finished[start : start + at_once]]
        given_back += [result.id for result in reorder.add(results)]
        assert reorder.head == (offered[len(given_back)] if len(given_back) < 12 else None)
    assert given_back == offered
    assert reorder.bytes == 0


def test_what_waits_for_its_turn_is_weighed() -> None:
    reorder = Reorder(700)
    reorder.expect(range(5))
    vector = np.zeros(100, np.float32)
    assert reorder.add([Completed(1, "x" * 36), Failed(2, "error", "x" * 36), Completed(3, {"a": 1})]) == []
    assert reorder.bytes == 100 + 100 + 128
    assert not reorder.full
    reorder.add([Completed(4, vector)])
    assert reorder.bytes == 328 + 464
    assert reorder.full
    assert [result.id for result in reorder.add([Completed(0, "")])] == [0, 1, 2, 3, 4]
    assert (reorder.bytes, reorder.full, reorder.head) == (0, False, None)
