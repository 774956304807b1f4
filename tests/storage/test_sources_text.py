"""Rows of text files: every character, every bad row, stable ids."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from daskinfer.errors import MissingColumnError, SourceError
from daskinfer.storage import Block, FileInfo, Intervals, Source, open_source
from daskinfer.storage.base import FILE_ROWS
from daskinfer.storage.kinds import is_json


def read(
    source: Source, *needed: str, keep: tuple[str, ...] | None = None, skip: Intervals | None = None, rows: int = 3
) -> list[Block]:
    kept = source.columns if keep is None else keep
    blocks = list(source.blocks(needed or source.columns, kept, skip=skip or Intervals(), rows=rows))
    for block in blocks:
        assert 0 < len(block) <= rows
        assert block.kept.num_rows == len(block)
        assert block.kept.schema.equals(source.schema(kept), check_metadata=True)
        assert list(block.ids) == sorted(set(block.ids))
        assert all(len(column) == len(block) for column in block.values.values())
        assert len({row // FILE_ROWS for row in block.ids}) == 1, "a block is of one file"
    return blocks


def ids(blocks: list[Block]) -> list[int]:
    return [row for block in blocks for row in block.ids]


def column(blocks: list[Block], name: str) -> list[Any]:
    return [value for block in blocks for value in block.values[name]]


def kept(blocks: list[Block], name: str) -> list[Any]:
    return [value for block in blocks for value in block.kept.column(name).to_pylist()]


def bad(blocks: list[Block]) -> dict[int, str]:
    return {block.ids[at]: reason for block in blocks for at, reason in block.bad.items()}


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# ---------------------------------------------------------------- JSON Lines


def test_json_lines_keep_types_and_characters(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "007", "n": 7, "score": 0.1, "whole": 1, "ok": True, "tags": ["a", None], "big": 2**70, "mixed": "x"},
        {"id": "NA", "n": -1, "score": 2, "whole": 2.5, "ok": None, "tags": {"k": "é"}, "big": 1, "mixed": 3},
        {"id": " \u2028é\t", "score": None, "whole": 3, "ok": False, "tags": "t", "big": None},
    ]
    path = write(tmp_path / "in.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    source = open_source(path)
    blocks = read(source)
    assert source.columns == ("id", "n", "score", "whole", "ok", "tags", "big", "mixed")
    for name in source.columns:
        assert column(blocks, name) == [row.get(name) for row in rows]
    types = {field.name: str(field.type) for field in source.schema(source.columns)}
    assert types == {
        "id": "string", "n": "int64", "score": "double", "whole": "double", "ok": "bool",
        "tags": "string", "big": "string", "mixed": "string",
    }  # fmt: skip
    assert {field.name for field in source.schema(source.columns) if is_json(field)} == {"tags", "big", "mixed"}
    assert kept(blocks, "id") == ["007", "NA", " \u2028é\t"]
    assert kept(blocks, "tags") == ['["a", null]', '{"k": "é"}', '"t"']
    assert kept(blocks, "big") == [str(2**70), "1", None]
    assert not bad(blocks)


def test_blank_lines_have_no_id_and_ids_are_stable_when_rows_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", '\n{"a": 0}\n\n  \n{"a": 1}\n{"a": 2}\r\n\n{"a": 3}\n{"a": 4}\n\n')
    source = open_source(path)
    assert column(read(source), "a") == ids(read(source)) == [0, 1, 2, 3, 4]
    assert source.total == 5
    assert source.files[0].rows == 5
    for skip in ([(0, 2)], [(1, 2), (3, 4)], [(4, 5)], [(0, 5)], [(2, FILE_ROWS)]):
        done = Intervals(skip)
        blocks = read(source, skip=done)
        assert column(blocks, "a") == ids(blocks) == [i for i in range(5) if i not in done]


def test_bad_lines_are_bad_rows_with_file_and_line(tmp_path: Path) -> None:
    lines = [
        b'{"a": "x"}',
        b'{"a": "torn',
        b"[1, 2]",
        b'"text"',
        b"",
        b'{"a": "\xff"}',
        b"\x00" * 40,
        b'{"a": "\\ud800"}',
        b"7",
    ]
    path = write(tmp_path / "in.jsonl", b"\n".join(lines) + b'\n{"a": "y"}')
    blocks = read(open_source(path), rows=4)
    assert ids(blocks) == list(range(9))
    assert column(blocks, "a") == ["x", *[None] * 7, "y"]
    assert kept(blocks, "a") == ["x", *[None] * 7, "y"]
    found = bad(blocks)
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7]
    for row, line, what in (
        (1, 2, "not valid JSON"), (2, 3, "a JSON array"), (3, 4, "a JSON string"), (4, 6, "not valid UTF-8"),
        (5, 7, "not valid JSON"), (6, 8, "not valid Unicode"), (7, 9, "a JSON number"),
    ):  # fmt: skip
        assert found[row].startswith(f"{path}, line {line}: ")
        assert what in found[row]


def test_c36_torn_last_line_is_one_bad_row(tmp_path: Path) -> None:
    whole = b"".join(b'{"a": "%d"}\n' % i for i in range(7))
    for torn in (b'{"custom_id":"h","respo', '{"a": "é'.encode()[:-1], b"\x00" * 4096):
        blocks = read(open_source(write(tmp_path / "in.jsonl", whole + torn)), rows=100)
        assert column(blocks, "a") == [*map(str, range(7)), None]
        assert list(bad(blocks)) == [7]
        assert f"{tmp_path / 'in.jsonl'}, line 8: " in bad(blocks)[7]
    assert not bad(read(open_source(write(tmp_path / "in.jsonl", whole + b'{"a": "7"}'))))


def test_later_value_of_another_kind_is_a_bad_row_never_a_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskinfer.storage.text.SAMPLE_ROWS", 3)
    rows: list[Any] = [{"n": i, "s": "x", "f": 0.5, "j": None} for i in range(3)]
    rows += [
        {"n": 2.5, "s": "x"}, {"n": 3.0}, {"n": True}, {"n": "4"}, {"n": 2**63}, {"s": 5}, {"f": 2}, {"f": "2"},
        {"j": {"a": 1}}, {"n": 9, "late": 1},
    ]  # fmt: skip
    source = open_source(write(tmp_path / "in.jsonl", "\n".join(map(json.dumps, rows))))
    blocks = read(source, rows=100)
    assert list(bad(blocks)) == [3, 4, 5, 6, 7, 8, 10]
    assert "line 4: column 'n' holds 2.5 (float), but the first rows hold int64; correct it" in bad(blocks)[3]
    assert kept(blocks, "n") == [0, 1, 2, *[None] * 9, 9]
    assert kept(blocks, "s")[3] == "x", "the fitting values of a bad row are kept"
    assert kept(blocks, "f")[9] == 2.0
    assert kept(blocks, "j")[11] == '{"a": 1}', "a column that was null so far takes anything"
    assert "late" not in source.columns
    assert not bad(read(source, "s", keep=("j",), rows=100)), "columns that are not kept are not checked"


def test_json_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "in.jsonl", '{"f": NaN, "j": [NaN, 1]}\n{"f": 1.5, "j": [Infinity]}'))
    blocks = read(source)
    assert str(kept(blocks, "f")) == "[nan, 1.5]"
    assert kept(blocks, "j") == ["[null, 1]", "[null]"], "JSON text is strict"


@pytest.mark.parametrize("text", ["[\n", '[{"a": 1}, {"a": 2}]', '{\n  "a": 1\n}', b'\xff\xfe{\x00"\x00'])
def test_files_that_are_not_line_wise_are_refused_with_advice(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(SourceError, match=r"in\.json: is (one JSON document; write one object per line|UTF-16)"):
        _ = open_source(write(tmp_path / "in.json", text)).columns


def test_a_file_of_bad_lines_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"in.jsonl, line 1: not valid JSON"):
        _ = open_source(write(tmp_path / "in.jsonl", "a,b\n1,2\n")).columns


@pytest.mark.parametrize("text", ["", "\n\n\n"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.tsv"])
def test_c27_empty_files(tmp_path: Path, name: str, text: str) -> None:
    source = open_source(write(tmp_path / name, text))
    assert source.is_empty
    assert source.columns == ()
    assert list(source.blocks(["text"], ["id"], skip=Intervals(), rows=10)) == []
    assert source.schema(["id"]) == pa.schema([("id", pa.string())])
    assert source.total == 0


def test_bom_is_not_part_of_the_first_row(tmp_path: Path) -> None:
    assert column(read(open_source(write(tmp_path / "in.jsonl", '\ufeff{"a": 1}\n'))), "a") == [1]
    source = open_source(write(tmp_path / "in.csv", "\ufeffa,b\r\n1,2\r\n"))
    assert source.columns == ("a", "b")
    assert column(read(source), "b") == ["2"]


# ---------------------------------------------------------------- CSV


def test_csv_is_text_exactly_as_it_stands(tmp_path: Path) -> None:
    text = 'country,code,note\nNA,007,\nnull,1e5,"two\nlines, ""quoted"""\n\nNaN, x ,é\r\nTrue,,"\n"\n'
    source = open_source(write(tmp_path / "in.csv", text))
    blocks = read(source)
    assert source.columns == ("country", "code", "note")
    expected = {
        "country": ["NA", "null", "NaN", "True"],
        "code": ["007", "1e5", " x ", ""],
        "note": ["", 'two\nlines, "quoted"', "é", "\n"],
    }
    for name, values in expected.items():
        assert column(blocks, name) == kept(blocks, name) == values
    assert source.schema(["code"]).field("code").type == pa.string()
    assert not bad(blocks)


def test_bad_csv_rows_are_bad_rows_with_file_and_line(tmp_path: Path) -> None:
    text = b'a,b\n1,2\n1,2,3\n"x\ny",2\n1\n"q"z,2\n\xff,2\n"never closed,2\n5,6\n'
    path = write(tmp_path / "in.csv", text)
    blocks = read(open_source(path))
    found = bad(blocks)
    assert column(blocks, "a") == ["1", None, "x\ny", None, None, None, None]
    for row, line, what in (
        (1, 3, "3 fields where the header has 2"), (3, 6, "1 fields"), (4, 7, "not valid CSV"), (5, 8, "not valid UTF-8"),
        (6, 9, "not valid CSV (unexpected end of data)"),
    ):  # fmt: skip
        assert found.pop(row).startswith(f"{path}, line {line}: ")
        assert what in bad(blocks)[row]
    assert not found


def test_csv_unclosed_quote_swallows_a_bounded_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import csv

    before = csv.field_size_limit()
    monkeypatch.setattr("daskinfer.storage.delimited._FIELD_LIMIT", 100)
    rows = "".join(f"{i},{'x' * 30}\n" for i in range(20))
    blocks = read(open_source(write(tmp_path / "in.csv", f'a,b\n1,2\n3,"open\n{rows}')))
    assert list(bad(blocks)) == [1]
    assert "field larger than field limit" in bad(blocks)[1]
    assert column(blocks, "a")[-1] == "19"
    assert csv.field_size_limit() == before


def test_csv_fields_may_be_longer_than_pythons_limit(tmp_path: Path) -> None:
    long = "x" * 300_000
    assert column(read(open_source(write(tmp_path / "in.csv", f"a\n{long}\n"))), "a") == [long]


def test_csv_skipping_counts_rows_not_lines(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "in.csv", 'a\n"0\n"\n1\n\n"2\n\n"\n3\n'))
    for skip in ([], [(0, 1)], [(1, 3)], [(0, 3)], [(0, 4)]):
        done = Intervals(skip)
        blocks = read(source, skip=done)
        assert [int(value) for value in column(blocks, "a")] == ids(blocks) == [i for i in range(4) if i not in done]


def test_csv_headers_that_cannot_name_columns(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"line 1: two columns are called 'a'"):
        _ = open_source(write(tmp_path / "in.csv", "a,b,a\n1,2,3\n")).columns
    with pytest.raises(SourceError, match=r"line 1: the header is not valid CSV"):
        _ = open_source(write(tmp_path / "in.csv", '"a"b,c\n1,2\n')).columns


def test_tsv(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "in.tsv", "a\tb\n1,5\tNA\n"))
    assert column(read(source), "a") == ["1,5"]
    assert column(read(source), "b") == ["NA"]


def test_csv_header_without_rows_has_columns_but_is_empty(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "in.csv", "a,b\n"))
    assert source.is_empty
    assert source.columns == ("a", "b")


# ---------------------------------------------------------------- where rows come from


def test_folder_is_read_by_name_and_files_have_their_own_ids(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, values in (("b.jsonl", [3, 4]), ("a.jsonl", [0, 1, 2]), ("c.ndjson", []), ("d.jsonl", [5])):
        write(folder / name, "".join(f'{{"a": {i}}}\n' for i in values))
    write(folder / "_success", "")
    write(folder / ".hidden.csv", "x")
    source = open_source(folder)
    assert [Path(file.path).name for file in source.files] == ["a.jsonl", "b.jsonl", "c.ndjson", "d.jsonl"]
    assert source.total is None
    blocks = read(source, rows=2)
    assert column(blocks, "a") == [0, 1, 2, 3, 4, 5]
    assert ids(blocks) == [0, 1, 2, FILE_ROWS, FILE_ROWS + 1, 3 * FILE_ROWS]
    assert [file.rows for file in source.files] == [3, 2, 0, 1]
    assert source.total == 6


def test_files_keep_the_numbers_of_an_earlier_run_and_finished_ones_are_not_opened(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", f'{{"a": "{name}"}}\n')
    paths = [str(tmp_path / f"{name}.jsonl") for name in "cb"]
    source = open_source(tmp_path)
    source.arrange([FileInfo(path, 0, rows=1) for path in paths])
    blocks = read(source)
    assert column(blocks, "a") == ["c", "b", "a"]
    assert ids(blocks) == [0, FILE_ROWS, 2 * FILE_ROWS]
    Path(paths[0]).unlink()
    assert column(list(source.blocks(["a"], [], skip=Intervals([(0, 1)]), rows=5)), "a") == ["b", "a"]


def test_pattern_and_compression(tmp_path: Path) -> None:
    text = b"".join(b'{"a": %d}\n' % i for i in range(1000))
    write(tmp_path / "x0.jsonl.gz", gzip.compress(text) + gzip.compress(b'{"a": 1000}\n'))
    write(tmp_path / "x1.jsonl.zst", pa.compress(text, "zstd", asbytes=True))
    write(tmp_path / "y.jsonl", text)
    write(tmp_path / "z.csv.gz", gzip.compress(b"a\n1\n"))
    source = open_source(str(tmp_path / "x*.jsonl*"))
    assert column(read(source, rows=300), "a") == [*range(1001), *range(1000)]
    assert column(read(open_source(tmp_path / "z.csv.gz")), "a") == ["1"]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.csv.gz"])
def test_cut_compressed_file_is_named(tmp_path: Path, name: str) -> None:
    head = b"a\n" if "csv" in name else b""
    text = head + b"".join(b'{"a": "%d"}\n' % (i * 7919) for i in range(30_000))
    whole = gzip.compress(text) if name.endswith("gz") else pa.compress(text, "zstd", asbytes=True)
    source = open_source(write(tmp_path / name, whole[: len(whole) // 2]))
    with pytest.raises(SourceError, match=rf"{name}, line \d+: cannot be read on"):
        read(source, rows=1000)


def test_fsspec_urls() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name, values in (("a", [0, 1]), ("b", [2])):
        with fs.open(f"/daskinfer-in/{name}.jsonl", "wb") as file:
            file.write(b"".join(b'{"a": %d}\n' % i for i in values))
    try:
        for url in ("memory://daskinfer-in", "memory://daskinfer-in/*.jsonl"):
            source = open_source(url)
            assert column(read(source), "a") == [0, 1, 2]
            assert [file.size for file in source.files] == [18, 9]
            assert all(file.path.startswith("memory://") and file.mtime for file in source.files)
        assert column(read(open_source("memory://daskinfer-in/b.jsonl")), "a") == [2]
        with pytest.raises(SourceError, match=r"memory://nothing/x.jsonl: does not exist"):
            open_source("memory://nothing/x.jsonl")
    finally:
        fs.rm("/daskinfer-in", recursive=True)
    with pytest.raises(SourceError, match="cannot be reached"):
        open_source("nosuchprotocol://x/y.jsonl")


def test_input_that_cannot_be_read_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"gone.jsonl: does not exist; give .jsonl"):
        open_source(tmp_path / "gone.jsonl")
    with pytest.raises(SourceError, match=r"notes.txt: is of no known kind"):
        open_source(write(tmp_path / "notes.txt", "x"))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(SourceError, match="cannot be read"):
        open_source(tmp_path / "link.jsonl")
    with pytest.raises(SourceError, match=r"matches no files"):
        open_source(str(tmp_path / "*.parquet"))
    folder = tmp_path / "mixed"
    folder.mkdir()
    with pytest.raises(SourceError, match="holds no input files"):
        open_source(folder)
    write(folder / "a.csv", "a\n1\n")
    write(folder / "b.jsonl", "{}\n")
    with pytest.raises(SourceError, match=r"different kinds \(a.csv and b.jsonl\)"):
        open_source(folder)
    (folder / "sub").mkdir()
    with pytest.raises(SourceError, match=r"holds folders \(sub\)"):
        open_source(folder)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "in.jsonl", '{"a": 1}\n'))
    with pytest.raises(MissingColumnError, match="'b'"):
        source.schema(["b"])
    with pytest.raises(MissingColumnError, match="'b'"):
        list(source.blocks(["b"], [], skip=Intervals(), rows=1))


def test_csv_file_that_lacks_a_column_has_bad_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "x,y\n1,2\n")
    write(tmp_path / "b.csv", "y,z\n3,4\n")
    blocks = read(open_source(tmp_path), "y", keep=("x", "y"))
    assert column(blocks, "y") == ["2", None]
    assert "b.csv, line 2: the file has no column 'x'; its header is 'y', 'z'" in bad(blocks)[FILE_ROWS]


def test_no_kept_columns(tmp_path: Path) -> None:
    blocks = read(open_source(write(tmp_path / "in.jsonl", '{"a": 1}\n{"a": 2}\n')), "a", keep=())
    assert column(blocks, "a") == [1, 2]
