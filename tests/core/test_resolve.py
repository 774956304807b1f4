import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from daskinfer import engines
from daskinfer.config import ModelSpec
from daskinfer.engines import engine_class, engine_fields, engine_names, resolve
from daskinfer.engines.base import BatchEngine
from daskinfer.errors import ConfigError
from daskinfer.records import Request


class GoodEngine(BatchEngine):
    def load(self) -> None:
        pass

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        return [request.input for request in requests]


class HalfEngine(BatchEngine):
    def load(self) -> None:
        pass


class NoEngine:
    def load(self) -> None:
        pass


HERE = __name__


def test_names_are_those_of_the_entry_points() -> None:
    names = engine_names()
    assert list(names) == sorted(set(names))
    assert {"echo", "transformers"} <= set(names)


def test_auto_is_lm_unless_the_model_is_known_to_need_another() -> None:
    assert resolve(ModelSpec("m")) == "lm"
    assert resolve(ModelSpec("m", engine="echo")) == "echo"


def test_a_name_finds_its_entry_point() -> None:
    assert engine_class(ModelSpec("m", engine="echo")).__module__ == "daskinfer.engines.echo"


def test_a_path_finds_a_class() -> None:
    assert engine_class(ModelSpec("m", engine=f"{HERE}:GoodEngine")) is GoodEngine


def test_a_pickled_class_is_used_instead_of_the_name() -> None:
    spec = ModelSpec("m", engine="__main__:Gone", engine_code=cloudpickle.dumps(GoodEngine))
    assert engine_class(spec).__name__ == "GoodEngine"


def test_a_class_that_closes_over_something_else_is_another_engine() -> None:
    def says(word: str) -> type:
        class Says(GoodEngine):
            def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
                return [word for _ in requests]

        return Says

    one, other = says("a"), says("b")
    specs = [ModelSpec("m", **engine_fields(each)) for each in (one, one, other)]
    assert specs[0].key == specs[1].key != specs[2].key
    assert len({spec.engine_digest for spec in specs}) == 1, "their source is the same"


def test_a_class_that_was_pickled_and_loaded_here_still_sees_what_changes() -> None:
    words = ["a"]

    class Says(GoodEngine):
        def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
            return [*words, super().infer(requests)]

    def spec() -> ModelSpec:
        return ModelSpec("m", **engine_fields(Says))

    def answer(found: Any) -> Any:
        return found(ModelSpec("m")).infer([])

    before = spec()
    assert answer(engine_class(before)) == ["a", []]
    assert spec().key == before.key
    words[0] = "b"
    assert answer(Says) == ["b", []]
    assert spec().key != before.key
    assert (answer(engine_class(before)), answer(engine_class(spec()))) == (["a", []], ["b", []])


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("vlm", r"there are .*echo.*an engine of your own is named 'pkg\.mod:Class'"),
        ("no_such_module:Engine", "cannot be imported here: ModuleNotFoundError"),
        (f"{HERE}:Gone", "cannot be imported here: AttributeError"),
        (":Engine", "cannot be imported here: ValueError"),
        (".relative:Engine", "cannot be imported here: TypeError"),
        (f"{HERE}:", "cannot be imported here"),
        (f"{HERE}:HERE", "lacks load, add, step"),
        (f"{HERE}:NoEngine", "lacks add, step, abort, stats, close, output_type; .*BatchEngine"),
        (f"{HERE}:HalfEngine", "lacks infer; .*BatchEngine"),
    ],
)
def test_an_engine_that_cannot_be_used_says_why(engine: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_class(ModelSpec("m", engine=engine))


def test_an_instance_is_not_an_engine_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[HERE], "made", GoodEngine(ModelSpec("m")), raising=False)
    with pytest.raises(ConfigError, match="is not a class"):
        engine_class(ModelSpec("m", engine=f"{HERE}:made"))


def test_a_module_that_breaks_on_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_on_import.py").write_text("raise OSError('libcuda.so is not there')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'breaks_on_import:E' cannot be imported here: OSError: libcuda\.so"):
        engine_class(ModelSpec("m", engine="breaks_on_import:E"))


def test_an_entry_point_that_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("no vllm here")

    monkeypatch.setattr(engines, "entry_points", lambda group: [SimpleNamespace(name="vllm", load=load)])
    with pytest.raises(ConfigError, match="'vllm' cannot be imported here: ImportError: no vllm here"):
        engine_class(ModelSpec("m", engine="vllm"))


def test_a_pickled_class_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match="'__main__:E' cannot be imported here"):
        engine_class(ModelSpec("m", engine="__main__:E", engine_code=b"nonsense"))
