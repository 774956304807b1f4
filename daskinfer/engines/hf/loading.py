"""Loading models and tokenizers with transformers: quietly, on one device, and leaving the caller's process as it was.

Runs on: worker.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from daskinfer.config import ModelSpec
from daskinfer.engines.hf.sources import find, has_safetensors, untrusted_code
from daskinfer.engines.hf.special import SpecialTokens, context_limit, special_tokens
from daskinfer.errors import ConfigError

__all__ = [
    "LanguageModel",
    "load_language_model",
    "load_tokenizer",
    "load_weights",
    "pick_device",
    "pick_dtype",
    "quiet",
    "release_device_memory",
    "set_threads",
]


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A generating model, ready to run.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        In evaluation mode, on its device. Its generation config is a plain one: nothing that came with the model samples.
    tokenizer : transformers.PreTrainedTokenizerBase
    special : SpecialTokens
    limit : int or None
        Most tokens in a sequence; None where the model has no limit.
    vocab_size : int
        Rows of the embedding table: ids must be smaller.
    device : torch.device
    encoder_decoder : bool
    """

    model: Any
    tokenizer: Any
    special: SpecialTokens
    limit: int | None
    vocab_size: int
    device: torch.device
    encoder_decoder: bool


def load_language_model(spec: ModelSpec) -> LanguageModel:
    """Load what generates text: a causal language model, or one with an encoder.

    Raises
    ------
    ConfigError
        No such model, not a generating model, or no usable end-of-sequence token.
    UntrustedModelError
        See :func:`~daskinfer.engines.hf.sources.find`.
    """
    with quiet(), _kept_random_state():
        folder = find(spec)
        set_threads(spec)
        device = pick_device(spec.device)
        tokenizer = load_tokenizer(folder, spec)
        model = _load_generator(folder, spec, device)
        vocab_size = int(model.get_input_embeddings().weight.shape[0])
        special = special_tokens(tokenizer, model.config, model.generation_config, vocab_size)
        # the model's own temperature, top_p, … must reach no row; this also stops `generate` from filling gaps with them
        model.generation_config = GenerationConfig(
            pad_token_id=special.pad, decoder_start_token_id=special.start, use_cache=True
        )
        return LanguageModel(
            model,
            tokenizer,
            special,
            context_limit(model.config),
            vocab_size,
            device,
            bool(model.config.is_encoder_decoder),
        )


def _load_generator(folder: Path, spec: ModelSpec, device: torch.device) -> Any:
    from transformers import AutoConfig

    with _trust(spec):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        return load_weights(folder, spec, kind, device)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ConfigError(f"model={spec.model!r} ({config.model_type}) does not generate text") from error


# ---------------------------------------------------------------- for any torch engine


def load_tokenizer(folder: Path, spec: ModelSpec) -> Any:
    """Return the tokenizer of a model folder."""
    with _trust(spec):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)


def load_weights(
    folder: Path, spec: ModelSpec, kind: Any, device: torch.device, *, unneeded: tuple[str, ...] = ()
) -> Any:
    """Return a model of a folder in evaluation mode on a device.

    Never with ``device_map="auto"``: a worker of dask-cuda sees all GPUs, and the first of them is its own.

    Parameters
    ----------
    folder : Path
        What :func:`~daskinfer.engines.hf.sources.find` returned.
    spec : ModelSpec
    kind : type
        An auto class of transformers, such as ``AutoModel``.
    device : torch.device
    unneeded : tuple of str
        Beginnings of the names of weights that may be missing, since the caller does not use what they compute.

    Raises
    ------
    ConfigError
        Weights that this class needs are not in the checkpoint: its answers would be random.
    """
    with _trust(spec):
        model, found = kind.from_pretrained(
            folder,
            dtype=pick_dtype(spec.dtype, device),
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=has_safetensors(folder),
            weights_only=True,
            output_loading_info=True,
        )
    missing = sorted(name for name in found["missing_keys"] if not name.startswith(unneeded))
    if missing:
        raise ConfigError(
            f"model={spec.model!r}: the checkpoint lacks {len(missing)} weights of {type(model).__name__} "
            f"({', '.join(missing[:3])}), so its answers would be random; is it a model for this task?"
        )
    return model.to(device).eval()


def pick_device(name: str) -> torch.device:
    """Return the device for "auto" (the first CUDA device that this process sees, else the CPU) or of a torch name.

    Raises
    ------
    ConfigError
        No such device here.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device={name!r} cannot be used on this worker: {str(error).splitlines()[0]}") from None
    return device


def pick_dtype(name: str, device: torch.device) -> Any:
    """Return the dtype of a torch name, or for "auto": float32 on a CPU, elsewhere the checkpoint's ("auto").

    A CPU without hardware for bfloat16 computes it a hundred times more slowly, so it must be asked for.

    Raises
    ------
    ConfigError
        No such floating-point dtype.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype={name!r}: must be 'auto', 'float32', 'bfloat16' or 'float16'")
    return dtype


def set_threads(spec: ModelSpec) -> None:
    """Give torch the number of compute threads of the specification, if it has one; counts for the whole process."""
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)


def release_device_memory(device: torch.device) -> None:
    """Give the memory that torch keeps for later back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars (the hub's too) and log lines below errors, and restore both."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Leave the random generators of the process as they were: a model's constructor draws from them."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


@contextmanager
def _trust(spec: ModelSpec) -> Iterator[None]:
    """Turn transformers' refusal of a model's own code into ours."""
    try:
        yield
    except ValueError as error:
        if spec.trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise untrusted_code(spec, "brings Python code of its own") from error
