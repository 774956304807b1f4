"""One driver per output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from daskinfer.checkpoint.lock import Lock
from daskinfer.errors import OutputLockedError
from daskinfer.records import Completed
from daskinfer.storage import open_source
from tests.storage.harness import Run, opened, rows_of

TIMES: dict[str, Any] = {"beat_s": 10.0, "stale_s": 120.0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "_lock"


def lock(path: Path, now: float) -> Lock:
    return Lock(path, path.parent / "out", now=now, **TIMES)


def belongs_to(path: Path, **changes: Any) -> None:
    """Make the lock another's."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "token": "other", **changes}))


def test_a_second_driver_is_refused_and_told_who_has_it(path: Path) -> None:
    lock(path, 1000.0)
    with pytest.raises(
        OutputLockedError, match=rf"out is being written by .*\(process {os.getpid()}, since .*42 s ago"
    ):
        lock(path, 1042.0)


def test_a_lock_that_was_given_back_is_free(path: Path) -> None:
    first = lock(path, 0.0)
    first.release()
    assert not path.exists()
    second = lock(path, 1.0)
    first.release()
    assert path.exists(), "only its owner gives it back"
    second.release()


def test_a_lock_that_somebody_removed_is_taken_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = lock(path, 0.0)
    path.unlink()
    first.beat(5.0)
    assert not path.exists(), "it is not looked at more often than beats are due"
    first.beat(20.0)
    assert "the lock" in caplog.text
    with pytest.raises(OutputLockedError):
        lock(path, 21.0)
    path.unlink()
    second = lock(path, 22.0)
    with pytest.raises(OutputLockedError, match="out is being written by"):
        first.beat(40.0)
    second.release()
    path.parent.rename(path.parent.with_name("elsewhere"))
    first.beat(60.0)


def test_a_lock_that_could_not_be_deleted_keeps_nobody_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    first = lock(path, 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", read_only)
        first.release()
    assert path.exists()
    second = lock(path, 1.0)
    with pytest.raises(OutputLockedError):
        lock(path, 2.0)
    second.release()
    assert not path.exists()


def test_the_lock_of_a_dead_process_is_taken_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import sys; from pathlib import Path; from daskinfer.checkpoint.lock import Lock; p = Path(sys.argv[1]);"
        "Lock(p, p, now=0.0, beat_s=1.0, stale_s=1e9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert json.loads(path.read_text())["pid"] != os.getpid()
    mine = lock(path, 5.0)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    assert "which is gone" in caplog.text
    mine.release()


def test_a_reused_process_id_is_another_process(path: Path) -> None:
    lock(path, 0.0)
    belongs_to(path, started=0.0)
    lock(path, 1.0)


@pytest.mark.parametrize("text", ["", "{", "\x00" * 20, '{"pid": 1}'])
def test_a_torn_lock_is_nobodys(path: Path, text: str) -> None:
    path.write_text(text)
    lock(path, 0.0).release()


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"space": "pid:[1]"}])
def test_a_lock_on_another_host_is_stale_by_age(path: Path, change: dict[str, str]) -> None:
    lock(path, 0.0)
    belongs_to(path, **change)
    os.utime(path, (1000.0, 1000.0))
    with pytest.raises(OutputLockedError, match="last sign of life 119 s ago"):
        lock(path, 1119.0)
    lock(path, 1121.0)


def test_the_heartbeat_keeps_it_fresh_and_notices_a_take_over(path: Path) -> None:
    mine = lock(path, 0.0)
    mine.beat(5.0)
    assert path.stat().st_mtime == 0.0
    mine.beat(10.0)
    assert path.stat().st_mtime == 10.0
    belongs_to(path, host="elsewhere")
    mine.beat(19.0)
    with pytest.raises(OutputLockedError, match="elsewhere"):
        mine.beat(20.0)
    assert not mine.is_ours()
    mine.release()
    assert path.exists()


def test_many_at_once_one_wins(path: Path) -> None:
    lock(path, 0.0)
    belongs_to(path, started=0.0)
    won, lost, start = list[Lock](), list[OutputLockedError](), threading.Barrier(8)

    def take() -> None:
        start.wait()
        try:
            won.append(lock(path, 1.0))
        except OutputLockedError as error:
            lost.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)


def test_a_second_checkpoint_leaves_the_first_alone(tmp_path: Path) -> None:
    for sink in ("out", "out.jsonl"):
        source = open_source([{"id": i} for i in range(20)])
        with opened(tmp_path / sink, source) as checkpoint:
            for asked in ({}, {"resume": True}, {"overwrite": True}):
                arguments: dict[str, Any] = dict(asked)
                with pytest.raises(OutputLockedError):
                    opened(tmp_path / sink, open_source([{"id": i} for i in range(20)]), **arguments)
            Run().drive(checkpoint, source)
        assert len(rows_of(tmp_path / sink)) == 20


def test_a_driver_that_lost_its_lock_writes_nothing_more(tmp_path: Path) -> None:
    source = open_source([{"id": i} for i in range(20)])
    with opened(tmp_path / "out", source) as checkpoint:
        checkpoint.begin(next(source.blocks([], checkpoint.keep, skip=checkpoint.done, rows=20)))
        checkpoint.add([Completed(0, "x")], 0.5)
        belongs_to(tmp_path / "out/_lock", host="elsewhere")
        for end in (checkpoint.tick, checkpoint.interrupt):
            with pytest.raises(OutputLockedError):
                end(100.0)
    assert not list((tmp_path / "out").rglob("*.part"))
    assert (tmp_path / "out/_lock").exists()


def test_closing_twice_and_after_the_end(tmp_path: Path) -> None:
    source = open_source([{"id": 1}])
    checkpoint = opened(tmp_path / "out", source)
    Run().drive(checkpoint, source)
    checkpoint.close()
    checkpoint.close()
    assert [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith("_")] == ["_manifest.json"]
