"""The models that pyctl brings or fetches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError

__all__ = ["HubSettings", "builtin_model"]


@dataclass(frozen=True)
class HubSettings:
    """A model on huggingface.co, or at an address; ``hf_repo`` is USER/MODEL or USER/MODEL:QUANT.

    ``hf_file`` wins over the quant. ``offline`` takes only what has been fetched before.
    """

    hf_repo: str = ""
    hf_file: str = ""
    hf_token: str = ""
    model_url: str = ""
    offline: bool = False

    def __post_init__(self) -> None:
        if self.hf_file and not self.hf_repo:
            raise ConfigError("--hf-file needs --hf-repo")
        if self.hf_repo and self.model_url:
            raise ConfigError("--hf-repo and --model-url exclude each other")


def builtin_model() -> Path:
    """The built-in model: `qwen35` with four million parameters, trained to recall what it is told (docs/model.md)."""
    return Path(__file__).with_name("builtin.gguf")
