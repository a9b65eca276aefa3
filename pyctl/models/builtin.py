"""The trained model that ships in this package, and generated ones kept on disk.

A generated model is made on first use and found again by a name that covers everything it depends on.
"""

from __future__ import annotations

import hashlib
from functools import cache
from os import PathLike
from pathlib import Path

from pyctl.models.generate import write_model
from pyctl.models.shapes import Shape

__all__ = ["builtin_model", "cached_model"]


def cached_model(shape: Shape, directory: str | PathLike[str], *, seed: int = 0) -> Path:
    """The model of `shape` and `seed` in `directory`, generated there if it is missing.

    The file name carries a digest of the shape and of this package's source, so another generator makes another file.
    Any number of threads and processes may call this at once: each sees a whole file.
    """
    digest = hashlib.blake2b(f"{_source_digest()} {shape!r}".encode(), digest_size=6).hexdigest()
    path = Path(directory) / f"{shape.name}-{seed}-{digest}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, shape, seed=seed)
    return path


def builtin_model() -> Path:
    """The built-in model: `qwen35` with four million parameters, trained to recall what it is told (docs/model.md)."""
    return Path(__file__).with_name("builtin.gguf")


@cache
def _source_digest() -> str:
    digest = hashlib.blake2b()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
