"""``df.infer`` on pandas: inputs, columns, dtypes, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import daskinfer
from daskinfer import Driver
from daskinfer.config import ModelSpec
from daskinfer.dataframe import progress
from daskinfer.dataframe.columns import as_dtype
from daskinfer.errors import (
    ConfigError,
    MissingColumnError,
    ModelLoadError,
    OutputClashError,
    RowFailedError,
    TemplateError,
    UnknownOptionError,
)
from daskinfer.storage.outputs import arrow_type
from daskinfer.testing import call_counts, echo_spec, loads, read_log, wait_until
from tests.dataframe.conftest import text_frame
from tests.dataframe.engines import Misfits, ShowInput, ShowParams

TEXT = pd.StringDtype("pyarrow")
ECHO = {"model": "echo", "engine": "echo", "isolation": "thread"}


def errors_of(frame: pd.DataFrame, column: str = "output") -> list[str | None]:
    return [None if pd.isna(error) else error.partition(":")[0] for error in frame[f"{column}_error"]]


def values_of(column: Any) -> list[Any]:
    return [None if value is pd.NA else value for value in column.tolist()]


# ---------------------------------------------------------------- columns


def test_columns_are_added_and_the_frame_stays_as_it_was(light: ModelSpec) -> None:
    frame = pd.DataFrame({"text": ["a", "b"], "n": [1, 2]}, index=[7, 7])
    before = frame.copy()
    made = frame.infer.generate("{n}: {text}", model=light, output="answer")
    assert list(made.columns) == ["text", "n", "answer", "answer_error"]
    assert made["answer"].tolist() == ["<1: a>", "<2: b>"]
    assert made.index.tolist() == [7, 7]
    assert made["answer"].dtype == made["answer_error"].dtype == TEXT
    pd.testing.assert_frame_equal(frame, before)


def test_details_are_counts_without_fractions(light: ModelSpec) -> None:
    made = text_frame(["a b", None]).infer.generate("{text}", model=light, details=True, errors="column")
    assert made["output_prompt_tokens"].dtype == made["output_completion_tokens"].dtype == pd.Int64Dtype()
    assert values_of(made["output_prompt_tokens"]) == [2, None]
    assert values_of(made["output_finish_reason"]) == ["stop", None]


@pytest.mark.parametrize(
    ("description", "dtype"),
    [
        ("string", TEXT),
        ("json", TEXT),
        ("bool", pd.BooleanDtype()),
        ("int32", pd.Int32Dtype()),
        ("float32", pd.Float32Dtype()),
        ("float64", pd.Float64Dtype()),
        ("float16", pd.ArrowDtype(pa.float16())),
        ("float32[3]", pd.ArrowDtype(pa.list_(pa.float32(), 3))),
        (
            "struct<label: string, score: float32>",
            pd.ArrowDtype(pa.struct([("label", pa.string()), ("score", pa.float32())])),
        ),
    ],
)
def test_each_type_of_output_has_one_dtype(description: str, dtype: Any) -> None:
    assert as_dtype(arrow_type(description)) == dtype


def test_vectors_are_arrow_lists_of_fixed_size() -> None:
    frame = text_frame(["a", None, "b"])
    made = frame.infer.embed("text", **ECHO, engine_options={"output": "vector", "dims": 3})
    assert made["vector"].dtype == pd.ArrowDtype(pa.list_(pa.float32(), 3))
    assert made["vector"].isna().tolist() == [False, True, False]
    assert np.stack(made["vector"].dropna().to_numpy()).shape == (2, 3)


@pytest.mark.parametrize("name", ["output", "output_error"])
def test_a_column_that_is_there_already_is_not_overwritten(name: str) -> None:
    with pytest.raises(OutputClashError, match=name):
        text_frame(["a"]).rename(columns={"text": name}).infer.generate(name, **ECHO)


# ---------------------------------------------------------------- inputs


def test_a_column_s_name_is_the_column_and_braces_make_a_template(light: ModelSpec) -> None:
    frame = pd.DataFrame({"a {b}": ["x"], "b": ["y"]})
    assert frame.infer.generate("a {b}", model=light)["output"].tolist() == ["<x>"]
    assert frame.infer.generate("b is {b}", model=light)["output"].tolist() == ["<b is y>"]


def test_c03_values_that_are_no_text_fail_their_own_row(light: ModelSpec, echo_log: Path) -> None:
    values = ["ok", None, float("nan"), pd.NA, 7, 3.5, b"raw", True, ["x"]]
    frame = pd.DataFrame({"text": pd.Series(values, dtype=object, index=list("abcdefghi"))})
    made = frame.infer.generate("text", model=light)
    assert values_of(made["output"]) == ["<ok>", *[None] * 8]
    assert errors_of(made) == [None, *["missing_prompt"] * 3, *["wrong_type"] * 5]
    for kind, error in zip(("int", "float", "bytes", "bool", "str"), made["output_error"].tolist()[4:], strict=True):
        assert kind in error
        assert "TextEncodeInput" not in error
    assert made.index.tolist() == list("abcdefghi")
    assert sum(call_counts(echo_log).values()) == 1


@pytest.mark.parametrize("dtype", ["object", "str", "string[pyarrow]", "string[python]", "large", "category"])
def test_c03_c30_every_kind_of_text_column_gives_the_same(light: ModelSpec, dtype: str) -> None:
    kind: Any = pd.ArrowDtype(pa.large_string()) if dtype == "large" else dtype
    frame = pd.DataFrame({"text": pd.Series(["a", None, "b"], dtype=kind)})
    made = frame.infer.generate("text", model=light)
    assert values_of(made["output"]) == ["<a>", None, "<b>"]
    assert errors_of(made) == [None, "missing_prompt", None]
    assert made["text"].dtype == frame["text"].dtype
    assert made["output"].dtype == TEXT


def test_c09_conversations_read_from_parquet_are_those_that_were_written(tmp_path: Path) -> None:
    chats: list[Any] = [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
        [
            {"role": "user", "content": "a", "name": "Al"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        None,
    ]
    frame: Any = pd.DataFrame({"messages": chats})
    frame.to_parquet(tmp_path / "chats.parquet")
    wanted = values_of(frame.infer.apply(ShowInput, messages="messages", isolation="thread")["output"])
    assert json.loads(wanted[2])[0] == {"role": "user", "content": "a", "name": "Al"}
    assert "None" not in "".join(wanted[:3])
    for backend in ({}, {"dtype_backend": "pyarrow"}):
        read: Any = pd.read_parquet(tmp_path / "chats.parquet", **backend)  # type: ignore[call-overload]
        before = read["messages"].map(repr).tolist()
        made = read.infer.apply(ShowInput, messages="messages", isolation="thread")
        assert values_of(made["output"]) == wanted
        assert read["messages"].map(repr).tolist() == before
    texts: Any = pd.DataFrame({"messages": [None if chat is None else json.dumps(chat) for chat in chats]})
    assert values_of(texts.infer.apply(ShowInput, messages="messages", isolation="thread")["output"]) == wanted


def test_a_chat_is_answered(light: ModelSpec) -> None:
    frame = pd.DataFrame({"messages": [[{"role": "user", "content": "hi"}], []]})
    made = frame.infer.chat("messages", model=light)
    assert values_of(made["output"]) == ["<hi>", None]
    assert errors_of(made) == [None, "empty_prompt"]


def test_columns_that_are_not_text_are_left_alone(light: ModelSpec) -> None:
    frame = pd.DataFrame({"text": ["a"], 5: [1.5], ("x", "y"): ["z"], "list": [[1, 2]]})
    made = frame.infer.generate("text", model=light)
    assert made.columns.tolist() == ["text", 5, ("x", "y"), "list", "output", "output_error"]


# ---------------------------------------------------------------- few rows and none


def test_c27_no_usable_row_loads_no_model(light: ModelSpec, echo_log: Path) -> None:
    one = text_frame(["a"]).infer.generate("text", model=light, details=True)
    assert len(loads(echo_log)) == 1
    before = len(read_log(echo_log))
    for values in ([], [None, None]):
        made = text_frame(values).infer.generate("text", model=light, details=True)
        assert made.dtypes.equals(one.dtypes)
        assert len(made) == len(values)
    assert len(read_log(echo_log)) == before


def test_one_engine_serves_several_calls(light: ModelSpec, echo_log: Path) -> None:
    for _ in range(3):
        text_frame(["a"]).infer.generate("text", model=light)
    assert len(loads(echo_log)) == 1


# ---------------------------------------------------------------- rows in trouble


def test_errors_raise_names_the_row_and_why(light: ModelSpec) -> None:
    with pytest.raises(RowFailedError, match=r"row 1 failed \(missing_prompt\).*errors='column'"):
        text_frame(["a", None]).infer.generate("text", model=light, errors="raise")
    assert list(text_frame(["a"]).infer.generate("text", model=light, errors="raise").columns) == ["text", "output"]


@pytest.mark.cluster
def test_poison_and_transient_rows_are_treated_as_in_a_run(echo_log: Path, fault_dir: Path) -> None:
    faults = {"poison": ["exit"] * 9, "flaky": ["connection_error", "ok"], "wrong": "value_error"}
    spec = echo_spec(log=echo_log, faults=faults, faults_dir=fault_dir, capacity=8)
    values = [f"row {i}" for i in range(40)]
    values[11], values[23], values[31] = "a poison", "a flaky one", "a wrong one"
    made = text_frame(values).infer.generate("text", model=spec, retry=daskinfer.RetryPolicy(backoff_s=0.01))
    assert [errors_of(made)[at] for at in (11, 23, 31)] == ["engine_died", None, "error"]
    assert made["output"].isna().sum() == 2
    assert made["output"].tolist()[23] == "<a flaky one>"


def test_an_output_that_does_not_fit_its_column_fails_its_row() -> None:
    made = text_frame(["a", "bad"]).infer.apply(Misfits, "text", isolation="thread")
    assert values_of(made["output"]) == ["a", None]
    assert errors_of(made) == [None, "wrong_type"]
    with pytest.raises(RowFailedError, match="wrong_type"):
        text_frame(["bad"]).infer.apply(Misfits, "text", isolation="thread", errors="raise")


def test_a_model_that_cannot_be_loaded_says_why(echo_log: Path) -> None:
    spec = echo_spec(isolation="thread", load_error="no such weights")
    with pytest.raises(ModelLoadError, match="no such weights"):
        text_frame(["a"]).infer.generate("text", model=spec)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"prompt": "missing"}, MissingColumnError, "the input has 'text'"),
        ({"prompt": "{missing}"}, MissingColumnError, "missing"),
        ({"prompt": "{text"}, TemplateError, "text"),
        ({"errors": "ignore"}, ConfigError, "'column' or 'raise'"),
        ({"on_long": "cut"}, ConfigError, "'error' or 'truncate'"),
        ({"side": "middle"}, ConfigError, "'left' or 'right'"),
        ({"output": ""}, ConfigError, "name of a column"),
        ({"max_tokens": 3}, UnknownOptionError, "max_new_tokens"),
        ({"temperature": -1}, ConfigError, "temperature"),
        ({"token_ids": True}, ConfigError, "token_ids"),
        ({"engine_options": {"capacty": 3}}, UnknownOptionError, "capacity"),
    ],
)
def test_settings_that_cannot_work_are_said_before_anything_runs(
    arguments: Any, error: type[Exception], told: str
) -> None:
    prompt = arguments.pop("prompt", "text")
    with pytest.raises(error, match=told):
        text_frame(["a"]).infer.generate(prompt, **{**ECHO, **arguments})


def test_a_column_that_is_there_twice_is_refused() -> None:
    frame = pd.DataFrame([["a", "b"]], columns=["text", "text"])
    with pytest.raises(ConfigError, match="2 columns 'text'"):
        frame.infer.generate("text", **ECHO)


def test_what_a_specification_says_is_not_said_twice(light: ModelSpec) -> None:
    settings: list[dict[str, Any]] = [{"dtype": "float32"}, {"engine": "echo"}, {"engine_options": {}}]
    for setting in settings:
        with pytest.raises(ConfigError, match=f"{next(iter(setting))}=.*the given ModelSpec says that already"):
            text_frame(["a"]).infer.generate("text", model=light, **setting)


def test_progress_of_this_process() -> None:
    spec = echo_spec(isolation="thread", step_s=0.02, capacity=1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(text_frame(["a"] * 50).infer.generate, "text", model=spec)
        (told,) = wait_until(lambda: progress().to_dict("records"), message="the partition")
        assert (told["model"], told["rows"], told["failed"]) == ("echo", 50, 0)
        assert future.result()["output"].count() == 50
    assert progress().empty


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, also where tests run in the background of a shell, which has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_aborts_the_rows(echo_log: Path) -> None:
    spec = echo_spec(isolation="thread", step_s=0.02, capacity=1, log=echo_log)

    def interrupt() -> None:
        wait_until(lambda: call_counts(echo_log), 60, "the first row")
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt)
        try:
            text_frame(["a"] * 5_000).infer.generate("text", model=spec)
        except KeyboardInterrupt:
            interrupted.result()
        else:
            interrupted.result()  # maybe it says why there was none
            pytest.fail("the interrupt was not raised")
    wait_until(lambda: any(entry.event == "abort" for entry in read_log(echo_log)), message="the abort")
    assert progress().empty


def test_sampling_parameters_reach_the_engine(light: ModelSpec) -> None:
    made = text_frame(["a"]).infer.apply(
        ShowParams, "text", isolation="thread", temperature=0.5, max_new_tokens=3, mark="m"
    )
    assert values_of(made["output"]) == ["0.5 3 m"]
    assert text_frame(["a"]).infer.apply(ShowParams, "text", isolation="thread", seed=5)["output"].tolist() == [
        "0.0 256 "
    ]


def test_an_engine_of_one_s_own_with_a_specification_or_a_driver() -> None:
    frame = text_frame(["a"])
    spec = ModelSpec("m", engine="echo", isolation="thread", options={"mark": "m"})
    assert values_of(frame.infer.apply(ShowParams, "text", model=spec, seed=5)["output"]) == ["0.0 256 m"]
    lazy: Any = dd.from_pandas(frame, npartitions=1)
    driver = Driver("m", engine=ShowParams, cluster="tcp://nowhere:1")
    assert list(lazy.infer.apply(ShowParams, "text", model=driver).columns) == ["text", "output", "output_error"]
    with pytest.raises(ConfigError, match=r"ShowInput'.*made with the engine '.*ShowParams'"):
        lazy.infer.apply(ShowInput, "text", model=driver)
    with pytest.raises(ConfigError, match="a ModelSpec or a Driver"):
        lazy.infer.apply(ShowInput, "text", model=None)


def test_truncate_is_what_driver_and_params_say_unless_on_long_does(light: ModelSpec) -> None:
    lazy: Any = dd.from_pandas(text_frame(["a"]), npartitions=1)
    driver = Driver(light, params={"truncate": "left"}, cluster="tcp://nowhere:1")

    def truncate(**settings: Any) -> str | None:
        made = lazy.infer.generate("text", **settings)
        side: str | None = made.expr.inference.params.truncate
        assert ("output_truncated_side" in made.columns) == (side is not None)
        return side

    assert truncate(model=driver) == "left"
    assert truncate(model=driver, side="right") == "right"
    assert truncate(model=driver, on_long="error") is None
    assert truncate(model=driver, on_long="truncate") == "left"
    assert truncate(model=light) is None
    assert truncate(model=light, side="left") is None
    assert truncate(model=light, params={"truncate": "right"}) == "right"
    assert truncate(model=light, on_long="truncate") == "right"


# ---------------------------------------------------------------- the same as functions; lazily


def test_several_columns_make_a_mapping_for_an_engine_of_one_s_own() -> None:
    frame: Any = pd.DataFrame({"a": ["x", None, None], "n": [1, 2, None], "unused": [0, 0, 0]})
    made = frame.infer.apply(ShowInput, ["a", "n"], isolation="thread")
    assert values_of(made["output"]) == ['{"a": "x", "n": 1.0}', '{"a": null, "n": 2.0}', None]
    for wrong in ({}, {"value": "a", "messages": "a"}):
        with pytest.raises(ConfigError, match="messages="):
            frame.infer.apply(ShowInput, **wrong)
    with pytest.raises(ConfigError, match="is no input"):
        frame.infer.apply(ShowInput, 5)


def test_functions_do_the_same(light: ModelSpec) -> None:
    frame = text_frame(["a"])
    pd.testing.assert_frame_equal(
        daskinfer.generate(frame, "text", model=light), frame.infer.generate("text", model=light)
    )
    with pytest.raises(ConfigError, match="list is no pandas or dask DataFrame"):
        daskinfer.generate(["a"], "text", model=light)


@pytest.mark.parametrize(
    ("first", "found"),
    [("dask.dataframe", "True"), ("json", "False")],
)
def test_import_daskinfer_registers_on_libraries_that_are_loaded(first: str, found: str) -> None:
    code = (
        f"import {first}, daskinfer, sys; heavy = 'daskinfer.dataframe' in sys.modules; import pandas as pd\n"
        "print(hasattr(pd.DataFrame, 'infer'), heavy)\n"
        "import warnings; warnings.simplefilter('error'); import daskinfer.dataframe, dask.dataframe as dd\n"
        "frame = pd.DataFrame({'text': ['a']})\n"
        "made = frame.infer.generate('text', model='echo', engine='echo', isolation='thread')\n"
        "print(made['output'].tolist(), hasattr(dd.DataFrame, 'infer'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"{found} False", "['<a>'] True"]


@given(
    st.lists(st.one_of(st.none(), st.text(max_size=8)), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
)
@settings(max_examples=25)
def test_rows_order_and_labels_are_kept(values: list[str | None], labels: list[int]) -> None:
    count = min(len(values), len(labels))
    frame = pd.DataFrame({"text": pd.Series(values[:count], dtype=object, index=pd.Index(labels[:count]))})
    made = frame.infer.generate("text", **ECHO)
    assert made.index.equals(frame.index)
    usable = [value is not None and bool(value.strip()) for value in values[:count]]
    wanted = [f"<{value}>" if use else None for value, use in zip(values[:count], usable, strict=True)]
    assert values_of(made["output"]) == wanted
    assert made["output_error"].isna().tolist() == usable
