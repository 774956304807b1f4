"""Parts: what their names say, torn ones, many of them."""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.checkpoint import CheckpointPolicy
from daskinfer.checkpoint.layout import Layout, PartName, data_name, data_span, locate
from daskinfer.checkpoint.parquetio import (
    ends_of,
    footer_says,
    ids_of,
    is_whole,
    latest_of,
    merged,
    positions_of,
    runs_of,
    runs_said,
    write_part,
    write_table,
)
from daskinfer.checkpoint.parts import Parts
from daskinfer.checkpoint.published import Published
from daskinfer.errors import ConfigError, OutputError
from daskinfer.records import Completed, Failed
from daskinfer.storage import Intervals, open_source
from daskinfer.storage.base import FILE_ROWS
from tests.storage.harness import FaultyOps, Run, leftovers, opened, rows_of, visible

SCHEMA = pa.schema([("a", pa.int64()), ("error", pa.string())])


def source(rows: int = 30) -> Any:
    return open_source([{"id": i} for i in range(rows)])


def parts_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.part"))


def made(tmp_path: Path) -> tuple[Layout, Parts]:
    layout = locate(tmp_path / "out")
    layout.folder.mkdir(exist_ok=True)
    return layout, Parts(layout, FaultyOps(), SCHEMA)


def write(parts: Parts, ids: list[int], value: int = 0, error: str | None = None) -> None:
    table = pa.table(
        {"a": pa.array([value + i for i in ids], pa.int64()), "error": pa.array([error] * len(ids), pa.string())}
    )
    parts.write("0", np.array(ids), table)


def half_done(tmp_path: Path) -> tuple[Path, set[int]]:
    """Leave an output as a kill leaves it: some parts, nothing published."""
    run, input_ = Run(seed=2, step_s=1.0), source()
    checkpoint = opened(tmp_path / "out", input_, policy=CheckpointPolicy(chunk_rows=100, flush_s=1.0))
    block = next(input_.blocks([], checkpoint.keep, skip=checkpoint.done, rows=30))
    checkpoint.begin(block)
    for at, batch in enumerate(([0, 1, 2, 3], [9, 5, 7], [12, 11, 10], [20, 29], [25])):
        checkpoint.add([run.answer(row) for row in batch], 10.0 * at)
        checkpoint.tick(10.0 * at + 5)
    (tmp_path / "out/_lock").unlink()
    return tmp_path / "out", set(run.seen)


# ---------------------------------------------------------------- names


@given(st.integers(0, 10**9 - 1), st.integers(0, 2**62), st.integers(0, 50), st.integers(1, 99))
def test_names_say_what_they_mean(number: int, first: int, more: int, count: int) -> None:
    name = PartName(number, first, first + more, count)
    assert PartName.parse(str(name)) == name
    assert name.is_contiguous == (count == more + 1)
    assert data_span(data_name(first, first + more)) == (first, first + more)
    assert data_name(first, first) < data_name(first + 1, first + 1)
    for strange in (f"{name}.tmp", "data-1-2.parquet", "x"):
        assert PartName.parse(strange) is None
        assert data_span(strange) is None


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=9))
def test_positions_and_ids(pairs: list[tuple[int, int]]) -> None:
    rows = Intervals((start, start + size) for start, size in pairs)
    ids = np.array([i for start, stop in rows for i in range(start, stop)])
    positions = np.arange(len(ids))
    assert np.array_equal(ids_of(rows, positions), ids)
    assert np.array_equal(positions_of(rows, ids), positions)
    assert [tuple(pair) for pair in runs_of(ids).tolist()] == list(rows)


@given(st.lists(st.integers(0, 9)))
def test_the_latest_of_each_id(ids: list[int]) -> None:
    found = latest_of(np.array(ids, np.int64)).tolist()
    last = {row: at for at, row in enumerate(ids)}
    assert found == [last[row] for row in sorted(last)]


# ---------------------------------------------------------------- contents


def test_of_two_results_for_a_row_the_later_counts(tmp_path: Path) -> None:
    _, parts = made(tmp_path)
    write(parts, [1, 2, 3], error="x")
    write(parts, [2], value=100)
    write(parts, [5, 7])
    loaded = parts.load(2, 6)
    assert loaded.ids.tolist() == [2, 3, 5]
    assert loaded.table().column("a").to_pylist() == [102, 3, 5]
    assert list(parts.errors()) == [(1, 2), (3, 4)]
    parts.settle(loaded, 2, 6)
    assert len(parts_in(tmp_path)) == 2, "a part goes when all its rows are published"
    parts.settle(parts.load(1, 1), 1, 1)
    assert [PartName.parse(path.name) for path in parts_in(tmp_path)] == [PartName(2, 5, 7, 2)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let pieces and row groups have about 1,000 rows; return the rows of the groups that are read."""
    monkeypatch.setattr("daskinfer.checkpoint.loaded.GROUP_BYTES", 20_200)
    monkeypatch.setattr("daskinfer.checkpoint.parquetio._PART_GROUP_BYTES", 20_200)
    read: list[int] = []
    real = pq.ParquetFile.read_row_group

    def spy(self: Any, at: int, *args: Any, **kwargs: Any) -> Any:
        read.append(self.metadata.row_group(at).num_rows)
        return real(self, at, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    return read


def test_rows_come_in_pieces_and_each_row_group_is_read_once(tmp_path: Path, small_pieces: list[int]) -> None:
    _, parts = made(tmp_path)
    rows = np.random.default_rng(0).permutation(9_500)
    for at in range(0, 9_000, 3_000):
        write(parts, sorted(rows[at : at + 3_000].tolist()))
    late = np.sort(rows[8_800:])  # 200 of them are in a part too, and these are the later ones
    fresh = pa.table({"a": -late, "error": pa.nulls(len(late), pa.string())}, schema=SCHEMA)
    loaded = parts.load(0, 9_499, (late, fresh))
    assert loaded.ids.tolist() == list(range(9_500))
    assert small_pieces == [], "nothing is read before it is asked for"
    pieces = list(loaded.tables())
    assert 9 <= len(pieces) <= 11
    assert max(table.num_rows for table in pieces) < 1_100
    values = pa.concat_tables(pieces).column("a").to_numpy()
    assert np.array_equal(values, np.where(np.isin(np.arange(9_500), late), -1, 1) * np.arange(9_500))
    assert len(small_pieces) == 9, "each group once: the next piece begins in the one that is kept"
    assert all(file.kept_bytes == 0 for file in loaded._files)
    assert pa.concat_tables(loaded.tables(40, 2_300)).column("a").to_numpy().tolist() == values[40:2_300].tolist()


@given(data=st.data(), count=st.integers(1, 6), seed=st.integers(0, 99))
def test_pieces_of_parts_are_the_rows_in_order(data: st.DataObject, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr("daskinfer.checkpoint.loaded.GROUP_BYTES", 5_000)
        patched.setattr("daskinfer.checkpoint.loaded._MOST_KEPT", 9_000)
        patched.setattr("daskinfer.checkpoint.parquetio._PART_GROUP_BYTES", 5_000)
        _, parts = made(Path(folder))
        latest: dict[int, int] = {}
        for at in range(count):
            ids = np.flatnonzero(rng.random(4_000) < rng.random()).tolist() or [at]
            write(parts, ids, value=at * 10_000)
            latest |= {row: row + at * 10_000 for row in ids}
        first, last = sorted(data.draw(st.tuples(st.integers(0, 4_000), st.integers(0, 4_000))))
        wanted = {row: latest[row] for row in sorted(latest) if first <= row <= last}
        loaded = parts.load(first, last)
        assert loaded.ids.tolist() == list(wanted)
        assert loaded.table().column("a").to_pylist() == list(wanted.values())


def test_what_is_kept_of_parts_is_bounded(
    tmp_path: Path, small_pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daskinfer.checkpoint.loaded._MOST_KEPT", 60_000)
    _, parts = made(tmp_path)
    for at in range(20):  # each has rows everywhere
        write(parts, list(range(at, 20_000, 20)))
    loaded = parts.load(0, 19_999)
    for _ in loaded.tables():
        assert sum(file.kept_bytes for file in loaded._files) <= 60_000
    assert len(small_pieces) > 20, "some were read again instead"
    assert loaded.table().column("a").to_pylist() == list(range(20_000))


def test_a_large_dictionary_is_not_written_over_and_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskinfer.checkpoint.loaded.GROUP_BYTES", 100_000)
    monkeypatch.setattr("daskinfer.checkpoint.parquetio.GROUP_BYTES", 100_000)
    monkeypatch.setattr("daskinfer.checkpoint.parquetio._PART_GROUP_BYTES", 10_000)
    words = pa.array([f"category {i:05} of very many" for i in range(4_000)])
    schema = pa.schema([("word", pa.dictionary(pa.int32(), words.type)), ("error", pa.string())])
    layout = locate(tmp_path / "out")
    layout.folder.mkdir()
    parts, published = Parts(layout, FaultyOps(), schema), Published(layout, FaultyOps())
    for at in range(10):
        ids = np.arange(at, 4_000, 10)
        column = pa.DictionaryArray.from_arrays(pa.array(ids, pa.int32()), words)
        parts.write("0", ids, pa.Table.from_arrays([column, pa.nulls(len(ids), pa.string())], schema=schema))
    published.publish(schema, parts.load(0, 3_999).tables(), Intervals([(0, 4_000)]))
    file = pq.ParquetFile(published.files[0].path)
    assert file.metadata.num_row_groups == 1
    assert file.read().column("word").to_pylist() == words.to_pylist()
    assert {pq.ParquetFile(path).metadata.num_row_groups for path in parts_in(tmp_path)} == {1}


def test_an_error_of_the_system_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, parts = made(tmp_path)
    write(parts, [0, 1, 2])
    write(parts, [5, 9])
    names = parts_in(tmp_path)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(pq, "ParquetFile", fails)
        with pytest.raises(OSError, match="Too many open files"):
            parts.load(0, 9)
        patched.setattr("daskinfer.checkpoint.parts.footer_says", lambda *args: None)
        with pytest.raises(OSError, match="Too many open files"):
            Parts(layout, FaultyOps(), SCHEMA).scan(Intervals())
    assert parts_in(tmp_path) == names
    names[0].unlink()
    with pytest.raises(OutputError, match=r"is gone; was something removed .* its 3 rows will be redone"):
        parts.load(0, 9)


def test_whatever_is_damaged_in_a_part_is_seen_as_damage(tmp_path: Path) -> None:
    _, parts = made(tmp_path)
    write(parts, list(range(40)), error="an error")
    [path] = parts_in(tmp_path)
    whole = path.read_bytes()
    rows = parts.load(0, 39).table()
    rng = np.random.default_rng(0)
    said: list[str] = []
    for at in rng.integers(4, len(whole) - 8, 300).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        try:
            assert parts.load(0, 39).table().num_rows <= rows.num_rows
        except OutputError as error:
            said.append(str(error))
            path.with_name(f"damaged-{path.name}").unlink()
    assert len(said) > 100
    assert all("was set aside" in text for text in said)


@pytest.mark.parametrize("advises", [True, False])
def test_few_files_are_open_at_once(tmp_path: Path, advises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(200):
        (tmp_path / f"{at:03}").write_bytes(bytes([at]) * 20)
    opened: set[int] = set()
    most = 0
    real_open, real_close = os.open, os.close

    def counted(*args: Any, **kwargs: Any) -> int:
        nonlocal most
        handle = real_open(*args, **kwargs)
        opened.add(handle)
        most = max(most, len(opened))
        return handle

    def uncounted(handle: int) -> None:
        real_close(handle)
        opened.discard(handle)

    monkeypatch.setattr(os, "open", counted)
    monkeypatch.setattr(os, "close", uncounted)
    if advises:
        monkeypatch.setattr(os, "posix_fadvise", lambda *args: (_ for _ in ()).throw(OSError(errno.EPERM, "no")))
    else:
        monkeypatch.delattr(os, "posix_fadvise")
    found = list(ends_of((str(path) for path in sorted(tmp_path.iterdir())), 8))
    assert [(end, size) for _, end, size in found] == [(bytes([at]) * 8, 20) for at in range(200)]
    assert most <= 64
    with pytest.raises(FileNotFoundError):
        list(ends_of([str(tmp_path / "000"), str(tmp_path / "not there")], 8))
    assert not opened


def test_a_part_that_is_damaged_behind_its_ids_is_set_aside(tmp_path: Path) -> None:
    _, parts = made(tmp_path)
    write(parts, list(range(500)), error="an error that is long enough to be found again")
    [path] = parts_in(tmp_path)
    whole = path.read_bytes()
    at = whole.index(b"long enough")
    path.write_bytes(whole[:at] + b"LONG" + whole[at + 4 :])
    loaded = parts.load(0, 499)
    with pytest.raises(OutputError, match=r"is damaged .* was set aside"):
        loaded.table()
    assert parts_in(tmp_path)[0].name.startswith("damaged-")


def test_scanning_reads_no_part_and_leaves_published_rows_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, parts = made(tmp_path)
    for ids in ([0, 1, 2], [3, 4], [6, 8], [10, 11]):
        write(parts, ids)
    again = Parts(layout, FaultyOps(), SCHEMA)
    with monkeypatch.context() as patched:
        patched.setattr(pq, "ParquetFile", lambda path, **_: pytest.fail(f"{path} was opened"))
        assert list(again.scan(Intervals([(1, 5), (8, 9)]))) == [(0, 1), (6, 7), (10, 12)]
    assert [path.name[:9] for path in parts_in(tmp_path)] == ["000000000", "000000002", "000000003"]
    write(again, [20])
    assert parts_in(tmp_path)[-1].name.startswith("000000004"), "numbers are not used again"


@given(st.sets(st.integers(0, 2**62), min_size=1, max_size=30), st.integers(0, 40))
def test_the_footer_of_a_part_says_its_ids(scattered: set[int], run: int) -> None:
    ids = np.array(sorted(scattered | set(range(7, 7 + run))), np.int64)
    with TemporaryDirectory() as folder:
        path = Path(folder, "p")
        write_part(path, Path(folder, "t"), pa.table({"a": ids}), FaultyOps(), ids)
        [ended] = ends_of([str(path)], 8 + run)
        said = footer_says(*ended)
        assert said is not None
        found, bounds = runs_said([said, said])
        assert np.array_equal(found, np.tile(runs_of(ids), (2, 1)))
        assert bounds.tolist() == [0, len(found) // 2, len(found)]
        assert pq.read_table(path).column("a").to_numpy().tolist() == ids.tolist()


@pytest.mark.parametrize("damage", ["absent", "garbled", "another's"])
def test_a_part_whose_footer_does_not_say_is_read(tmp_path: Path, damage: str) -> None:
    layout, parts = made(tmp_path)
    write(parts, [6, 8])
    (path,) = parts_in(tmp_path)
    whole = path.read_bytes()
    said = re.findall(rb"daskinfer.runs=6,u1,\d+,([A-Za-z0-9+/=]*);", whole)[0]
    if damage == "absent":
        write_table(path, path.with_suffix(".tmp"), pq.read_table(path), FaultyOps())
    elif damage == "garbled":
        path.write_bytes(whole.replace(said, b"A" * len(said)))
    else:
        path = path.rename(path.with_name(path.name.replace("8-2", "9-2")))
    assert list(Parts(layout, FaultyOps(), SCHEMA).scan(Intervals())) == [(6, 7), (8, 9)]


@given(st.lists(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=6), max_size=5))
def test_runs_of_many_parts_are_merged(groups: list[list[tuple[int, int]]]) -> None:
    pairs = [[(start, start + size) for start, size in group] for group in groups]
    found = merged([np.array(group, np.int64).reshape(-1, 2) for group in pairs])
    assert Intervals.from_runs(*found.T) == Intervals(pair for group in pairs for pair in group)
    far = merged([*(np.array(group, np.int64).reshape(-1, 2) for group in pairs), np.array([[2**61, 2**61 + 1]])])
    assert far.tolist() == [*found.tolist(), [2**61, 2**61 + 1]]


@pytest.mark.parametrize("count", [0, 1, 33, 1_100])
def test_ends_of_files_come_in_order(tmp_path: Path, count: int) -> None:
    paths = [tmp_path / f"{number}" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(b"x" * (number % 3) + b"%d" % number)
    found = list(ends_of(map(str, paths), 3))
    assert [path for path, _, _ in found] == list(map(str, paths))
    assert all(
        path.read_bytes().endswith(end) and len(end) == min(3, size)
        for path, (_, end, size) in zip(paths, found, strict=True)
    )
    with pytest.raises(FileNotFoundError):
        list(ends_of([*map(str, paths), str(tmp_path / "none")], 3))


def test_runs_are_merged_before_they_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskinfer.checkpoint.parts._MANY_RUNS", 3)
    layout, parts = made(tmp_path)
    for ids in ([0, 2, 4, 6], [1, 3, 5, 7], [9, 11]):
        write(parts, ids)
    assert list(Parts(layout, FaultyOps(), SCHEMA).scan(Intervals())) == [(0, 8), (9, 10), (11, 12)]


def test_many_parts_are_found_quickly(tmp_path: Path) -> None:
    layout, parts = made(tmp_path)
    write(parts, [0, 1])
    (first,) = parts_in(tmp_path)
    for number in range(1, 2000):
        (first.parent / str(PartName(number, 2 * number, 2 * number + 1, 2))).hardlink_to(first)
    held = Parts(layout, FaultyOps(), SCHEMA).scan(Intervals())
    assert list(held) == [(0, 4000)]


# ---------------------------------------------------------------- torn files


@pytest.mark.parametrize("damage", ["empty", "cut", "nulls", "null tail", "short"])
def test_c36_torn_parts_are_redone(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, seen = half_done(tmp_path)
    for at, part in enumerate(parts_in(folder)):
        if at in (1, 2):
            whole = part.read_bytes()
            part.write_bytes(
                {
                    "empty": b"",
                    "cut": whole[: len(whole) // 2],
                    "nulls": b"\x00" * len(whole),
                    "null tail": whole[:-100] + b"\x00" * 4096,
                    "short": whole[:9],
                }[damage]
            )
    with caplog.at_level(logging.WARNING), opened(folder, input_ := source(), resume=True) as checkpoint:
        lost = seen - {row for row in seen if row in checkpoint.done}
        assert lost == {5, 7, 9, 10, 11, 12}
        assert caplog.text.count("is torn; it is deleted and its rows will be redone") == 2
        again = Run()
        again.drive(checkpoint, input_)
    assert set(again.seen) == set(range(30)) - (seen - lost)
    assert [row["id"] for row in rows_of(folder)] == list(range(30))
    assert leftovers(folder) == []


def test_c36_a_part_that_is_damaged_inside_is_set_aside_and_redone(tmp_path: Path) -> None:
    folder, seen = half_done(tmp_path)
    part = parts_in(folder)[0]
    text = bytearray(part.read_bytes())
    text[20:60] = b"\x55" * 40
    part.write_bytes(text)
    with opened(folder, input_ := source(), resume=True) as checkpoint:
        assert {row for row in seen if row in checkpoint.done} == seen
        with pytest.raises(OutputError, match=r"is damaged .* run again with resume=True \(--resume\): its 4 rows"):
            Run().drive(checkpoint, input_)
    with opened(folder, input_ := source(), resume=True) as checkpoint:
        again = Run()
        again.drive(checkpoint, input_)
    assert set(again.seen) == {0, 1, 2, 3}
    assert [row["id"] for row in rows_of(folder)] == list(range(30))
    assert leftovers(folder) == []


def test_c36_a_torn_published_chunk_is_set_aside_and_redone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "out", input_ := source()) as checkpoint:
        Run().drive(checkpoint, input_)
    path = sorted((tmp_path / "out").glob("data-*"))[1]
    rows = pq.read_table(path, partitioning=None).column("id").to_pylist()
    path.write_bytes(path.read_bytes()[:-10])
    [(_, end, size)] = ends_of([str(path)], 8)
    assert not is_whole(end, size)
    with opened(tmp_path / "out", input_ := source(), resume=True) as checkpoint:
        assert "set aside" in caplog.text
        again = Run()
        again.drive(checkpoint, input_)
    assert sorted(again.seen) == rows
    assert [row["id"] for row in rows_of(tmp_path / "out")] == list(range(30))


def test_temporary_files_of_a_crash_are_removed(tmp_path: Path) -> None:
    folder, _ = half_done(tmp_path)
    for name in ("_parts/manifest.tmp", "_parts/x/y.parquet.part.tmp", "data-0.parquet.tmp"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    with pytest.raises(OutputError, match="not daskinfer's"):
        opened(folder, source(), resume=True)
    (folder / "data-0.parquet.tmp").unlink()
    with opened(folder, source(), resume=True):
        assert not list(folder.rglob("*.tmp"))


def test_parts_that_somebody_removed_are_missed(tmp_path: Path) -> None:
    with opened(
        tmp_path / "out", input_ := source(), policy=CheckpointPolicy(chunk_rows=100, flush_s=0.0)
    ) as checkpoint:
        checkpoint.begin(next(input_.blocks([], checkpoint.keep, skip=checkpoint.done, rows=30)))
        checkpoint.add([Completed(row, "x") for row in range(20)], 5.0)
        checkpoint.tick(10.0)
        (part,) = parts_in(tmp_path)
        part.unlink()
        checkpoint.add([Completed(row, "x") for row in range(20, 30)], 6.0)
        with pytest.raises(OutputError, match="is gone; was something removed"):
            checkpoint.finish(11.0)


def test_two_chunks_with_the_same_rows_are_an_error(tmp_path: Path) -> None:
    with opened(tmp_path / "out", input_ := source()) as checkpoint:
        Run().drive(checkpoint, input_)
    path = min((tmp_path / "out").glob("data-*"))
    (tmp_path / "out" / data_name(3, 5)).write_bytes(path.read_bytes())
    with pytest.raises(OutputError, match="holds rows that another file in its folder holds too"):
        opened(tmp_path / "out", source(), resume=True)


# ---------------------------------------------------------------- when what is written


def test_when_results_go_to_disk(tmp_path: Path) -> None:
    policy = CheckpointPolicy(chunk_rows=10, flush_s=2.0, flush_rows=5, chunk_s=1000.0)
    input_ = source(100)
    with opened(tmp_path / "out", input_, policy=policy, now=0.0) as checkpoint:
        blocks = input_.blocks([], checkpoint.keep, skip=checkpoint.done, rows=10)
        checkpoint.tick(100.0)
        checkpoint.begin(next(blocks))
        assert checkpoint.add([Completed(0, "x")], 101.0) == 0
        assert checkpoint.tick(102.9) == 0
        assert checkpoint.tick(103.0) == 1, "after flush_s"
        assert checkpoint.add([Completed(row, "x") for row in range(1, 5)], 103.1) == 0
        assert checkpoint.add([Completed(5, "x")], 103.2) == 5, "at flush_rows"
        assert visible(tmp_path / "out") == []
        assert checkpoint.add([Completed(row, "x") for row in range(6, 10)], 103.3) == 4, "a chunk is published at once"
        assert len(visible(tmp_path / "out")) == 10
        assert parts_in(tmp_path) == []
        checkpoint.begin(next(blocks))
        assert checkpoint.add([Completed(10, "x")], 104.0) == 0
        assert checkpoint.tick(90.0) == 1, "a clock that went back does not keep results waiting"
        checkpoint.interrupt(105.0)


def test_a_young_run_writes_more_often(tmp_path: Path) -> None:
    with opened(tmp_path / "out", input_ := source(), policy=CheckpointPolicy()) as checkpoint:
        checkpoint.begin(next(input_.blocks([], checkpoint.keep, skip=checkpoint.done, rows=30)))
        assert checkpoint.add([Completed(0, "x")], 1.0) == 0
        assert checkpoint.tick(1.1) == 0
        assert checkpoint.tick(1.21) == 1


def test_chunks_are_closed_by_size_and_age(tmp_path: Path) -> None:
    for at, (policy, counts) in enumerate(
        (
            (CheckpointPolicy(chunk_rows=7), [3]),
            (CheckpointPolicy(chunk_bytes=79), [2, 3]),
            (CheckpointPolicy(chunk_s=2.0), [2, 3]),
            (CheckpointPolicy(), [1]),
        )
    ):
        sink, input_ = tmp_path / f"out{at}", source()
        with opened(sink, input_, policy=policy) as checkpoint:
            Run(block_rows=5, batch_rows=5, in_flight=1, step_s=1.0).drive(checkpoint, input_)
        assert len(list(sink.glob("data-*"))) in counts
        assert [row["id"] for row in rows_of(sink)] == list(range(30))


def test_an_interrupt_publishes_the_longest_runs_and_keeps_the_rest(tmp_path: Path) -> None:
    policy = CheckpointPolicy(interrupt_files=2)
    input_ = source()
    with opened(tmp_path / "out", input_, policy=policy) as checkpoint:
        checkpoint.begin(next(input_.blocks([], checkpoint.keep, skip=checkpoint.done, rows=30)))
        done = [*range(10), 12, *range(15, 20), 25]
        checkpoint.add([Completed(row, "x") if row % 2 else Failed(row, "k", "m") for row in done], 1.0)
        assert checkpoint.interrupt(2.0) == len(done)
    assert [row["id"] for row in visible(tmp_path / "out")] == [*range(10), *range(15, 20)]
    with opened(tmp_path / "out", input_ := source(), policy=policy, resume=True) as checkpoint:
        assert list(checkpoint.done) == [(0, 10), (12, 13), (15, 20), (25, 26)]
        assert (checkpoint.rows_done, checkpoint.remaining) == (17, 13)
        Run().drive(checkpoint, input_)
    assert [row["id"] for row in rows_of(tmp_path / "out")] == list(range(30))
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize("cut", ["settle", "_delete"])
def test_an_interrupt_in_the_middle_of_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    input_ = source()
    with opened(tmp_path / "out", input_, policy=CheckpointPolicy(chunk_rows=10, flush_s=0.0)) as checkpoint:
        checkpoint.begin(next(input_.blocks([], checkpoint.keep, skip=checkpoint.done, rows=10)))
        checkpoint.add([Completed(row, "x") for row in range(5)], 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(Parts, cut, lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                checkpoint.add([Completed(row, "x") for row in range(5, 10)], 2.0)
        checkpoint.interrupt(3.0)
    assert [row["id"] for row in visible(tmp_path / "out")] == list(range(10))
    with opened(tmp_path / "out", input_ := source(), resume=True) as checkpoint:
        assert list(checkpoint.done) == [(0, 10)]
        Run().drive(checkpoint, input_)
    assert [row["id"] for row in rows_of(tmp_path / "out")] == list(range(30))
    assert leftovers(tmp_path / "out") == []


def test_memory_holds_unresolved_rows_only(tmp_path: Path) -> None:
    input_ = source(2000)
    with opened(tmp_path / "out", input_, policy=CheckpointPolicy(flush_s=0.0)) as checkpoint:
        for block in input_.blocks([], checkpoint.keep, skip=checkpoint.done, rows=100):
            checkpoint.begin(block)
            checkpoint.add([Completed(row, "x") for row in block.ids if row % 100], float(block.ids[-1]))
            checkpoint.tick(block.ids[-1] + 1.0)
        assert checkpoint._ledger.held_rows == 20
        checkpoint.interrupt(1e6)


def test_policies_are_checked() -> None:
    for wrong in ({"chunk_rows": 0}, {"flush_s": -1.0}, {"stale_s": 0.0}):
        with pytest.raises(ConfigError, match="CheckpointPolicy"):
            CheckpointPolicy(**wrong)


def test_published_chunks_over_files_know_their_rows(tmp_path: Path) -> None:
    layout, _ = made(tmp_path)
    layout.parts.mkdir()
    rows = Intervals([(5, 7), (FILE_ROWS, FILE_ROWS + 3)])
    table = pa.table({"a": range(5), "error": pa.array(["x", None, None, None, "y"])})
    Published(layout, FaultyOps()).publish(table.schema, [table], rows)
    found = Published(layout, FaultyOps())
    found.scan()
    assert found.rows == rows
    assert list(found.failed()) == [(5, 6), (FILE_ROWS + 2, FILE_ROWS + 3)]
    assert found.file_of(FILE_ROWS) is found.files[0]
    assert found.file_of(7) is None
    assert (found.counts().rows, found.counts().failed) == (5, 2)
