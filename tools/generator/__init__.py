"""Random-weight GGUF models of the architectures that pyctl is for, and encoders of images: tiny
ones for tests, and full-size ones for benchmarks on machines without the download.
"""

from __future__ import annotations

from tools.generator.generate import cached_model, write_model
from tools.generator.shapes import (
    QWEN36_27B,
    QWEN36_35B_A3B,
    SHAPES,
    TINY_DENSE,
    TINY_FAT,
    TINY_HYBRID,
    TINY_MOE,
    TINY_RERANK,
    Shape,
)
from tools.generator.vision import VISION_SHAPES, VisionShape, finish, write_encoder
from tools.generator.vocab import CHATML_TEMPLATE, Vocab, byte_vocab, read_vocab

__all__ = [
    "CHATML_TEMPLATE",
    "QWEN36_27B",
    "QWEN36_35B_A3B",
    "SHAPES",
    "TINY_DENSE",
    "TINY_FAT",
    "TINY_HYBRID",
    "TINY_MOE",
    "TINY_RERANK",
    "VISION_SHAPES",
    "Shape",
    "VisionShape",
    "Vocab",
    "byte_vocab",
    "cached_model",
    "finish",
    "read_vocab",
    "write_encoder",
    "write_model",
]
