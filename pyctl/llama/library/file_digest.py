"""Digests of model files: metadata, and samples of the weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pyctl.errors import ModelError
from pyctl.llama.library.devices import FileTensor, file_head, model_files

__all__ = ["file_digest"]

SAMPLE_BYTES = 4096

SAMPLE_STEP = 2**23
"""SAMPLE_BYTES of each tensor are read at its end and every SAMPLE_STEP bytes from its start: about
10 MB of a 17 GB model. Changes between the samples are not detected.
"""


def file_digest(path: Path, facts: Iterable[object] = ()) -> str:
    """Return the BLAKE2b-128 of ``facts`` and of a model's sizes, metadata and weight samples.
    ModelError if a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        for fact in facts:
            digest.update(f"{fact}\0".encode())
        for file in model_files(path):
            for piece in _content(file, file_head(file).tensors):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror}") from error
    return digest.hexdigest()


def _content(file: Path, tensors: Sequence[FileTensor]) -> Iterator[bytes]:
    """Yield the size of a GGUF file, its bytes before the tensors, and samples of each tensor."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        yield size.to_bytes(8, "little")
        yield stream.read(min((tensor.first for tensor in tensors), default=size))
        for tensor in tensors:
            for at in (
                *range(0, tensor.n_bytes, SAMPLE_STEP),
                max(tensor.n_bytes - SAMPLE_BYTES, 0),
            ):
                stream.seek(tensor.first + at)
                yield stream.read(min(SAMPLE_BYTES, tensor.n_bytes - at))
