"""Models that were fetched from huggingface.co before, found in its cache. Does not import its
library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.model_files import SPLIT_NAME, is_model_file

__all__ = ["Revision", "cached_files", "choose", "find_companion", "main_revision", "revisions"]

PREFERRED = ("Q4_K_M", "Q8_0")
"""Quants that are taken if none is asked for, as in llama-server."""


@dataclass(frozen=True)
class Revision:
    """A state of a repository, with its downloaded files: ``names``, relative to ``path``."""

    repo: str
    path: Path
    names: tuple[str, ...]
    rank: tuple[bool, float]  # whether ``main`` pointed to it last, and its age


def revisions(environ: Mapping[str, str] = os.environ, of: str = "") -> Iterator[Revision]:
    """Yield all revisions of all models in the cache, or of the repository ``of``."""
    for home in sorted(_directory(environ).glob("models--*")):
        repo = home.name.removeprefix("models--").replace("--", "/")
        if of and repo.lower() != of.lower():
            continue
        try:
            main = (home / "refs" / "main").read_text().strip()
        except OSError:
            main = ""
        for path in sorted(home.glob("snapshots/*")):
            files = sorted(path.rglob("*.gguf"))
            names = tuple(str(file.relative_to(path)) for file in files if file.is_file())
            if not names:
                continue
            rank = (path.name == main, path.stat().st_mtime)
            yield Revision(repo, path, names, rank)


def main_revision(repo: str, environ: Mapping[str, str] = os.environ) -> Revision | None:
    """Return the revision of a repository that ``main`` was when it was last fetched, else the
    newest one.
    """
    return max(revisions(environ, repo), key=lambda revision: revision.rank, default=None)


def cached_files(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return the models that can be used without a network, as ``USER/MODEL:QUANT`` where the name
    has the quant, with their (first) files.
    """
    files = {}
    # The newest comes last, and replaces the file of an older one.
    for revision in sorted(revisions(environ), key=lambda revision: revision.rank):
        for name in filter(is_model_file, revision.names):
            model = revision.repo
            quant = _quant(name).upper()
            if quant:
                model = f"{model}:{quant}"
            files[model] = revision.path / name
    return dict(sorted(files.items()))


def choose(names: Sequence[str], quant: str, file: str, where: str) -> str:
    """Return the file to load, by llama-server's rules. Raises ConfigError if there is none."""
    models = list(filter(is_model_file, names))
    if file:
        if file in names:
            return file
        raise ConfigError(f"no file {file} in {where}; found {_list(models)}")
    quants = (quant,) if quant else PREFERRED
    for suffix in quants:
        pattern = re.compile(re.escape(suffix) + "[.-]", re.IGNORECASE)
        for name in models:
            if pattern.search(name):
                return name
    if quant:
        raise ConfigError(f"no GGUF file of quant {quant} in {where}; found {_list(models)}")
    if not models:
        raise ConfigError(f"no GGUF file in {where}; found {_list(models)}")
    return models[0]


def find_companion(names: Sequence[str], model: str) -> str:
    """Return the name of the vision encoder for ``model`` among ``names``; empty if there is
    none.
    """
    folders = model.split("/")[:-1]

    def is_companion(name: str) -> bool:
        if not name.endswith(".gguf") or "mmproj" not in name or not name.isprintable():
            return False
        own_folders = name.split("/")[:-1]
        return own_folders == folders[: len(own_folders)]

    def rank(name: str) -> tuple[int, int]:
        depth = name.count("/")
        return depth, -abs(_bits(name) - _bits(model))

    return max(filter(is_companion, names), key=rank, default="")


def _bits(name: str) -> int:
    """Return the bits of a weight, from the name of a file; 0 if it has none."""
    digits = re.search(r"[0-9]{1,4}", _quant(name))
    return int(digits[0]) if digits else 0


def _quant(name: str) -> str:
    """Return the quant that ends the name of a file; empty if it names none."""
    base = name.rpartition("/")[2]
    split = SPLIT_NAME.match(base)
    stem = split[1] if split else base.removesuffix(".gguf")
    quant = re.search(r"[-.]([A-Za-z0-9_]+)$", stem)
    return quant[1] if quant else ""


def _directory(environ: Mapping[str, str]) -> Path:
    """Return the directory where the library of huggingface.co keeps its files."""
    general = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{general}/huggingface"
    directory = f"{home}/hub"
    for variable in ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):  # the second one wins
        directory = environ.get(variable) or directory
    return Path(os.path.expandvars(directory)).expanduser()


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
