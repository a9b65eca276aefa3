"""The models that pyctl brings or fetches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.settings.convert import printable, web_address
from pyctl.settings.limit import limit
from pyctl.settings.setting import HUB

__all__ = ["SPLIT_NAME", "HubSettings", "builtin_model", "is_model_file", "split_names"]

SPLIT_NAME = re.compile(r"^(.+)-([0-9]{5})-of-([0-9]{5})\.gguf$", re.IGNORECASE)
"""A file of a model that is split: stem, number from 1, count."""

COMPANIONS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of file names that belong to no separate model."""

MAX_PARTS = limit(512, "files of a split model", "the program ends", "process")


def is_model_file(name: str) -> bool:
    """Return whether a file is a model, or the first of several files of one, by its name, which
    may have folders.
    """
    base = name.rpartition("/")[2]
    is_model = (
        base.endswith(".gguf")
        and base.isprintable()
        and not any(part in base for part in COMPANIONS)
    )
    return is_model and int((SPLIT_NAME.match(name) or ("", "", "1"))[2]) == 1


def hub_name(text: str) -> str:
    """Return ``USER/MODEL``, with or without ``:QUANT``. Raises ValueError for other text."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", text, re.ASCII):
        raise ValueError(f"{text!r} is not of the form USER/MODEL or USER/MODEL:QUANT")
    return text


@dataclass(frozen=True)
class HubSettings:
    """A model on huggingface.co, or at an address; ``hf_repo`` is USER/MODEL or USER/MODEL:QUANT.

    ``hf_file`` wins over the quant; ``draft_repo`` is the same for a draft model. With
    ``mmproj_auto``, the vision encoder in the same repository also comes; ``mmproj_url`` is the
    address of one. ``offline`` takes only files that were fetched before. Raises ConfigError if
    flags exclude each other, or one lacks another.
    """

    hf_repo: str = HUB.flag(
        "",
        "-hf -hfr --hf-repo",
        "model from huggingface.co, stored in its cache; QUANT is Q4_K_M or Q8_0 by default, else "
        "the first file",
        hub_name,
        "LLAMA_ARG_HF_REPO",
        "USER/MODEL[:QUANT]",
    )
    hf_file: str = HUB.flag(
        "", "-hff --hf-file", "file of that repository", str, "LLAMA_ARG_HF_FILE", "FILE"
    )
    hf_token: str = HUB.flag(
        "", "-hft --hf-token", "access token", printable, "HF_TOKEN", "TOKEN", secret=True
    )
    model_url: str = HUB.flag(
        "",
        "-mu --model-url",
        "download the model from this address; interrupted downloads resume",
        web_address,
        "LLAMA_ARG_MODEL_URL",
        "URL",
        secret=True,
    )
    offline: bool = HUB.flag(
        False, "--offline", "use downloaded files only", None, "LLAMA_ARG_OFFLINE"
    )
    draft_repo: str = HUB.flag(
        "",
        "-hfd -hfrd --hf-repo-draft --spec-draft-hf",
        "draft model from huggingface.co; -md names a file of the repository",
        hub_name,
        "LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        "USER/MODEL[:QUANT]",
    )
    mmproj_url: str = HUB.flag(
        "",
        "-mmu --mmproj-url",
        "download the vision encoder from this address",
        web_address,
        "LLAMA_ARG_MMPROJ_URL",
        "URL",
        secret=True,
    )
    mmproj_auto: bool = HUB.flag(
        True,
        "--mmproj-auto",
        "-hf also fetches the repository's vision encoder",
        None,
        "LLAMA_ARG_MMPROJ_AUTO",
        off="--no-mmproj --no-mmproj-auto",
    )

    def __post_init__(self) -> None:
        if self.hf_file and not self.hf_repo:
            raise ConfigError("--hf-file needs --hf-repo")
        if self.hf_repo and self.model_url:
            raise ConfigError("--hf-repo and --model-url exclude each other")


def builtin_model() -> Path:
    """Return the path of the built-in model: `qwen35` with four million parameters, trained to
    recall its prompt (README.md here).
    """
    return Path(__file__).with_name("builtin.gguf")


def split_names(name: str) -> list[str]:
    """Return the names of all files of the model that ``name`` is a file of; itself alone if the
    model is not split.

    Raises ConfigError for too many files.
    """
    if (part := SPLIT_NAME.match(name)) is None:
        return [name]
    if int(part[3]) > MAX_PARTS:
        raise ConfigError(f"{name} has too many parts: at most {MAX_PARTS} are allowed")
    return [f"{part[1]}-{index:05d}-of-{part[3]}.gguf" for index in range(1, int(part[3]) + 1)]
