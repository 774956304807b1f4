"""The tensors of keys and values: pools of slots, and shared segments.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from daskinfer.engines.lm.layout import Operation, Resize
from daskinfer.engines.lm.sequences import Segment

__all__ = ["KVCache", "LayerShape"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps of a token: ``heads`` keys of ``key`` numbers and as many values of ``value``."""

    heads: int
    key: int
    value: int


class KVCache:
    """Keys and values of all layers.

    A pool's tensors have the shape (rows, heads, slot size, width), a segment's (1, heads, tokens, width). New memory is
    zero: what is masked is still multiplied by a weight of 0, so it must be a number.

    Parameters
    ----------
    layers : dict of int to LayerShape
        By the layer's index in the model.
    dtype : torch.dtype
    device : torch.device
    """

    def __init__(self, layers: dict[int, LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self.layers, self.dtype, self.device = layers, dtype, device
        self.pools: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self.segments: dict[Segment, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token, all layers together."""
        numbers = sum(shape.heads * (shape.key + shape.value) for shape in self.layers.values())
        return numbers * self.dtype.itemsize

    def apply(self, operations: Iterable[Operation]) -> None:
        """Resize pools and move rows, in order."""
        for operation in operations:
            if isinstance(operation, Resize):
                self._resize(operation)
            else:
                sources, targets = self.pools[operation.from_size], self.pools[operation.to_size]
                tokens = operation.tokens
                for layer in self.layers:
                    for source, target in zip(sources[layer], targets[layer], strict=True):
                        target[operation.to_index, :, :tokens] = source[operation.from_index, :, :tokens]

    def begin(self, segment: Segment) -> None:
        """Make the tensors of a shared segment."""
        self.segments[segment] = self._zeros(1, len(segment.tokens))

    def drop(self, segments: Sequence[Segment]) -> None:
        """Free the tensors of segments."""
        for segment in segments:
            self.segments.pop(segment, None)

    def free(self) -> None:
        """Free all tensors."""
        self.pools.clear()
        self.segments.clear()

    def blank(self, size: int, index: int) -> None:
        """Zero a slot: a row whose numbers were not finite must leave nothing behind."""
        for keys, values in self.pools[size].values():
            keys[index].zero_()
            values[index].zero_()

    def _resize(self, operation: Resize) -> None:
        old = self.pools.get(operation.size)
        if not operation.rows:
            self.pools.pop(operation.size, None)
            return
        new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in self.layers:
            pair = self._pair(layer, operation.rows, operation.size)
            if old is not None:
                for source, target in zip(old.pop(layer), pair, strict=True):
                    target[: operation.kept] = source[: operation.kept]
            new[layer] = pair
        self.pools[operation.size] = new

    def _zeros(self, rows: int, size: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {layer: self._pair(layer, rows, size) for layer in self.layers}

    def _pair(self, layer: int, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.layers[layer]
        return (
            torch.zeros((rows, shape.heads, size, shape.key), dtype=self.dtype, device=self.device),
            torch.zeros((rows, shape.heads, size, shape.value), dtype=self.dtype, device=self.device),
        )
