"""Finding and loading models: what is refused, dtype, device, threads, and what stays as it was."""

from __future__ import annotations

import logging
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel
from transformers.utils import logging as transformers_logging

from daskinfer.config import ModelSpec
from daskinfer.engines.hf import (
    LanguageModel,
    find,
    load_language_model,
    pick_device,
    pick_dtype,
    quiet,
    release_device_memory,
    set_threads,
)
from daskinfer.errors import ConfigError, UntrustedModelError
from tests.engines import tiny

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.make(tmp_path / "model")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "cache"))


def load(folder: Path, **spec: Any) -> LanguageModel:
    return load_language_model(ModelSpec(str(folder), **spec))


# ---------------------------------------------------------------- finding


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "a/b/c", "missing.gguf", "~/no-such-model"])
def test_no_such_model(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no such folder or file on this worker"):
        find(ModelSpec(name))


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ConfigError, match=r"not a \.gguf; give the model's folder"):
        find(ModelSpec(str(path)))


def test_incomplete_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find(ModelSpec(str(tmp_path)))
    (folder / "model.safetensors").rename(folder / "weights")
    with pytest.raises(ConfigError, match="no weights"):
        find(ModelSpec(str(folder)))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    (folder / "1.safetensors").touch()
    with pytest.raises(ConfigError, match="or not all of them"):
        find(ModelSpec(str(folder)))
    (folder / "2.safetensors").touch()
    assert find(ModelSpec(str(folder))) == folder
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        find(ModelSpec(str(folder)))


def test_hub_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'nobody/nothing'.*hub"):
        find(ModelSpec("nobody/nothing"))


def test_c50_what_the_hub_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    _fake_hub(monkeypatch, folder, [None, None])
    refusing = sys.modules["huggingface_hub"].snapshot_download

    def too_many(name: str, *, local_files_only: bool, **_: Any) -> str:
        if not local_files_only:
            raise OSError("429 Too Many Requests")
        return str(refusing(name, local_files_only=True))

    monkeypatch.setattr("huggingface_hub.snapshot_download", too_many)
    with pytest.raises(ConfigError, match="the hub does not give it: OSError: 429"):
        find(ModelSpec("org/name"))


def _fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, local: list[Path | None]) -> list[bool]:
    """Stand in for the hub's client: ``local`` is what the host has on each local look-up; returns the calls."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls: list[bool] = []

    def snapshot_download(name: str, *, local_files_only: bool, **_: Any) -> str:
        calls.append(local_files_only)
        found = local.pop(0) if local_files_only else folder
        if found is None:
            raise LocalEntryNotFoundError("not here")
        return str(found)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def test_c50_a_hub_model_is_fetched_once(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    calls = _fake_hub(monkeypatch, folder, [None, None])
    assert find(ModelSpec("org/name")) == folder
    assert calls == [True, True, False]
    calls = _fake_hub(monkeypatch, folder, [folder])
    assert find(ModelSpec("org/name")) == folder
    assert calls == [True]  # the hub is not asked
    calls = _fake_hub(monkeypatch, folder, [None, folder])
    assert find(ModelSpec("org/name")) == folder
    assert calls == [True, True]  # another process fetched it meanwhile


def test_c50_a_killed_fetch_is_completed(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    partial.mkdir()
    shutil.copy(folder / "config.json", partial)
    calls = _fake_hub(monkeypatch, folder, [partial, partial])
    assert find(ModelSpec("org/name", trust_remote_code=True, options={"allow_pickle": True})) == folder
    assert calls == [True, True, False]


# ---------------------------------------------------------------- what is refused


def _with_code(folder: Path) -> Path:
    """Give a model code of its own that leaves a mark when it is imported."""
    (folder / "configuration_own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig\n"
        f"Path({str(folder / 'MARK')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    tiny.edit_json(folder / "config.json", model_type="own", auto_map=code)
    return folder


def test_c49_code_of_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _with_code(tiny.make(tmp_path / "own.model-1.5"))
    with pytest.raises(UntrustedModelError, match="modeling_own") as caught:
        load(folder)
    assert "trust_remote_code=True" in str(caught.value)
    assert "--trust-remote-code" in str(caught.value)
    assert not (folder / "MARK").exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = load(folder, trust_remote_code=True)
    assert (folder / "MARK").exists()
    assert type(loaded.model).__name__ == "OwnModel"


def test_c49_code_of_the_tokenizer(folder: Path) -> None:
    tiny.edit_json(
        folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]}
    )
    (folder / "own.py").write_text("raise SystemExit('ran')")
    tiny.edit_json(folder / "config.json", model_type="llama")
    with pytest.raises(UntrustedModelError, match="trust_remote_code=True"):
        load(folder)


def test_a_known_architecture_needs_no_code(folder: Path) -> None:
    tiny.edit_json(folder / "config.json", auto_map={"AutoConfig": "gone.Gone"})
    assert type(load(folder).model).__name__ == "LlamaForCausalLM"


def test_c49_pickled_weights(folder: Path) -> None:
    expected = load(folder).model.state_dict()
    torch.save(expected, folder / "pytorch_model.bin")
    load(folder)  # the safetensors are there
    (folder / "model.safetensors").unlink()
    with pytest.raises(UntrustedModelError, match=r"pytorch_model\.bin") as caught:
        load(folder)
    assert "allow_pickle" in str(caught.value)
    loaded = load(folder, options={"allow_pickle": True}).model.state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_c49_a_pickle_with_a_payload_does_not_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "MARK"

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (mark,)

    torch.save({"a": Payload()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(Exception, match=r"(?i)weights.?only"):
        load(folder, options={"allow_pickle": True})
    assert not mark.exists()


def test_models_for_another_task(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    with quiet():
        BertModel(BertConfig(vocab_size=len(tiny.VOCAB), **sizes)).save_pretrained(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks .* weights of BertLMHeadModel .* random"):
        load(tmp_path)
    tiny.edit_json(tmp_path / "config.json", model_type="vit")
    with pytest.raises(ConfigError, match=r"\(vit\) does not generate text"):
        load(tmp_path)


# ---------------------------------------------------------------- device, dtype, threads


def test_dtype_on_a_cpu(folder: Path) -> None:
    tiny.edit_json(folder / "config.json", dtype="bfloat16")
    assert load(folder).model.dtype == torch.float32
    assert load(folder, dtype="bfloat16").model.dtype == torch.bfloat16


def test_pick_dtype() -> None:
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("auto", torch.device("cuda:0")) == "auto"
    assert pick_dtype("float16", CPU) == torch.float16
    for wrong in ("int8", "float33", "nn"):
        with pytest.raises(ConfigError, match=f"dtype='{wrong}'"):
            pick_dtype(wrong, CPU)


def test_pick_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu") == CPU
    for wrong in ("tpu", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device='{wrong}' cannot be used on this worker"):
            pick_device(wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU


def test_threads() -> None:
    before = torch.get_num_threads()
    set_threads(ModelSpec("m"))
    assert torch.get_num_threads() == before
    set_threads(ModelSpec("m", threads=2))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_release_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("mps"))
    for name in ("cpu", "cuda:0", "mps"):
        release_device_memory(torch.device(name))
    assert emptied == ["cuda", "mps"]


# ---------------------------------------------------------------- what stays as it was


def test_c17_loading_leaves_random_states(folder: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    load(folder)
    assert draw() == expected


def test_quiet_restores() -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()

    def fails_inside() -> None:
        with quiet():
            assert transformers_logging.get_verbosity() == logging.ERROR
            assert not transformers_logging.is_progress_bar_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


def test_engine_base_and_names_load_no_torch() -> None:
    code = "import sys, daskinfer.engines.base, daskinfer.demo; print({'torch', 'transformers'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "set()"
