"""The model, run over many rows at once: end to end where it allows that, else padded.

Runs on: worker.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
)
from transformers.activations import GELUActivation

from daskinfer.config import ModelSpec
from daskinfer.engines.encoder.packing import NotPackableError, installed, laid_out, layout
from daskinfer.engines.encoder.rows import Tokens
from daskinfer.engines.hf import Int8Linear, context_limit, load_weights
from daskinfer.errors import ConfigError

__all__ = ["Network", "load_network"]

_HEADS = {"text": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
_TOLERANCE = 1e-4  # of float32, relative to the largest number


def load_network(folder: Path, spec: ModelSpec, head: str, pad: int | None, device: torch.device) -> Network:
    """Load the model of a folder.

    Parameters
    ----------
    folder : Path
    spec : ModelSpec
    head : {"none", "text", "token"}
        What it ends with: token vectors, or classes of texts or of tokens.
    pad : int or None
        The tokenizer's padding token, for models that do not tell theirs.
    device : torch.device

    Raises
    ------
    ConfigError
        It is not such a model.
    """
    kind = _HEADS.get(head, AutoModel)
    if head == "none":
        config = AutoConfig.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)
        half = any(str(name).endswith("EncoderModel") for name in config.architectures or ())  # of a T5
        kind = AutoModelForTextEncoding if config.is_encoder_decoder or half else AutoModel
    try:
        # a pooler takes no part in embeddings, and many checkpoints lack it
        model = load_weights(folder, spec, kind, device, unneeded=("pooler.",) if head == "none" else ())
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ConfigError(f"model={spec.model!r} is no model for task {spec.task!r}") from error
    if model.config.pad_token_id is None:
        model.config.pad_token_id = pad or 0  # heads of decoders look for the last token that is not this one
    return Network(model, device, per_row=head == "text")


class Network:
    """A loaded model as a function from sequences to numbers.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    device : torch.device
    per_row : bool
        It gives one vector per row (classes of a text) rather than one per token.

    Attributes
    ----------
    packed : bool
        Rows lie end to end.
    limit : int or None
        Most tokens of a sequence.
    vocab_size : int
    padded_tokens : int
        Places computed for padding so far.
    """

    def __init__(self, model: Any, device: torch.device, *, per_row: bool) -> None:
        self.model, self.device, self.per_row = model, device, per_row
        self.limit = context_limit(model.config)
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.packed = False
        self.padded_tokens = 0
        self._lock = threading.Lock()
        known = inspect.signature(model.forward).parameters
        self._accepted = frozenset(known)
        self._fixed = {"use_cache": False} if "use_cache" in known else {}
        self._first_position = 0
        self._pad = int(model.config.pad_token_id)

    def __call__(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Return float32 numbers: shape (rows, classes), or (tokens of all rows, size) without padding between them."""
        with torch.inference_mode():
            return (self._end_to_end(rows) if self.packed else self._side_by_side(rows)).float()

    # ---------------------------------------------------------------- the two ways

    def _end_to_end(self, rows: Sequence[Tokens]) -> torch.Tensor:
        lengths = [len(row.ids) for row in rows]
        positions = torch.cat([torch.arange(length) for length in lengths]) + self._first_position
        inputs = {
            "input_ids": torch.tensor([token for row in rows for token in row.ids])[None],
            "position_ids": positions[None],
        }
        if rows[0].types is not None:
            inputs["token_type_ids"] = torch.tensor([kind for row in rows for kind in row.types or ()])[None]
        with laid_out(lengths):
            found = self._run(inputs)
        return found if self.per_row else found[0]

    def _side_by_side(self, rows: Sequence[Tokens]) -> torch.Tensor:
        lengths = [len(row.ids) for row in rows]
        shape = len(rows), max(lengths)
        ids = torch.full(shape, self._pad)
        types, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        for at, row in enumerate(rows):
            ids[at, : lengths[at]] = torch.tensor(row.ids)
            mask[at, : lengths[at]] = 1
            if row.types is not None:
                types[at, : lengths[at]] = torch.tensor(row.types)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if rows[0].types is not None:
            inputs["token_type_ids"] = types
        with self._lock:
            self.padded_tokens += ids.numel() - sum(lengths)
        found = self._run(inputs)
        return found if self.per_row else found[mask.to(self.device).bool()]

    def _run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        taken = {name: value.to(self.device) for name, value in inputs.items() if name in self._accepted}
        found = self.model(**taken, **self._fixed)
        result: torch.Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
        return result

    # ---------------------------------------------------------------- whether rows may lie end to end

    def pack(self, samples: Sequence[Tokens]) -> bool:
        """Let rows lie end to end if that gives the same numbers for some sample rows; return whether it does.

        Attention with a window, a bias on positions, or a head that looks for the end of a row does not.
        """
        if not {"input_ids", "position_ids"} <= self._accepted or self.model.dtype != torch.float32:
            return False
        before = self.model.config._attn_implementation  # noqa: SLF001 - transformers has no other name for it
        expected = self(samples)
        hook = self._hooked() if self.per_row else None
        gelus = _in_place(self.model)
        try:
            installed(self.model)
            self.packed = True
            for first in (0, self._pad + 1):  # RoBERTa and its kin count positions from there
                self._first_position = first
                if self._agrees(expected, samples):
                    return True
        except (NotPackableError, ValueError, RuntimeError, IndexError, TypeError, AttributeError):
            pass  # another architecture than this was written for: it runs padded, as any model can
        self.packed = False
        self.model.set_attn_implementation(before)
        for parent, name, gelu in gelus:
            setattr(parent, name, gelu)
        if hook is not None:
            hook.remove()
        return False

    def _agrees(self, expected: torch.Tensor, samples: Sequence[Tokens]) -> bool:
        found = self(samples)
        if found.shape != expected.shape:
            return False
        scale = max(float(expected.abs().max()), 1e-3)
        return bool(float((found - expected).abs().max()) <= _TOLERANCE * scale)

    def _hooked(self) -> Any:
        base = getattr(self.model, self.model.base_model_prefix)
        return base.register_forward_hook(_first_tokens(base))

    # ---------------------------------------------------------------- 8 bits

    def quantise(self, samples: Sequence[Tokens]) -> float:
        """Turn the linear layers into 8 bits; return the smallest cosine with what the samples gave before.

        Raises
        ------
        ConfigError
            Not on a CPU in float32.
        """
        if self.device.type != "cpu" or self.model.dtype != torch.float32:
            raise ConfigError("engine_options: int8_weights needs a CPU and dtype float32")
        before = self(samples)
        _replace(self.model)
        return float(torch.cosine_similarity(before, self(samples), dim=1).min())


def _replace(module: Any) -> None:
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:  # an exact type: a subclass may compute something else
            setattr(module, name, Int8Linear(child.weight.detach().float(), child.bias))
        else:
            _replace(child)


class _InPlaceGelu(nn.Module):
    """GELU that writes over its input: the widest tensor of a layer then stays in the cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten.gelu_(x)
        return result


def _in_place(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Let GELUs write over their input; return what was there. Sample rows show whether the input is needed again."""
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for name, child in list(module.named_children()):
        if type(child) is GELUActivation and child.act is nn.functional.gelu:
            setattr(module, name, _InPlaceGelu())
            found.append((module, name, child))
        else:
            found += _in_place(child)
    return found


def _first_tokens(base: Any) -> Callable[..., Any]:
    """Return a hook that gives the head each row's first token, which is all that it looks at."""

    def hook(_: Any, __: Any, output: Any) -> Any:
        lengths = layout()
        if lengths is None:
            return output
        hidden = output.last_hidden_state[0]
        starts = torch.tensor([0, *lengths[:-1]], device=hidden.device).cumsum(0)
        output.last_hidden_state = hidden[starts][:, None]
        if getattr(output, "pooler_output", None) is not None:
            output.pooler_output = base.pooler(output.last_hidden_state)
        return output

    return hook
