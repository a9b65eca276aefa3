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
from pyctl.models import SPLIT_NAME, is_model_file

__all__ = ["Revision", "cached_files", "choose", "companion_of", "newest", "revisions"]

PREFERRED = ("Q4_K_M", "Q8_0")
"""Quants that are taken if none is asked for, as in llama-server."""


@dataclass(frozen=True)
class Revision:
    """A state of a repository, with its downloaded files: ``names``, relative to ``path``."""

    repo: str
    path: Path
    names: tuple[str, ...]
    rank: tuple[bool, float]  # whether it is what ``main`` was last, and its age


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
            if names:
                yield Revision(repo, path, names, (path.name == main, path.stat().st_mtime))


def newest(repo: str, environ: Mapping[str, str] = os.environ) -> Revision | None:
    """Return the revision of a repository that ``main`` was when it was last fetched, else the
    newest one.
    """
    return max(revisions(environ, repo), key=lambda revision: revision.rank, default=None)


def cached_files(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return the models that can be used without a network, as ``USER/MODEL:QUANT`` where the name
    has the quant, with their (first) files.
    """
    found = {}
    for revision in sorted(revisions(environ), key=lambda revision: revision.rank):
        for name in filter(is_model_file, revision.names):
            quant = _quant(name).upper()
            found[f"{revision.repo}:{quant}" if quant else revision.repo] = revision.path / name
    return dict(sorted(found.items()))


def choose(names: Sequence[str], quant: str, file: str, where: str) -> str:
    """Return the file to load, by llama-server's rules. Raises ConfigError if there is none."""
    models = list(filter(is_model_file, names))
    if file:
        if file in names:
            return file
        raise ConfigError(f"no file {file} in {where}; found {_list(models)}")
    for wanted in (quant,) if quant else PREFERRED:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        if hit := next((name for name in models if pattern.search(name)), ""):
            return hit
    if quant or not models:
        raise ConfigError(
            f"no GGUF file{' of quant ' + quant if quant else ''} in {where}; found {_list(models)}"
        )
    return models[0]


def companion_of(names: Sequence[str], model: str) -> str:
    """Return the name of the vision encoder for ``model`` among ``names``; empty if there is
    none.
    """
    folders = model.split("/")[:-1]

    def rank(name: str) -> tuple[int, int]:
        return len(name.split("/")), -abs(_bits(name) - _bits(model))

    found = [
        name for name in names if name.endswith(".gguf") and "mmproj" in name and name.isprintable()
    ]
    return max(
        (name for name in found if folders[: name.count("/")] == name.split("/")[:-1]),
        key=rank,
        default="",
    )


def _bits(name: str) -> int:
    """Return the bits of a weight, from the name of a file; 0 if it has none."""
    digits = re.search(r"[0-9]{1,4}", _quant(name))
    return int(digits[0]) if digits else 0


def _quant(name: str) -> str:
    """Return the quant that ends the name of a file; empty if it names none."""
    base = name.rpartition("/")[2]
    split = SPLIT_NAME.match(base)
    quant = re.search(r"[-.]([A-Za-z0-9_]+)$", split[1] if split else base.removesuffix(".gguf"))
    return quant[1] if quant else ""


def _directory(environ: Mapping[str, str]) -> Path:
    """Return the directory where the library of huggingface.co keeps its files."""
    general = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{general}/huggingface"
    named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(named)).expanduser()


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
