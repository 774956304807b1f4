"""What the scheduler shows: bounded, honest about who is gone, and the newest first."""

import io
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from daskinfer.config import ModelSpec
from daskinfer.dashboard import html
from daskinfer.dashboard.board import MAX_JOBS, MAX_LOST, MAX_MODELS, SILENT_S, Board, Series
from daskinfer.dashboard.prometheus import of_board, of_worker
from daskinfer.driver.telling import Telling
from daskinfer.metrics import Metrics
from daskinfer.records import RowsResolved, RunEnded, RunStarted, Usage
from daskinfer.top import picture

ABOUT = {"model": "m", "engine": "e", "task": "generate"}


def row(name: str, state: str = "ready", status: str = "running", address: str = "", **figures: Any) -> dict[str, Any]:
    metrics = {"name": name, "capacity": 4, **figures}
    return {"address": address or f"tcp://{name}", "state": state, "status": status, "metrics": metrics}


def snapshot(done: int = 5, ended: str = "") -> dict[str, Any]:
    metrics = Metrics()
    for event in (RunStarted(0, 10), RowsResolved(1, 1, 0, Usage()), RowsResolved(3, done - 1, 0, Usage(10, 20))):
        metrics.apply(event)
    if ended:
        metrics.apply(RunEnded(4, ended))
    return metrics.snapshot().to_dict(workers=False)


def job(name: str = "answers", **options: Any) -> dict[str, Any]:
    return {"name": name, "kind": "run", "snapshot": snapshot(**options)}


def states(board: Board, key: str = "k") -> dict[str, str]:
    return {worker.address: worker.state for worker in board.models[key].workers.values()}


def test_a_worker_that_is_gone_is_dead_then_replaced_or_has_left() -> None:
    board = Board()
    board.see("k", [row("0"), row("1"), row("2", "excluded"), row("3", status="paused")], 10)
    assert states(board) == {"tcp://0": "ready", "tcp://1": "ready", "tcp://3": "paused"}
    board.see("k", [row("3")], 11, lambda address: address == "tcp://1")
    assert states(board) == {"tcp://0": "dead", "tcp://1": "left", "tcp://3": "ready"}
    board.see("k", [row("3"), row("0", "loading", address="tcp://new")], 12)
    assert states(board) == {"tcp://0": "replaced", "tcp://1": "left", "tcp://3": "ready", "tcp://new": "loading"}
    board.unloaded("k")
    assert states(board) == {"tcp://0": "replaced", "tcp://1": "left", "tcp://3": "unloaded", "tcp://new": "unloaded"}
    board.unloaded("unknown")


def test_the_running_job_that_began_last_comes_first() -> None:
    board = Board()
    board.told("k", ABOUT, {"a": job("old")}, 100)
    board.told("k", ABOUT, {"b": job("new")}, 200)
    board.told("other", ABOUT, {"c": job("ended", ended="done")}, 300)
    assert [job.name for _, job in board.jobs(130)] == ["new", "old", "ended"]
    assert [job.name for _, job in board.jobs(131)] == ["new", "ended", "old"]
    silent = board.models["k"].jobs["a"]
    assert (silent.state(100 + SILENT_S), silent.state(101 + SILENT_S)) == ("running", "lost")
    assert board.models["other"].jobs["c"].state(1e9) == "done"


def test_a_job_that_its_driver_still_names_is_not_lost() -> None:
    spec, board = ModelSpec("m"), Board()
    telling = Telling(spec)
    for name in ("a", "b"):
        telling.tell(name, job(name))
    telling.tell("c", job("c", ended="done"))
    told = telling.pending()
    board.told("k", told["about"], told["jobs"], 100, told["running"])
    telling.sent(told)
    telling.tell("b", job("b", ended="done"))
    told = telling.pending()
    assert (list(told["jobs"]), told["running"]) == (["b"], ["a"])
    board.told("k", told["about"], told["jobs"], 140, [*told["running"], "unknown"])
    jobs = board.models["k"].jobs
    assert {name: jobs[name].state(165) for name in "abc"} == {"a": "running", "b": "done", "c": "done"}
    assert jobs["a"].state(171) == "lost"


def test_series_of_the_same_model_with_other_options_are_kept_apart() -> None:
    specs = [ModelSpec("m", task="embed"), ModelSpec("m", task="embed", dtype="float16"), ModelSpec("m")]
    board = Board()
    for spec in specs:
        telling = Telling(spec)
        telling.tell("a", job())
        told = telling.pending()
        board.told(spec.key, told["about"], told["jobs"], 100)
        board.see(spec.key, [row("0")], 100)
    sources = [
        of_board(board),
        *(of_worker("tcp://0", spec, lambda: {"state": "ready", "capacity": 4}) for spec in specs),
    ]
    series = [(name, *sorted(labels.items())) for source in sources for name, _, _, labels, _ in source()]
    assert len(series) == len(set(series))
    kept = {(labels["task"], labels["key"]) for source in sources for _, _, _, labels, _ in source()}
    assert kept == {(spec.task, spec.key) for spec in specs}


def test_a_terminal_shows_names_as_they_are() -> None:
    board = Board()
    board.told("k", {**ABOUT, "model": "[bold]m[/]"}, {"a": job("[red]a[/wrong]")}, 100)
    board.see("k", [row("[0]")], 100)
    console = Console(file=io.StringIO(), width=200)
    console.print(picture(board.to_dict(101)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for name in ("[bold]m[/] (e)", "[red]a[/wrong]", "[0] [0]"):
        assert name in shown


def test_samples_are_those_of_ready_workers_and_running_jobs() -> None:
    board = Board()
    board.told("k", ABOUT, {"a": job()}, 100)
    figures: dict[str, Any] = {"running": 2, "waiting": 3, "ram_bytes": 7, "prompt_tokens": 10, "padded_tokens": 0}
    board.see("k", [row("0", **figures), row("1", "loading", running=4)], 100)
    later = {**figures, "prompt_tokens": 13, "padded_tokens": 1}
    board.see("k", [row("0", **later)], 100.5)
    board.see("k", [row("0", **later)], 101)
    columns = board.models["k"].series.columns
    assert columns["t"] == [0, 1]
    assert columns["occupancy"] == [0.5, 0.5]
    assert columns["padding"] == [0, 0.25]
    assert columns["rows"][0] == pytest.approx(2)
    assert (columns["waiting"][0], columns["ready"], columns["ram_bytes"][1]) == (3, [1, 1], 7)


@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=1_500))
def test_samples_stay_few_and_in_order(gaps: list[float]) -> None:
    series, now = Series(), 0.0
    for gap in gaps:
        now += gap
        if series.due(now):
            series.add(now, rows=1.0)
    times = series.columns["t"]
    assert times == sorted(times)
    assert {len(column) for column in series.columns.values()} == {len(times)}
    assert len(times) < Series.LIMIT


def test_memory_does_not_grow() -> None:
    board = Board()
    sizes = []
    for n in range(3_000):
        key = f"k-{n % 40}"
        board.told(key, ABOUT, {f"j-{n}": job()}, n)
        board.see(key, [row(str(n)), row("always")], n)
        board.unloaded(key)
        if n in (1_500, 2_999):
            sizes.append(len(pickle.dumps(board)))
    assert sizes[1] < 1.3 * sizes[0]
    assert len(board.models) <= MAX_MODELS
    for model in board.models.values():
        assert len(model.jobs) <= MAX_JOBS
        assert sum(worker.gone for worker in model.workers.values()) <= MAX_LOST


def test_everything_is_json_and_the_tables_say_the_same() -> None:
    board = Board()
    board.told("k", ABOUT, {"a": job("<b>")}, 100)
    board.see("k", [row("0", running=2, step_bins=[10, 3], odd={1})], 100)
    told = json.loads(json.dumps(board.to_dict(101), allow_nan=False))
    (model,) = told["models"]
    assert (model["model"], model["jobs"][0]["snapshot"]["done"], model["workers"][0]["occupancy"]) == ("m", 5, 0.5)
    assert model["step_s"] == pytest.approx([0.001 * 1.2**10] * 2)
    shown = html.summary("m", {"name": "<b>", "kind": "run"}, model["jobs"][0]["snapshot"], "running")
    assert 'data-figure="finished">5<' in shown
    assert "<b>" not in shown.replace("<b data-figure", "")
    assert "ready" in html.worker_table(model["workers"])
    assert "No row has failed" in html.failure_table(model["jobs"][0]["snapshot"])
    assert "No job yet" in html.summary("", None, None, "")
    assert "m: no job yet" in html.summary("m", None, None, "")
