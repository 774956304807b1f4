import inspect
import pickle
import re
import threading
from typing import Any

import pytest

from daskinfer import errors
from daskinfer.errors import DaskinferError, RemoteError, describe, safe_str

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, DaskinferError)]
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "UnknownOptionError": ("max_tokens", "SamplingParams", ("temperature", "max_new_tokens")),
    "MissingColumnError": ("text", ("a", "b"), "prompt"),
    "TemplateError": ("{a", "expected '}'"),
    "SourceError": ("rows.jsonl", "is not JSON", 17),
    "OutputClashError": (("answer", "error"),),
    "OutputExistsError": ("out/", 17),
    "OutputLockedError": ("out/", "ada@host, pid 3", 12.5),
    "FingerprintError": ("out/", ("model: a, now b", "seed: 1, now 2")),
    "SourceChangedError": ("rows.jsonl", "has grown"),
    "VersionError": ("1.0", {f"tcp://w-{i}": None if i % 2 else "0.9" for i in range(7)}),
    "ModelLoadError": ("a-model", {"tcp://w-0": "no such file", "tcp://w-1": "no such file", "tcp://w-2": "no memory"}),
    "RowError": ("too long", "too_long"),
    "TooManyFailuresError": (6, 100, "max_failures=5%", "too_long: 5,003 tokens"),
    "RowFailedError": (3, "too_long", "5,003 tokens"),
    "JobInterruptedError": (17, "out/"),
    "UnknownTaskError": ("task-3", 10_000),
    "RemoteError": ("pkg.BadError", "bad", "  File x, line 3"),
}


def example(kind: type[DaskinferError]) -> DaskinferError:
    if kind.__name__ in EXAMPLES:
        return kind(*EXAMPLES[kind.__name__])
    own = "__init__" in vars(kind)
    return kind(*inspect.signature(kind).parameters) if own else kind("what is wrong; what to do")


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_pickles_to_an_equal_one(kind: type[DaskinferError]) -> None:
    error = example(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.args == error.args
    assert vars(again) == vars(error)
    assert str(again) == str(error) != ""


@pytest.mark.parametrize("kind", CLASSES)
def test_every_text_shows_the_values(kind: type[DaskinferError]) -> None:
    error = example(kind)
    for value in error.args:
        if isinstance(value, str) and kind.__name__ != "RowError":
            assert value in str(error)


def test_every_class_is_exported() -> None:
    assert sorted(kind.__name__ for kind in CLASSES) == errors.__all__


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = {}
    stack: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+Error)(?: \(([\w, ]+)\))?", line)
        if found:
            depth = len(found[1]) // 4
            stack[depth:] = [found[2]]
            drawn[found[2]] = {stack[depth - 1] if depth else "Exception"} | set(
                found[3].split(", ") if found[3] else ()
            )
    actual = {kind.__name__: {base.__name__ for base in kind.__bases__} for kind in CLASSES}
    assert drawn == actual


def test_what_the_caller_got_wrong_is_a_value_error() -> None:
    for kind in (errors.ConfigError, errors.InputError, errors.OutputError, errors.RowError):
        assert issubclass(kind, ValueError)


def test_every_class_has_a_docstring() -> None:
    assert [kind for kind in CLASSES if not inspect.getdoc(kind)] == []


def test_engine_errors_carry_their_kind() -> None:
    kinds = {kind.__name__: kind.kind for kind in CLASSES if issubclass(kind, errors.EngineError)}
    assert kinds == {
        "EngineError": "engine",
        "RowError": "rejected",
        "TransientError": "transient",
        "OutOfMemoryError": "out_of_memory",
        "EngineDiedError": "engine_died",
    }
    assert errors.RowError("too long", "too_long").row_kind == "too_long"
    assert errors.RowError("no").row_kind == "rejected"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.SourceError("a.csv", "is empty"), "a.csv: is empty"),
        (errors.SourceError("a.csv", "is torn", 3), "a.csv, line 3: is torn"),
        (
            errors.JobInterruptedError(3),
            "interrupted with 3 rows done; run again with resume=True (--resume) to continue",
        ),
        (errors.RowError("too long"), "too long"),
        (RemoteError("pkg.E", "", ""), "pkg.E"),
        (RemoteError("pkg.E", "bad", ""), "pkg.E: bad"),
    ],
)
def test_texts(error: Exception, text: str) -> None:
    assert str(error) == text


def test_texts_about_many_workers_stay_short() -> None:
    text = str(example(errors.VersionError))
    assert "tcp://w-1: not installed" in text
    assert "and 2 more" in text
    assert "pip install 'daskinfer==1.0'" in text
    assert str(errors.VersionError("1.0", {"w": None})).startswith(
        "the driver has daskinfer 1.0, but w: not installed;"
    )
    assert str(example(errors.ModelLoadError)).count("no such file") == 1


# ---------------------------------------------------------------- foreign exceptions


class NeedsTwoError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class HoldsLockError(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class RaisesInStrError(Exception):
    def __str__(self) -> str:
        raise NeedsTwoError("a", "b")


class GivesNoTextError(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]  # noqa: PLE0307


def raised(error: BaseException, depth: int = 0) -> BaseException:
    def fall(n: int) -> None:
        if n:
            fall(n - 1)
        raise error

    try:
        fall(depth)
    except BaseException as caught:  # noqa: BLE001
        return caught
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (NeedsTwoError("a", "b"), f"{__name__}.NeedsTwoError", "a and b"),
        (HoldsLockError(), f"{__name__}.HoldsLockError", "locked"),
        (ValueError(b"x" * 50_000_000), "ValueError", "b'xxx"),
        (ValueError("y" * 50_000_000), "ValueError", "yyy"),
        (RaisesInStrError(), f"{__name__}.RaisesInStrError", "<its __str__ raised NeedsTwoError>"),
        (GivesNoTextError(), f"{__name__}.GivesNoTextError", "<its __str__ raised TypeError>"),
        (type("GoneError", (Exception,), {"__module__": "no.such.module"})("gone"), "no.such.module.GoneError", "gone"),
        (KeyboardInterrupt(), "KeyboardInterrupt", ""),
    ],
    ids=["two arguments", "lock", "bytes", "text", "str raises", "str gives None", "module is gone", "base"],
)
def test_c41_any_exception_travels_as_text(error: BaseException, name: str, message: str) -> None:
    remote = RemoteError.from_exception(raised(error, depth=50))
    travelled = pickle.loads(pickle.dumps(remote))
    assert travelled.type_name == name
    assert travelled.message.startswith(message)
    assert "in fall" in travelled.details
    assert len(str(travelled).encode()) <= 10_000
    assert len(pickle.dumps(remote)) < 11_000


def test_c41_the_limit_is_in_bytes_whatever_the_text() -> None:
    remote = RemoteError.from_exception(raised(ValueError("語" * 100_000)))
    assert len(str(remote).encode()) <= 10_000
    assert str(remote).startswith("ValueError: 語語")
    odd = RemoteError.from_exception(ValueError("half \ud800"))
    assert str(odd).encode()


def test_a_traceback_is_optional() -> None:
    assert RemoteError.from_exception(raised(ValueError("x")), with_traceback=False).details == ""
    assert RemoteError.from_exception(ValueError("x")).details == ""


def test_describe_and_safe_str() -> None:
    assert describe(ValueError("x")) == "ValueError: x"
    assert describe(ValueError()) == "ValueError"
    assert safe_str(ValueError("é" * 10)) == "é" * 10
