"""GGUF files: converted once, by one process, to a folder that answers as the original does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from daskinfer.config import ModelSpec
from daskinfer.engines.hf import cache as cache_module
from daskinfer.engines.hf import find, load_language_model, quiet
from daskinfer.engines.hf import gguf as module
from daskinfer.engines.hf.cache import locked, made_once
from daskinfer.engines.transformers import TransformersEngine
from daskinfer.errors import ConfigError
from daskinfer.folders import cache_folder
from daskinfer.records import Completed, Request, SamplingParams
from tests.engines import tiny
from tests.engines.conformance import drain

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|a|>"
HEADS, KV_HEADS = 4, 2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rotary dimensions that llama.cpp wants."""
    size = weight.shape[0]
    return weight.reshape(heads, 2, size // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, pre: str = "smollm") -> Any:
    """Write a tiny random Llama with a byte-level tokenizer as GGUF; return the model."""
    tokens = [*bytes_to_unicode().values(), "he", "Ċ1", "ĊĊ", "<|user|>", "<|a|>", "<|end|>"]
    with quiet():
        made = tiny.make(path.parent / "plain", "llama", context=48)
        model = LlamaForCausalLM.from_pretrained(made)
        model.resize_token_embeddings(len(tokens))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(48)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 3) + [3] * 3)
    writer.add_token_merges(["h e", "Ċ 1", "Ċ Ċ"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in _named(model):
        writer.add_tensor(name, weight.detach().float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _named(model: Any) -> list[tuple[str, torch.Tensor]]:
    named = [
        ("token_embd.weight", model.model.embed_tokens.weight),
        ("output_norm.weight", model.model.norm.weight),
        ("output.weight", model.lm_head.weight),
    ]
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        parts = {
            "attn_norm": layer.input_layernorm.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "attn_q": _interleaved(attention.q_proj.weight, HEADS),
            "attn_k": _interleaved(attention.k_proj.weight, KV_HEADS),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        named += [(f"blk.{i}.{name}.weight", weight) for name, weight in parts.items()]
    return named


# ---------------------------------------------------------------- conversion


def test_a_converted_model_answers_as_the_original(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.tiny.model.gguf"
    original = write(path)
    capfd.readouterr()
    loaded = load_language_model(ModelSpec(str(path)))
    assert capfd.readouterr().err == ""
    ids = torch.tensor([[50, 60, 70, 80]])
    with torch.inference_mode():
        assert torch.allclose(loaded.model(ids).logits, original(ids).logits, atol=1e-5)
    (folder,) = [p for p in (cache / "gguf").iterdir() if p.is_dir()]
    assert folder.name.startswith("a.tiny.model-")
    assert find(ModelSpec(str(path))) == folder
    assert loaded.limit == 48
    tokenizer = loaded.tokenizer
    assert tokenizer.decode(tokenizer.encode("he said:\n\n123 déjà")) == "he said:\n\n123 déjà"
    engine = TransformersEngine(ModelSpec(str(path)))
    engine.load()
    engine.add([Request(0, "hehe", SamplingParams(max_new_tokens=3, ignore_eos=True))])
    (result,) = drain(engine)
    assert isinstance(result, Completed)
    assert result.usage.prompt_tokens == 4  # <|user|> he he <|a|>


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["ĊĊ", "1", "2"]), ("gpt-2", ["Ċ", "Ċ", "1", "2"])])
def test_digits_are_split_as_the_vocabulary_was_learned(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    path = tmp_path / "m.gguf"
    write(path, pre)
    tokenizer = load_language_model(ModelSpec(str(path))).tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\n\n12")) == tokens


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    first = module._digest(path)
    assert module._digest(path) == first
    os.utime(path, ns=(1, 1))
    second = module._digest(path)
    path.write_bytes(b"GGUF" + bytes(101))
    assert len({first, second, module._digest(path)}) == 3


def test_broken_files_and_missing_packages(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"broken\.gguf cannot be converted"):
        find(ModelSpec(str(path)))
    assert [p for p in (cache / "gguf").iterdir() if p.is_dir()] == []
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ConfigError, match=r"needs gguf; .*daskinfer\[gguf\]"):
        find(ModelSpec(str(path)))


def test_a_tokenizer_that_changes_when_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    other = tiny.make_tokenizer()
    monkeypatch.setattr(other, "save_pretrained", tiny.make_tokenizer(bos=True).save_pretrained)
    monkeypatch.setattr(module, "_tokenizer", lambda _: other)
    with pytest.raises(ConfigError, match="changes when it is saved"):
        find(ModelSpec(str(path)))


# ---------------------------------------------------------------- the cache


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("DASKINFER_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "daskinfer"


def test_made_once_by_many_processes(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\nfrom pathlib import Path\n"
        "def make(folder):\n"
        "    with open(sys.argv[2], 'a') as log: log.write('x')\n"
        "    for i in range(50): (folder / str(i)).write_text('y')\n"
        "sys.stdin.read(1)\n"
        "made = runpy.run_path(sys.argv[3])['made_once'](Path(sys.argv[1]), make)\n"
        "print(len(list(made.iterdir())))\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "deep" / "folder"),
        str(tmp_path / "log"),
        cache_module.__file__,
    ]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate("g", timeout=100)[0].strip() for process in running]
    assert said == ["50"] * 3
    assert (tmp_path / "log").read_text() == "x"
    assert not (tmp_path / "deep" / ".folder.partial").exists()


def test_a_failed_making_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        made_once(tmp_path / "x", fail)
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == ["x.lock"]
    made_once(tmp_path / "x", lambda folder: (folder / "whole").touch())
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["whole"]


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\nfrom pathlib import Path\n"
        "def make(folder):\n    (folder / 'half').touch()\n    print('in', flush=True)\n    sys.stdin.read()\n"
        "runpy.run_path(sys.argv[2])['made_once'](Path(sys.argv[1]), make)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "x"), cache_module.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    assert (tmp_path / ".x.partial" / "half").exists()
    made = made_once(tmp_path / "x", lambda folder: (folder / "whole").touch())
    assert [p.name for p in made.iterdir()] == ["whole"]
    assert not (tmp_path / ".x.partial").exists()
    with locked(tmp_path / "x.lock"):
        pass
