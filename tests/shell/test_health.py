"""What the scheduler makes of heartbeats, pauses and unplaced batches; on a scheduler that is only played."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from daskinfer import health
from daskinfer.config import HealthPolicy
from daskinfer.health import KEPT, MOST_EVICTIONS, Watch
from daskinfer.scheduler_plugin import DaskinferScheduler

HEALTH = HealthPolicy(heartbeat_timeout_s=4, detection_interval_s=1, failure_threshold=2, start_timeout_s=10)
KEY = "k"


class Played:
    """A scheduler with workers that beat when told to; wall time is whatever a test says."""

    def __init__(self, *addresses: str) -> None:
        self.workers = {address: worker(address) for address in addresses}
        self.unrunnable: dict[Any, float] = {}
        self.events: list[dict[str, Any]] = []
        self.removed: list[tuple[str, str]] = []
        self.worker_ttl: float | None = 30.0
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
        if stimulus_id.startswith("daskinfer-release"):
            for worker in self.workers.values():
                worker.processing = {task for task in worker.processing if task.key not in recommended}
            return
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
        executing={},
        resources={},
        nanny=None,
        name=address,
    )


def task(name: str = "task", resource: str = f"daskinfer-{KEY}") -> Any:
    return type("Task", (), {"key": name, "resource_restrictions": {resource: 1}})()


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


def test_a_paused_worker_gives_back_our_batches_that_it_has_not_begun_and_is_not_evicted() -> None:
    scheduler = Played("a", "b")
    begun, waiting, theirs = task("begun"), task("waiting"), task("theirs", "gpu")
    for each in scheduler.workers.values():
        each.status.name = "paused"
        each.processing, each.executing = {begun}, {begun: 1.0}
    scheduler.workers["a"].processing = {begun, waiting, theirs}
    watch = watched(scheduler, 20)
    assert scheduler.workers["a"].processing == {begun, theirs}
    assert set(scheduler.workers) == {"a", "b"}
    assert [(event["action"], event["worker"]) for event in scheduler.events] == [("release", "a")]
    told = watch.told(KEY, scheduler, 120.0)  # type: ignore[arg-type]
    assert (list(told["released"]), told["evicted"]) == (["a"], {})
    assert told["released"]["a"].startswith("paused for")
    assert watch.told("other", scheduler, 120.0)["released"] == {}  # type: ignore[arg-type]


def test_a_pause_begins_anew_when_the_worker_went_on_in_between() -> None:
    scheduler = Played("a")
    scheduler.workers["a"].status.name = "paused"
    scheduler.workers["a"].processing = {task()}
    watch = watched(scheduler, 4)
    scheduler.workers["a"].status.name = "running"
    watched(scheduler, 2, watch=watch, begin=104)
    scheduler.workers["a"].status.name = "paused"
    watched(scheduler, 4, watch=watch, begin=106)
    assert watch.released == {}


@pytest.mark.parametrize("figures", [{"state": "loading"}, {"state": "restarting"}, {"isolation": "thread"}])
@pytest.mark.parametrize("key", [KEY, "another"])
def test_a_worker_whose_heartbeats_may_be_held_up_has_the_time_that_dask_gives_it(
    figures: dict[str, str], key: str
) -> None:
    scheduler = Played("a", "b")
    models = scheduler.workers["a"].metrics["daskinfer"]
    models[key] = {**models[KEY], **figures}  # any model there may do it
    watch = watched(scheduler, 25, beats=lambda _: False)
    assert set(watch.evicted) == {"b"}
    watched(scheduler, 10, beats=lambda _: False, watch=watch, begin=125)
    assert set(watch.evicted) == {"a", "b"}


def test_a_driver_with_a_shorter_policy_than_the_workers_own_evicts_nobody() -> None:
    scheduler = Played("a", "b")
    for address, limit in (("a", 9_000.0), ("b", 0.0)):
        figures = scheduler.workers[address].metrics["daskinfer"][KEY]
        figures |= {"step_age_s": 8_000.0, "step_timeout_s": limit}
    assert set(watched(scheduler, 5).evicted) == {"b"}


@pytest.mark.parametrize("nanny", [None, "nanny"])
def test_a_worker_is_evicted_so_often_and_then_its_model_has_failed_there(
    nanny: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []

    async def kill(_: Any, at: str) -> None:
        killed.append(at)

    monkeypatch.setattr(health, "_kill", kill)
    scheduler, watch = Played(), Watch()

    def life(n: int) -> str:
        """Another process, silent from its beginning, perhaps at another address."""
        address = f"a{n}" if nanny else "a"
        scheduler.workers[address] = worker(address)
        scheduler.workers[address].nanny = nanny
        watched(scheduler, 12, beats=lambda _: False, watch=watch, begin=100 * n)
        return address

    for n in range(1, MOST_EVICTIONS + 1):
        watch.went(life(n), "name", "daskinfer-evicted", 100.0 * n)
        assert scheduler.workers == {}
    last = life(9)
    assert list(scheduler.workers) == [last]
    assert len(scheduler.removed) == MOST_EVICTIONS
    assert killed == [nanny] * MOST_EVICTIONS if nanny else not killed
    assert watch.given_up[KEY, last].endswith("it was evicted 3 times before and was not ready in between")
    watch.ready(KEY, scheduler.workers[last])  # type: ignore[arg-type]
    assert watch.given_up == {}
    watched(scheduler, 12, beats=lambda _: False, watch=watch, begin=1_000)
    assert scheduler.workers == {}
    assert len(scheduler.removed) == MOST_EVICTIONS + 1


def test_drivers_hear_of_a_worker_that_is_not_evicted_any_more_as_one_that_failed() -> None:
    plugin = DaskinferScheduler()
    assert plugin._view(KEY, worker("a"))["state"] == "ready"  # type: ignore[arg-type]
    plugin.watch.given_up[KEY, "a"] = "silent"
    view = plugin._view(KEY, worker("a"))  # type: ignore[arg-type]
    assert (view["state"], view["error"]) == ("failed", "silent")
    plugin.watch.went("a", "a", "scale-down", 1.0)
    assert plugin._view(KEY, worker("a"))["state"] == "ready"  # type: ignore[arg-type]


def test_a_worker_that_is_being_evicted_is_not_evicted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nanny would kill the fresh process."""
    killed: list[str] = []

    async def kill(_: Any, at: str) -> None:
        killed.append(at)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(health, "_kill", kill)
    scheduler, watch = Played("a"), Watch()
    scheduler.workers["a"].nanny = "nanny"
    watch.want(KEY, "another", HEALTH)
    watched(scheduler, 20, beats=lambda _: False, watch=watch)
    assert killed == ["nanny"]


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
