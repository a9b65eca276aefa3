"""Writing a file whole or not at all, and reading one with every checksum checked."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.snapshot import Block
from pyctl.disk.file_format import (
    CorruptFileError,
    Header,
    Part,
    PartKind,
    check_sizes,
    header_size,
    pack,
    unpack,
)
from pyctl.files.atomic_file import open_regular

__all__ = ["check_jobs", "read_header", "read_jobs", "remove_file", "segment_parts", "write_file"]

NOT_DAMAGE = {
    *(
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EACCES,
        errno.EPERM,
        errno.EAGAIN,
        errno.EINTR,
    ),
    *(
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENODEV,
    ),
}
"""Errors of a read that are not the file's: short of something, of another owner, or a drive that
is away.
"""

FIRST_READ = 4096
"""Bytes read in the hope that they hold the whole header."""


def segment_parts(blocks: dict[PartKind, Block]) -> list[Part]:
    """Return a part per block; the checksums are not known yet."""
    return [Part(what, int(block.size), []) for what, block in blocks.items()]


def write_file(path: Path, header: Header, blocks: dict[PartKind, Block]) -> None:
    """Fill and fsync the empty file at ``path``, and enter the checksums into ``header``. Raises
    OSError if the disk refuses.

    The header is written last, at the start of the file, since it has the checksums of all parts.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        offset = header_size(header)
        for part in header.parts:
            for first, last in part.chunks:
                data = blocks[part.kind][first:last].data
                _write(descriptor, data, offset)
                part.crcs.append(crc32(data))
                offset += len(data)
        _write(descriptor, pack(header), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path, sizes: BlockSizes | None = None, file: str = "") -> Header:
    """Return the header of the file at ``path``, whose fingerprint is the directory's.

    With ``sizes`` the parts must have these sizes, so that no more memory is allocated for them.
    ``file`` is the name of the file, if ``path`` has another one. Raises FileNotFoundError or
    CorruptFileError.
    """
    file = file or path.name
    with _opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        header = unpack(os.pread(descriptor, FIRST_READ, 0), file, size)
        if isinstance(header, int):
            header = unpack(os.pread(descriptor, header, 0), file, size)
    if isinstance(header, int):
        raise CorruptFileError(file, f"{size} bytes end within the header")
    if header.fingerprint != path.parent.name:
        raise CorruptFileError(file, f"a file of {header.fingerprint}")
    if sizes is not None:
        check_sizes(header, sizes)
    return header


def read_jobs(
    path: Path, header: Header, outs: dict[PartKind, Block]
) -> Iterator[Callable[[], None]]:
    """Yield a job per chunk of the parts in ``outs``, to be run on any thread: each reads into
    place and verifies the checksum.

    They read and do not map the file: on a mapping, a bad sector would be a signal and not an
    error. Jobs raise FileNotFoundError or CorruptFileError.
    """
    offsets = iter(header.offsets)
    for part in header.parts:
        places = list(zip(part.chunks, offsets, part.crcs, strict=False))
        if part.kind in outs:
            for (first, last), offset, crc in places:
                yield partial(_read_chunk, path, part, outs[part.kind][first:last], offset, crc)


def check_jobs(path: Path, header: Header) -> Iterator[Callable[[], None]]:
    """Return jobs that only check that all parts can be read; each job takes memory for one
    chunk.
    """
    offsets = iter(header.offsets)
    for part in header.parts:
        for (first, last), offset, crc in zip(part.chunks, offsets, part.crcs, strict=False):
            yield partial(_check_chunk, path, part, last - first, offset, crc)


def remove_file(path: Path) -> None:
    """Remove ``path`` if it is there, and not behind a link; of directories in its place, empty
    ones go.
    """
    if path.parent.is_symlink():
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _write(descriptor: int, data: bytes | memoryview[int], at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view = view[written:]
        at = at + written


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yield a descriptor to read from. Raises CorruptFileError if the disk refuses,
    FileNotFoundError, or OSError.
    """
    try:
        descriptor = open_regular(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in NOT_DAMAGE:
            raise
        raise CorruptFileError(path.name, str(error)) from None


def _check_chunk(path: Path, part: Part, size: int, offset: int, crc: int) -> None:
    _read_chunk(path, part, np.empty(size, np.uint8), offset, crc)


def _read_chunk(path: Path, part: Part, out: Block, offset: int, crc: int) -> None:
    data = out.data
    with _opened(path) as descriptor:
        # The whole chunk at once: read-ahead alone requests less than a cold drive can give.
        # Reading past the page cache is not faster, and looking for cached pages (RWF_NOWAIT) makes
        # it slower.
        os.posix_fadvise(descriptor, offset, len(data), os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(data):
            n = os.preadv(descriptor, [data[done:]], offset + done)
            if n == 0:
                raise CorruptFileError(path.name, "ends too early")
            done += n
    if crc32(data) != crc:
        raise CorruptFileError(path.name, f"wrong checksum in the {part.kind.name.lower()}")
