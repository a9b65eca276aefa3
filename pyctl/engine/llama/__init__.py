"""The one place of the package that talks to llama.cpp, through llama-cpp-python and the extension."""

from __future__ import annotations

from pyctl.engine.llama.backend import LlamaBackend
from pyctl.engine.llama.blocks import open_pinned, take_block
from pyctl.engine.llama.devices import devices
from pyctl.engine.llama.loading import Loaded, load
from pyctl.engine.llama.plan import MemoryPlan
from pyctl.engine.llama.tokenizer import LlamaTokenizer

__all__ = [
    "LlamaBackend",
    "LlamaTokenizer",
    "Loaded",
    "MemoryPlan",
    "devices",
    "load",
    "open_pinned",
    "take_block",
]
