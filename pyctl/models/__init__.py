"""The built-in model, and random-weight GGUF models of the architectures that pyctl is for: tiny ones for tests,
full-size ones for benchmarks on machines without the download."""

from __future__ import annotations

from pyctl.models.builtin import builtin_model, cached_model
from pyctl.models.generate import write_model
from pyctl.models.shapes import QWEN36_27B, QWEN36_35B_A3B, SHAPES, TINY_DENSE, TINY_HYBRID, TINY_MOE, Shape
from pyctl.models.template import CHATML_TEMPLATE
from pyctl.models.vocab import Vocab, byte_vocab, read_vocab

__all__ = [
    "CHATML_TEMPLATE",
    "QWEN36_27B",
    "QWEN36_35B_A3B",
    "SHAPES",
    "TINY_DENSE",
    "TINY_HYBRID",
    "TINY_MOE",
    "Shape",
    "Vocab",
    "builtin_model",
    "byte_vocab",
    "cached_model",
    "read_vocab",
    "write_model",
]
