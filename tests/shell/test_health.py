"""What the scheduler makes of heartbeats, pauses and unplaced batches; on a scheduler that is only played."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from daskinfer.config import HealthPolicy
from daskinfer.health import KEPT, Watch

HEALTH = HealthPolicy(heartbeat_timeout_s=4, detection_interval_s=1, failure_threshold=2, start_timeout_s=10)
KEY = "k"


class Played:
    """A scheduler with workers that beat when told to; wall time is whatever a test says."""

    def __init__(self, *addresses: str) -> None:
        self.workers = {address: worker(address) for address in addresses}
        self.unrunnable: dict[Any, float] = {}
        self.events: list[dict[str, Any]] = []
        self.removed: list[tuple[str, str]] = []
        self.placed = 0
        self.place = False

    def log_event(self, topic: str, message: dict[str, Any]) -> None:
        self.events.append(message)

    async def remove_worker(self, address: str, *, stimulus_id: str, close: bool) -> None:
        del self.workers[address]
        self.removed.append((address, stimulus_id))

    def bulk_schedule_unrunnable_after_adding_worker(self, worker: Any) -> dict[Any, str]:
        return {"task": "waiting"}

    def transitions(self, recommended: dict[Any, str], stimulus_id: str) -> None:
        self.placed += 1
        if self.place:
            self.unrunnable.clear()


def worker(address: str) -> SimpleNamespace:
    return SimpleNamespace(
        address=address,
        last_seen=0.0,
        metrics={"daskinfer": {KEY: {"state": "ready", "batches": 0}}},
        status=SimpleNamespace(name="running"),
        processing=set(),
        nanny=None,
        name=address,
    )


def task() -> Any:
    return type("Task", (), {"resource_restrictions": {f"daskinfer-{KEY}": 1}})()


def watched(
    scheduler: Played, seconds: int, *, beats: Any = lambda _: True, watch: Watch | None = None, begin: int = 100
) -> Watch:
    """Look every second for so long; workers for which ``beats`` holds send heartbeats, by a wall clock that jumps about."""
    made = watch or Watch()
    made.want(KEY, "lease", HEALTH)

    async def go() -> None:
        for now in range(begin, begin + seconds):
            for each in scheduler.workers.values():
                if beats(each.address):
                    each.last_seen = (now * 7_919) % 1_000
            made.look(scheduler, {KEY: set(scheduler.workers)}, float(now))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        await asyncio.gather(*made._tasks)

    asyncio.run(go())
    return made


def test_a_clock_that_jumps_evicts_nobody() -> None:
    scheduler = Played("a", "b")
    assert watched(scheduler, 60).evicted == {}
    assert set(scheduler.workers) == {"a", "b"}


def test_a_silent_worker_is_removed_once_with_its_reason() -> None:
    scheduler = Played("a", "b")
    watch = watched(scheduler, 20, beats=lambda address: address == "a")
    assert set(scheduler.workers) == {"a"}
    [(address, stimulus)] = scheduler.removed
    assert (address, watch.evicted["b"]) == ("b", "silent for 6 s (it is dead, stopped or cut off)")
    assert stimulus == f"daskinfer-evicted: {watch.evicted['b']}"
    assert scheduler.events == [{"action": "evict", "worker": "b", "reason": watch.evicted["b"]}]
    watch.went("b", "name", stimulus, 120.0)
    told = watch.told(KEY, scheduler, 130.0)  # type: ignore[arg-type]
    assert told["lost"] == {"name": 10.0}
    watch.came("name")
    assert watch.told(KEY, scheduler, 130.0)["lost"] == {}  # type: ignore[arg-type]


def test_workers_that_were_retired_are_not_lost() -> None:
    watch = Watch()
    for number, reason in enumerate(["retire-workers-1", "worker-close-gracefully-2", "scale-down"]):
        watch.went(str(number), str(number), reason, 1.0)
    assert watch._lost == {}
    for number in range(2 * KEPT):
        watch.went(str(number), str(number), "handle-worker-cleanup-1", 1.0)
    assert len(watch._lost) == KEPT  # bounded, however many come and go


def test_a_paused_worker_is_left_alone_unless_batches_are_stranded_on_it() -> None:
    scheduler = Played("a", "b")
    for each in scheduler.workers.values():
        each.status.name = "paused"
    scheduler.workers["a"].processing = {task(), task()}
    scheduler.workers["a"].metrics["daskinfer"][KEY]["batches"] = 1
    watch = watched(scheduler, 20)
    assert set(watch.evicted) == {"a"}
    assert "paused" in watch.evicted["a"]


def test_batches_placed_nowhere_are_offered_again_and_then_named() -> None:
    scheduler = Played("a")
    scheduler.unrunnable = {task(): 1.0}
    watch = watched(scheduler, 5)
    assert scheduler.placed == 5
    assert watch.told(KEY, scheduler, 110.0)["unplaced_s"] == 10.0  # type: ignore[arg-type]
    scheduler.place = True
    watched(scheduler, 2, watch=watch, begin=111)
    assert watch.told(KEY, scheduler, 113.0)["unplaced_s"] == 0.0  # type: ignore[arg-type]
    scheduler.unrunnable = {task(): 1.0}
    scheduler.workers["a"].status.name = "paused"  # nobody could take them: that is another fault
    watched(scheduler, 2, watch=watch, begin=114)
    assert watch.told(KEY, scheduler, 116.0)["unplaced_s"] == 0.0  # type: ignore[arg-type]


def test_nobody_is_looked_after_when_the_lease_is_gone() -> None:
    scheduler = Played("a")
    watch = Watch()
    watch.want(KEY, "lease", HEALTH)
    watch.want(KEY, "lease", HEALTH)  # with each poll
    assert watch.keys == {KEY}
    watch.forget("other", ())
    watch.forget(KEY, ("lease",))
    assert watch.keys == {KEY}
    watch.forget(KEY, ())
    assert watch.keys == set()
    for now in range(100, 130):
        watch.look(scheduler, {}, float(now))  # type: ignore[arg-type]
    assert watch.evicted == {}
