"""Vectors, labels and scores: models that read a text once.

::

    Request ─ Task.texts ─▶ texts ─ Tokeniser ─▶ Row(sequences of tokens)             or RowError
    Rows ─ Network ─▶ numbers: per token (vectors, spans) or per sequence (labels, scores)
    numbers ─ Task.outputs ─▶ Completed

``recipe`` reads what a folder says of itself, ``packing`` computes rows without padding.

Runs on: worker; ``EncoderEngine.output_type`` anywhere.
"""

from daskinfer.engines.encoder.engine import EncoderEngine
from daskinfer.engines.encoder.options import EncoderOptions

__all__ = ["EncoderEngine", "EncoderOptions"]
