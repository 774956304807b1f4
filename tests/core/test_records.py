import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer import records
from daskinfer.errors import ConfigError, UnknownOptionError
from daskinfer.records import (
    Batch,
    Completed,
    EngineStats,
    Failed,
    Fault,
    FaultKind,
    Report,
    Request,
    SamplingParams,
    Timings,
    Usage,
    input_size,
    pack_results,
    unpack_results,
)

SECRET = "the-secret-prompt"


def round_trip(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


# ---------------------------------------------------------------- sampling parameters


def test_c15_zero_is_greedy_and_negative_is_refused() -> None:
    assert SamplingParams().greedy
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.7).greedy
    with pytest.raises(ConfigError, match=r"temperature=-1: must be a number ≥ 0 \(0 = greedy\)"):
        SamplingParams(temperature=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", True),
        ("max_new_tokens", 1.0),
        ("max_new_tokens", "10"),
        ("max_new_tokens", None),
        ("min_new_tokens", -1),
        ("top_k", -1),
        ("top_k", False),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", None),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", b"end"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5.5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [True]),
        ("ignore_eos", "no"),
        ("ignore_eos", None),
        ("seed", -1),
        ("seed", 1.5),
        ("truncate", "middle"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.*: must be"):
        SamplingParams(**{name: value})


def test_stop_may_be_one_text() -> None:
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]  # null in JSON
    assert SamplingParams(stop_token_ids=np.array([1, 2])).stop_token_ids == (1, 2)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=7).stop_token_ids == (7,)  # type: ignore[arg-type]


def test_numpy_scalars_from_a_column_of_parameters_become_plain_values() -> None:
    params = SamplingParams(
        max_new_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(max_new_tokens=5, temperature=0.5, ignore_eos=True)
    assert [type(value) for value in (params.max_new_tokens, params.temperature, params.ignore_eos)] == [
        int,
        float,
        bool,
    ]


def test_c16_the_default_is_long_and_max_length_is_refused() -> None:
    assert SamplingParams().max_new_tokens == 256
    assert SamplingParams(max_new_tokens=0).max_new_tokens == 0
    with pytest.raises(UnknownOptionError, match=r"no option 'max_length'; it has .*max_new_tokens"):
        SamplingParams().updated(max_length=50)


def test_updated_leaves_the_original() -> None:
    params = SamplingParams(temperature=0.5)
    assert params.updated() is params
    assert params.updated(top_k=3) == SamplingParams(temperature=0.5, top_k=3)
    assert params.top_k == 0
    with pytest.raises(ConfigError, match="top_k"):
        params.updated(top_k=-3)


def test_parameters_go_into_manifests_and_sets() -> None:
    params = SamplingParams(stop=["a"], seed=3)
    assert SamplingParams(**params.to_dict()) == params
    assert params.to_dict()["stop"] == ["a"]
    assert len({params, SamplingParams(stop="a", seed=3), SamplingParams()}) == 2
    assert round_trip(params) == params


# ---------------------------------------------------------------- batches


requests = st.builds(
    Request,
    st.integers(0, 1 << 60),
    st.one_of(st.text(), st.lists(st.integers(0, 1000)), st.just([{"role": "user", "content": "hi"}])),
    st.sampled_from([SamplingParams(), SamplingParams(seed=1), SamplingParams(stop="x")]),
    st.booleans(),
    st.sampled_from([None, "", "Be brief."]),
    st.one_of(st.none(), st.integers(0, 1 << 60)),
)


@given(st.lists(requests).map(tuple), st.integers(0, 5), st.integers(-5, 5), st.booleans())
def test_batches_pickle_in_columns(rows: tuple[Request, ...], attempt: int, priority: int, probe: bool) -> None:
    batch = Batch("daskinfer-k-1", rows, attempt, priority, probe)
    assert round_trip(batch) == batch


def test_a_renumbered_request_knows_its_row() -> None:
    assert Request(3, "x").row == 3
    assert Request(3, "x", origin=17).row == 17


def test_what_the_rows_share_travels_once() -> None:
    system = "s" * 10_000
    rows = tuple(Request(i, "x", SamplingParams(seed=1), system=system) for i in range(100))
    assert len(pickle.dumps(Batch("k", rows))) < 2 * len(system)


# ---------------------------------------------------------------- results

usages = st.builds(Usage, st.integers(0, 99), st.integers(0, 99), st.integers(0, 3))
completed = st.builds(
    Completed,
    st.integers(0, 1 << 60),
    st.one_of(st.text(), st.just({"label": "good", "score": 0.5}), st.lists(st.text(), max_size=2)),
    st.sampled_from(["stop", "length", None]),
    usages,
)
failed = st.builds(Failed, st.integers(0, 1 << 60), st.text(), st.text())


@given(st.lists(st.one_of(completed, failed)), st.one_of(st.none(), st.just(Fault(FaultKind.ENGINE_DIED, "x", (1, 2)))))
def test_reports_pickle_in_columns(results: list[Any], fault: Fault | None) -> None:
    report = Report("k", tuple(results), fault, Usage(1, 2), Timings(0.5, 1.5), "tcp://w")
    again = round_trip(report)
    assert [r for r in again.results if r.ok] == [r for r in results if r.ok]
    assert [r for r in again.results if not r.ok] == [r for r in results if not r.ok]
    assert (again.key, again.fault, again.usage, again.timings, again.worker) == (
        "k",
        fault,
        Usage(1, 2),
        Timings(0.5, 1.5),
        "tcp://w",
    )


def test_vectors_travel_as_one_array() -> None:
    vectors = np.arange(32, dtype=np.float32).reshape(8, 4)
    results = [Completed(i, vector) for i, vector in enumerate(vectors)]
    packed = pack_results(results)
    assert packed[1].shape == (8, 4)
    for before, after in zip(results, unpack_results(pickle.loads(pickle.dumps(packed))), strict=True):
        assert after.id == before.id
        assert isinstance(after, Completed)
        assert np.array_equal(after.output, before.output)
        assert after.output.dtype == np.float32


def test_vectors_of_unequal_shape_or_type_travel_one_by_one() -> None:
    outputs = [np.zeros(2, np.float32), np.zeros(3, np.float32), np.zeros(3, np.float64)]
    packed = pack_results([Completed(i, output) for i, output in enumerate(outputs)])
    assert [output.dtype for output in packed[1]] == [np.float32, np.float32, np.float64]
    mixed = pack_results([Completed(0, outputs[0]), Completed(1, "text")])
    assert unpack_results(mixed)[1] == Completed(1, "text")


def test_results_say_whether_they_are_ok() -> None:
    assert Completed(1, "x").ok
    assert not Failed(1, "too_long", "5,003 tokens").ok
    assert Failed(1, "too_long", "5,003 tokens").error == "too_long: 5,003 tokens"


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Request(7, SECRET, system=SECRET), "<Request 7>"),
        (Batch("k", (Request(7, SECRET),), attempt=1), "<Batch k: 1 rows, attempt 1>"),
        (Batch("k", (Request(7, SECRET),), probe=True), "<Batch k: 1 rows, attempt 0, probe>"),
        (Completed(7, SECRET, "stop"), "<Completed 7: stop>"),
        (Completed(7, SECRET), "<Completed 7: done>"),
        (Report("k", (Completed(7, SECRET),)), "<Report k: 1 results>"),
        (Report("k", (), Fault(FaultKind.WORKER_LOST)), "<Report k: 0 results, worker_lost>"),
    ],
)
def test_no_repr_shows_a_prompt(value: Any, text: str) -> None:
    assert repr(value) == text
    assert SECRET not in f"{value} {[value]} {(value,)!r}"


# ---------------------------------------------------------------- sizes and sums


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("", 1),
        ("abc", 4),
        ("語語", 7),
        ("\ud800", 2),
        ([], 1),
        ([1, 2, 3], 13),
        ((1, 2, 3), 13),
        ([{"role": "user", "content": "hi"}], 10),
        (None, 8),
        (b"bytes", 8),
    ],
)
def test_sizes_are_about_the_bytes_that_travel(value: Any, size: int) -> None:
    assert input_size(value) == Request(0, value).size == size


@given(st.lists(usages))
def test_usage_adds_up(parts: list[Usage]) -> None:
    total = sum(parts, Usage())
    assert total.prompt_tokens == sum(part.prompt_tokens for part in parts)
    assert total.completion_tokens == sum(part.completion_tokens for part in parts)
    assert total.truncated_tokens == sum(part.truncated_tokens for part in parts)


def test_occupancy_counts_the_steps_with_rows_waiting() -> None:
    assert math.isnan(EngineStats(capacity=4, steps=3, row_steps=9).occupancy)
    assert EngineStats(capacity=4, full_steps=2, full_row_steps=6).occupancy == 0.75


def test_every_noun_pickles_and_is_frozen() -> None:
    for value in (
        Usage(1),
        Timings(1.0),
        Failed(1, "a", "b"),
        Completed(1, "x"),
        Request(1, "x"),
        EngineStats(),
        Fault(FaultKind.ABORTED),
    ):
        assert round_trip(value) == value
        with pytest.raises(AttributeError):
            setattr(value, type(value).__slots__[0], 3)
    assert sorted(records.__all__) == records.__all__


def test_rows_of_a_block_share_it_and_their_usage() -> None:
    results = [Completed(i, vector, None, Usage(3)) for i, vector in enumerate(np.ones((4, 2), np.int8))]
    first, *others = unpack_results(pack_results(results))
    assert isinstance(first, Completed)
    for other in others:
        assert isinstance(other, Completed)
        assert other.output.base is first.output.base
        assert other.usage is first.usage
    scalars = pack_results([Completed(i, np.float32(i)) for i in range(3)])
    assert scalars[1].shape == (3,)
