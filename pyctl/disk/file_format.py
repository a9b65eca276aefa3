"""The header of a cache file and the names of all files in a cache directory
(docs/internals/disk-format.md).
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import msgspec

from pyctl.cache import plan
from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.snapshot import Prefix
from pyctl.errors import DamagedError
from pyctl.settings.limit import limit

__all__ = [
    "CHUNK",
    "INDEX",
    "MAX_NAME_BYTES",
    "MAX_TOKENS",
    "MODEL",
    "OLDER",
    "PROMPTS",
    "QUARANTINE",
    "RECEIPTS",
    "REPLIES",
    "RULES",
    "SIZES",
    "TAG_BYTES",
    "CorruptFileError",
    "Header",
    "Name",
    "Part",
    "PartKind",
    "PromptName",
    "SegmentName",
    "StateName",
    "check_fingerprint",
    "check_sizes",
    "fits_draft_model",
    "header_size",
    "is_fingerprint",
    "is_obsolete",
    "pack",
    "parent_text",
    "parse",
    "parse_sizes",
    "rules_id",
    "sizes_text",
    "unpack",
]

INDEX = "index.sqlite3"

REPLIES = "replies"
"""Replies as they were sampled; the older half of them has OLDER after the name."""

OLDER = ".older"

TAG_BYTES = 8

PROMPTS = "prompts"

QUARANTINE = "quarantine"
"""The folder of files that a check found wrong: nothing is read from there."""

RULES = "rules"
"""The file with the rules of batch ends of a fingerprint: `rules_id`."""

MODEL = "model"
"""The file with the name of a fingerprint's model, for people."""

MAX_NAME_BYTES = 256

SIZES = "sizes"
"""The sizes that the parts of a fingerprint's files must have."""

MAX_TOKENS = limit(2**24, "tokens of a prefix on disk", "neither written nor read", "disk")

MAX_YEARS = 2.0**40
"""Seconds since the epoch beyond which no file was made."""

_PROMPT = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})\.prompt")

_OBSOLETE = re.compile(r"recent|words|(recent|words|replies)\.\d{1,10}\.tmp")

RECEIPTS = "receipts"
"""The directory of the receipts of all models, which belongs to no fingerprint."""

_FINGERPRINT = re.compile(rf"(?!{RECEIPTS}$)[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}")

_SEGMENT = re.compile(r"(0|[1-9]\d{0,9})-([1-9]\d{0,9})-([0-9a-f]{32})-([0-9a-f]{16})\.rows")

_STATE = re.compile(r"([1-9]\d{0,9})-([0-9a-f]{32})\.state")


_SIZES = re.compile(r"rows (\d{1,12}) \+ n \* (\d{1,12}), state (-1|\d{1,15})\n")


class SegmentName(NamedTuple):
    """The name of a segment's file.

    Two runs can compute other rows for equal tokens (decoded, not prefilled). The tag keeps them
    apart.

    Attributes:
        start: The position of the first token.
        end: The position after the last token.
        digest: The digest of the tokens [0, end).
        tag: A digest over the rows, the batch ends and the parent's name.
    """

    start: int
    end: int
    digest: bytes
    tag: bytes

    def __str__(self) -> str:
        return f"{self.start}-{self.end}-{self.digest.hex()}-{self.tag.hex()}.rows"


class StateName(NamedTuple):
    """The prefix at which a state can be resumed."""

    n: int
    digest: bytes

    @classmethod
    def from_prefix(cls, prefix: Prefix) -> StateName:
        """Return the name of the file for the state at the end of ``prefix``."""
        return cls(prefix.n, prefix.digest)

    @property
    def prefix(self) -> Prefix:
        """The prefix whose state the file holds."""
        return Prefix(self.digest, self.n)

    def __str__(self) -> str:
        return f"{self.n}-{self.digest.hex()}.state"


class PromptName(msgspec.Struct, frozen=True):
    """A recent prompt, in the folder PROMPTS of its fingerprint; as text, names sort by age."""

    made_ns: int
    tag: bytes

    @classmethod
    def new(cls, made_ns: int) -> PromptName:
        """Return a name that no other process makes at the same time."""
        return cls(made_ns, secrets.token_bytes(4))

    @classmethod
    def parse(cls, file: str) -> PromptName | None:
        """Return the name in ``file``; None for others."""
        match = _PROMPT.fullmatch(file)
        return cls(int(match[1], 16), bytes.fromhex(match[2])) if match else None

    def __str__(self) -> str:
        return f"{self.made_ns:016x}-{self.tag.hex()}.prompt"


Name: TypeAlias = SegmentName | StateName
"""The name of a file of a snapshot."""


@lru_cache(maxsize=2**14)
def parse(file: str) -> Name | None:
    """Return the name in ``file``; None for temp files and all other files in the directory."""
    if match := _STATE.fullmatch(file):
        return StateName(int(match[1]), bytes.fromhex(match[2]))
    if (match := _SEGMENT.fullmatch(file)) and int(match[1]) < int(match[2]):
        return SegmentName(
            int(match[1]), int(match[2]), bytes.fromhex(match[3]), bytes.fromhex(match[4])
        )
    return None


def is_obsolete(file: str) -> bool:
    """Return whether an older version of this program made ``file``: it is no longer read, or was
    left over when the program was killed.
    """
    return _OBSOLETE.fullmatch(file) is not None


def check_fingerprint(fingerprint: str) -> str:
    """Return ``fingerprint`` if it can be a directory's name. Raises ValueError otherwise."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError(
            f"a fingerprint is 1 to 128 letters, digits, '.', '_' or '-', not {fingerprint!r}"
        )
    return fingerprint


def is_fingerprint(name: str) -> bool:
    """Return whether the folder of a fingerprint can be called ``name``."""
    return _FINGERPRINT.fullmatch(name) is not None


MAGIC = b"pyctlKV\0"
VERSION = 1

SEGMENT = 1
STATE = 2

EXACT = 1

_PRELUDE = struct.Struct("<8sHBBIQ")

_FIELDS = struct.Struct("<QQd16s8sHHH")

_PART = struct.Struct("<BBBIQ")

_CHUNK = struct.Struct("<II")

CHUNK = 34 * 4 * 30_840
"""Bytes with one checksum, just under 4 MiB, so that threads share the reading."""

_DIGEST_BYTES = 8


def rules_id() -> str:
    """Return a name for the rules of batch ends: snapshots of other rules are never resumed."""
    return hashlib.blake2b(repr(plan.RULES).encode(), digest_size=8).hexdigest()


class CorruptFileError(DamagedError):
    """A stored file whose content does not match its name, ``file``."""


class PartKind(IntEnum):
    """The kinds of parts; the numbers are part of the file format."""

    TOKENS = 1
    ENDS = 2
    ROWS = 3
    STATE = 4
    DRAFT_ROWS = 5
    DRAFT_STATE = 6


PARTS_OF_SEGMENT = [PartKind.TOKENS, PartKind.ENDS, PartKind.ROWS]

PARTS_OF_STATE = [PartKind.STATE]


@dataclass
class Part:
    """A part of a file, in chunks.

    Attributes:
        kind: The kind of the part.
        size: Its bytes.
        crcs: The checksum of each chunk.
        chunk: The bytes of a chunk; the last one may have fewer.
    """

    kind: PartKind
    size: int
    crcs: list[int]
    chunk: int = CHUNK

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The ranges [first, last) of its chunks."""
        return [
            (first, min(first + self.chunk, self.size)) for first in range(0, self.size, self.chunk)
        ]


@dataclass
class Header:
    """The header of a file.

    Attributes:
        fingerprint: The fingerprint of the model.
        name: The name of the file.
        parent: The segment that the file needs, None for none.
        exact: Whether all of it came from batches of a cold run.
        created: When it was written, in seconds since the epoch.
        parts: The parts in the order of the file.
    """

    fingerprint: str
    name: Name
    parent: SegmentName | None
    exact: bool
    created: float
    parts: list[Part]

    @property
    def offsets(self) -> list[int]:
        """The position in the file where each chunk of each part starts, and then the end of the
        file.
        """
        sizes = [last - first for part in self.parts for first, last in part.chunks]
        return list(accumulate(sizes, initial=header_size(self)))


def sizes_text(sizes: BlockSizes) -> str:
    """Return the content of the file SIZES: sizes of the model's blocks, as `verify` has no draft
    model.
    """
    return f"rows {sizes.base} + n * {sizes.row}, state {sizes.state}\n"


def parse_sizes(text: str) -> BlockSizes | None:
    """Return the sizes in ``text`` as `sizes_text` writes them; None for anything else."""
    match = _SIZES.fullmatch(text)
    return BlockSizes(*map(int, match.groups())) if match else None


def check_sizes(header: Header, sizes: BlockSizes) -> None:
    """Raise CorruptFileError unless the parts of a file are as large as they have to be."""
    name = header.name
    for part in header.parts:
        if part.kind == PartKind.ROWS and isinstance(name, SegmentName):
            is_right = part.size == sizes.base + (name.end - name.start) * sizes.row
        else:
            is_right = part.kind != PartKind.STATE or sizes.state in (part.size, -1)
        if not is_right:
            raise CorruptFileError(str(name), f"{part.size} bytes of {part.kind.name.lower()}")


def fits_draft_model(name: Name, part: Part, sizes: BlockSizes) -> bool:
    """Return whether a draft part of the file ``name`` has the size that this draft model has. A
    part of another draft model is not read.
    """
    if isinstance(name, SegmentName):
        return sizes.draft_row > 0 and part.size == sizes.draft_rows(name.start, name.end)
    return sizes.draft_state > 0 and part.size == sizes.draft_state


def header_size(header: Header) -> int:
    """Return the bytes of the packed header. They are known before anything is encoded."""
    size = (
        _PRELUDE.size
        + _FIELDS.size
        + len(header.fingerprint.encode())
        + len(parent_text(header.parent))
    )
    return (
        size
        + sum(_PART.size + len(part.chunks) * _CHUNK.size for part in header.parts)
        + _DIGEST_BYTES
    )


def pack(header: Header) -> bytes:
    """Return the bytes of ``header``; the checksums of every part must be known."""
    name = header.name
    fingerprint = header.fingerprint.encode()
    parent = parent_text(header.parent)
    if isinstance(name, SegmentName):
        kind = SEGMENT
        start = name.start
        end = name.end
        tag = name.tag
    else:
        kind = STATE
        start = 0
        end = name.n
        tag = bytes(TAG_BYTES)
    flags = EXACT if header.exact else 0
    pieces = [_PRELUDE.pack(MAGIC, VERSION, kind, flags, header_size(header), header.offsets[-1])]
    counts = len(fingerprint), len(parent), len(header.parts)
    pieces += [
        _FIELDS.pack(start, end, header.created, name.digest, tag, *counts),
        fingerprint,
        parent,
    ]
    for part in header.parts:
        pieces.append(_PART.pack(part.kind, 0, 0, part.chunk, part.size))
        pieces += [
            _CHUNK.pack(end - at, crc)
            for (at, end), crc in zip(part.chunks, part.crcs, strict=True)
        ]
    data = b"".join(pieces)
    return data + _digest(data)


def unpack(data: bytes, file: str, file_size: int) -> Header | int:
    """Return the header at the start of ``data``, or its number of bytes if ``data`` is shorter
    than that.

    ``file`` is the name of the file. Raises CorruptFileError unless all is whole and ``file_size``
    matches.

    The order of the checks keeps each of them safe: the sizes bound the read, the checksum precedes
    any use of the fields, and the name is compared last, with a header known to be whole.
    """
    if len(data) < _PRELUDE.size:
        raise CorruptFileError(file, "shorter than a header")
    magic, version, kind, flags, size, total = _PRELUDE.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise CorruptFileError(file, "another format")
    if total != file_size or not _PRELUDE.size + _FIELDS.size + _DIGEST_BYTES <= size <= total:
        raise CorruptFileError(file, f"{file_size} bytes instead of {total}")
    if len(data) < size:
        return int(size)
    if _digest(data[: size - _DIGEST_BYTES]) != data[size - _DIGEST_BYTES : size]:
        raise CorruptFileError(file, "a header with a wrong checksum")
    try:
        header = _unpack_fields(data[: size - _DIGEST_BYTES], kind, bool(flags & EXACT))
    except (struct.error, ValueError, ZeroDivisionError) as error:
        raise CorruptFileError(file, f"an invalid header ({error})") from None
    if header_size(header) != size or header.offsets[-1] != total or not _is_possible(header):
        raise CorruptFileError(file, "a header with wrong sizes")
    if str(header.name) != file:
        raise CorruptFileError(file, f"the content of {header.name}")
    return header


def _unpack_fields(data: bytes, kind: int, exact: bool) -> Header:
    """Return the header in ``data``, which is whole. Raises ValueError if its fields contradict
    each other.

    The fields come first, since they have the lengths of the fingerprint, of the parent's name and
    of the list of parts, which follow in this order.
    """
    start, end, created, digest, tag, n_fingerprint, n_parent, n_parts = _FIELDS.unpack_from(
        data, _PRELUDE.size
    )
    offset = _PRELUDE.size + _FIELDS.size
    fingerprint = data[offset : offset + n_fingerprint].decode()
    parent = data[offset + n_fingerprint :][:n_parent].decode()
    offset += n_fingerprint + n_parent
    parts = []
    for _ in range(n_parts):
        what, codec, phase, chunk, size = _PART.unpack_from(data, offset)
        if codec or phase:
            raise ValueError("compressed by an earlier version")
        part = Part(PartKind(what), size, [], chunk)
        offset += _PART.size
        for first in range(0, size, chunk):  # a list of them might be larger than the file
            stored, crc = _CHUNK.unpack_from(data, offset)
            if stored != min(chunk, size - first):
                raise ValueError("a chunk of another size")
            part.crcs.append(crc)
            offset += _CHUNK.size
        parts.append(part)
    name = SegmentName(start, end, digest, tag) if kind == SEGMENT else StateName(end, digest)
    own, draft = (
        (PARTS_OF_SEGMENT, PartKind.DRAFT_ROWS)
        if kind == SEGMENT
        else (PARTS_OF_STATE, PartKind.DRAFT_STATE)
    )
    if [part.kind for part in parts] not in (own, [*own, draft]):
        raise ValueError("other parts")
    first = name.start if isinstance(name, SegmentName) else name.n
    below = parse(parent) if parent else None
    if not isinstance(below, SegmentName):
        below = None
    if (parent or first) and not (below is not None and below.start < first <= below.end):
        raise ValueError("parent segment ends before this one starts")
    if isinstance(name, SegmentName) and parts[0].size != 4 * (name.end - name.start):
        raise ValueError("another number of tokens")
    return Header(fingerprint, name, below, exact, created, parts)


def _is_possible(header: Header) -> bool:
    """Return whether all numbers in ``header`` are ones that `pack` writes. Memory for the parts is
    allocated only after this check.
    """
    name = header.name
    if name.prefix.n > MAX_TOKENS if isinstance(name, StateName) else name.end > MAX_TOKENS:
        return False
    if not 0 <= header.created < MAX_YEARS or any(
        not 0 < part.chunk <= CHUNK for part in header.parts
    ):
        return False
    for part in header.parts:
        if part.kind == PartKind.ENDS and isinstance(name, SegmentName):
            n_ends, rest = divmod(part.size, 4)
            if rest or n_ends > name.end - name.start:
                return False
    return True


def parent_text(parent: SegmentName | None) -> bytes:
    """Return the bytes of ``parent`` in headers and in the tags of names; empty for none."""
    return b"" if parent is None else str(parent).encode()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
