"""Output at a URL: an object store in memory, and one that speaks S3."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest

from daskinfer.checkpoint import CheckpointPolicy, Place, output_at
from daskinfer.checkpoint.remote import LOCK, MANIFEST, Remote
from daskinfer.errors import MissingColumnError, OutputError, OutputExistsError, OutputLockedError
from daskinfer.storage import open_source
from tests.storage.harness import Run, opened

NOW = 1_000_000.0


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give an empty folder in a store of this kind, and a cache of our own."""
    monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "cache"))
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        yield "memory://bucket/answers/"
        return
    yield f"{request.getfixturevalue('s3')}/answers/"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve an S3-compatible store with one bucket."""
    pytest.importorskip("s3fs", reason="needs s3fs")
    server_of = pytest.importorskip("moto.server", reason="needs moto with its server")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # what is stored belongs to the process
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    try:
        yield "s3://bucket"
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        server.stop()


def lines(path: Path, rows: int = 40) -> Any:
    path.write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(rows)))
    return open_source(path)


def go(url: str, source: Any, run: Run, *, now: float = NOW, overwrite: bool = False, **asked: Any) -> str:
    with (
        output_at(url, source, now=now, overwrite=overwrite) as place,
        opened(place.path, source, now=now, overwrite=overwrite, **asked) as checkpoint,
    ):
        run.watch = lambda _: place.push(time.time())
        return run.drive(checkpoint, source)


def rows_at(url: str) -> list[dict[str, Any]]:
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    found: list[dict[str, Any]] = []
    for path in sorted(fs.glob(f"{root.rstrip('/')}/data-*.parquet")):
        with fs.open(path) as file:
            found += pq.read_table(file).to_pylist()
    return found


def names_at(url: str) -> set[str]:
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {Path(path).name for path in fs.glob(f"{root.rstrip('/')}/*")}


def doubles(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "cache" / "outputs"
    return list(folder.iterdir()) if folder.exists() else []


def undisturbed(tmp_path: Path, source: Any) -> list[dict[str, Any]]:
    with opened(tmp_path / "plain", source) as checkpoint:
        Run().drive(checkpoint, source)
    return rows_at(f"file://{tmp_path}/plain")


def test_the_output_is_that_of_a_local_run(url: str, tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl")
    assert go(url, source, Run()) == "finished"
    assert rows_at(url) == undisturbed(tmp_path, source)
    assert MANIFEST in names_at(url)
    assert LOCK not in names_at(url)
    assert doubles(tmp_path) == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_interrupted_run_goes_on(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool
) -> None:
    """On the same machine, and on one that has only what is at the URL."""
    source, first, second = lines(tmp_path / "in.jsonl"), Run(stop_after=20), Run()
    go(url, source, first)
    if elsewhere:
        monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "cache" / "other"))
    with pytest.raises(OutputExistsError, match=r"bucket/answers/ holds output already \(\d+ rows done\)"):
        go(url, source, Run())
    go(url, source, second, resume=True)
    assert rows_at(url) == undisturbed(tmp_path, source)
    assert not set(first.seen) & set(second.seen) or elsewhere
    assert set(first.seen) | set(second.seen) == set(range(40))


def test_a_run_that_dies_loses_no_copied_chunk(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local double is gone with the machine; what had been copied is not run again."""
    source, first, second = lines(tmp_path / "in.jsonl"), Run(stop_after=30), Run()
    place = Remote(url, NOW)
    with opened(place.path, source) as checkpoint:
        first.watch = lambda _: place.push(NOW + 100 * len(first.seen))
        first.drive(checkpoint, source)
    place._mirror.submit(place._copy).result()
    place._unlock()  # as its age would
    copied = [row["prompt"] for row in rows_at(url)]
    assert copied
    monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "cache" / "other"))
    go(url, source, second, resume=True)
    assert not {f"row {row}" for row in second.seen} & set(copied)
    assert rows_at(url) == undisturbed(tmp_path, source)


def test_overwriting_replaces_and_a_refusal_changes_nothing(url: str, tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl")
    go(url, source, Run(say="old"))
    before = rows_at(url)
    with pytest.raises(MissingColumnError):
        go(url, source, Run(say="new"), overwrite=True, keep=["nothing"])
    assert rows_at(url) == before
    go(url, lines(tmp_path / "in.jsonl", 15), Run(say="new"), overwrite=True)
    assert [row["prompt"] for row in rows_at(url)] == [f"row {i}" for i in range(15)]
    assert not [row for row in rows_at(url) if "old" in (row["output"] or "")]


def test_failed_rows_are_replaced(url: str, tmp_path: Path) -> None:
    source, again = lines(tmp_path / "in.jsonl"), Run(fails=lambda _: False)
    go(url, source, Run())
    go(url, source, again, retry_failed=True)
    assert sorted(again.seen) == [row for row in range(40) if row % 7 == 3]
    assert not [row for row in rows_at(url) if row["error"]]
    assert len(rows_at(url)) == 40


def test_rows_that_are_not_published_stay_on_this_machine(url: str, tmp_path: Path) -> None:
    """A run that only tries failed rows again ends well with parts of earlier chunks still there."""
    source, first = lines(tmp_path / "in.jsonl", 200), Run(stop_after=100)
    policy = CheckpointPolicy(chunk_rows=200, flush_s=0.5, chunk_s=1e6, interrupt_files=1)
    go(url, source, first, policy=policy)
    published = {row["prompt"] for row in rows_at(url)}
    again, last = Run(fails=lambda _: False), Run(fails=lambda _: False)
    go(url, source, again, retry_failed=True, policy=policy)
    go(url, source, last, resume=True, policy=policy)
    assert len(published) < len(first.seen)
    assert not set(last.seen) & {row for row in first.seen if row % 7 != 3}
    assert len(rows_at(url)) == 200


def test_an_output_that_another_driver_finished_is_not_touched(url: str, tmp_path: Path) -> None:
    """This driver slept; the other one took over, ended, and took its lock away."""
    source, place = lines(tmp_path / "in.jsonl"), Remote(url, NOW)
    with opened(place.path, source) as checkpoint:
        Run(stop_after=10).drive(checkpoint, source)
    place._unlock()
    before = names_at(url)
    with pytest.raises(OutputLockedError, match="another driver, which has ended since"):
        place.finish(complete=True)
    assert names_at(url) == before
    assert Path(place.path).exists()


def test_a_store_that_fails_for_a_while_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    source, failures = lines(tmp_path / "in.jsonl"), iter([OSError("no network")] * 2)
    put = fs.put_file

    def put_file(*arguments: Any, **options: Any) -> None:
        for failure in failures:
            raise failure
        put(*arguments, **options)

    monkeypatch.setattr(type(fs), "put_file", lambda self, *a, **k: put_file(*a, **k))
    place = Remote("memory://bucket/answers/", NOW)
    with opened(place.path, source) as checkpoint:
        run = Run()
        run.watch = lambda _: place.push(NOW + 100 * len(run.seen))
        run.drive(checkpoint, source)
    while next(failures, None):
        place._mirror.submit(lambda: None).result()
    place.finish(complete=True)
    assert len(rows_at("memory://bucket/answers/")) == 40


def test_c49_a_second_driver_is_refused(url: str, tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl")
    place = Remote(url, NOW)
    with pytest.raises(OutputLockedError, match=r"bucket/answers/ is being written by .*last sign of life 30 s ago"):
        go(url, source, Run(), now=NOW + 30)
    place.finish(complete=True)
    go(url, source, Run(), now=NOW + 30)


def test_the_lock_of_another_host_is_taken_over_when_it_is_old(url: str, tmp_path: Path) -> None:
    source, place = lines(tmp_path / "in.jsonl"), Remote(url, NOW)
    fs, root = fsspec.core.url_to_fs(url)
    held = json.loads(fs.cat_file(f"{root.rstrip('/')}/{LOCK}"))
    fs.pipe_file(f"{root.rstrip('/')}/{LOCK}", json.dumps({**held, "host": "elsewhere", "token": "x"}).encode())
    with pytest.raises(OutputLockedError, match="elsewhere"):
        go(url, source, Run(), now=NOW + 100)
    manifest = Path(place.path) / MANIFEST
    manifest.write_text("{}")  # there is something to copy
    with pytest.raises(OutputLockedError, match="elsewhere"):
        place.finish(complete=False)
    manifest.unlink()
    go(url, source, Run(), now=NOW + 200)
    assert len(rows_at(url)) == 40


def test_what_another_machine_wrote_is_what_counts(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = lines(tmp_path / "in.jsonl")
    go(url, source, Run(stop_after=20))
    monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "other"))
    go(url, source, Run(say="other"), overwrite=True)
    monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "cache"))
    last = Run()
    go(url, source, last, resume=True)
    assert last.seen == []
    assert len(rows_at(url)) == 40


def test_foreign_files_and_single_files_are_refused(url: str, tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl")
    with pytest.raises(OutputError, match="end the URL in a slash"):
        go(f"{url}out.jsonl", source, Run())
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root.rstrip('/')}/mine.txt", b"mine")
    with pytest.raises(OutputError, match=r"holds files that are not daskinfer's \(mine.txt\)"):
        go(url, source, Run())
    assert names_at(url) == {"mine.txt"}


def test_input_and_output_are_kept_apart(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pipe_file("/bucket/answers/in.jsonl", b'{"prompt": "a"}\n')
    source = open_source("memory://bucket/answers/in.jsonl")
    with (
        pytest.raises(OutputError, match="part of the input"),
        output_at("memory://bucket/answers", source, now=NOW, overwrite=False),
    ):
        pass


def test_a_store_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl")
    with pytest.raises(OutputError, match="install what its protocol needs"):
        go("nothing://bucket/x/", source, Run())


def test_local_paths_are_what_they_are(tmp_path: Path) -> None:
    with output_at(str(tmp_path), lines(tmp_path / "in.jsonl"), now=NOW, overwrite=False) as place:
        assert type(place) is Place
        assert place.path == str(tmp_path)
        place.push(NOW)


def test_messages_leave_out_what_is_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "cache"))
    source = lines(tmp_path / "in.jsonl")
    for url in ("nothing://me:secret@host/x/", "nothing://me:secret@host/x.csv", "ftp://me:secret@127.0.0.1:1/x/"):
        with pytest.raises(OutputError) as raised:
            go(url, source, Run())
        assert "secret" not in str(raised.value)
