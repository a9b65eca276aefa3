"""Generated models kept on disk: made on first use, found again by a name that covers everything they depend on."""

from __future__ import annotations

import hashlib
from functools import cache
from os import PathLike
from pathlib import Path

from tools.generator.generate import write_model
from tools.generator.shapes import Shape

__all__ = ["cached_model"]


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


@cache
def _source_digest() -> str:
    digest = hashlib.blake2b()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
