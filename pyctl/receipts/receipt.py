"""The receipt of a reply: everything that evaluating it again takes, and its bytes in a file.

docs/internals/disk-format.md has the format.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from pyctl.engine.exact_reply import ExactReply
from pyctl.errors import ReceiptError
from pyctl.prompt import Prompt, Tokens, as_tokens

__all__ = ["CacheRecord", "PromptRecord", "Provenance", "Receipt", "ReplyRecord"]

MAGIC = b"pyctl receipt 2\n"
"""The first bytes of a file, with the version of the format."""

_DIGEST_BYTES = 16


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The program and the model of a reply, and the settings that can change its bits.

    Attributes:
        model: The name of the model.
        fingerprint: The digest of the model's files, of the build, of devices, and of the flags
            and variables that change bits: see `EngineInfo`.
        llama_build: The build of llama.cpp.
        pyctl_version: The version of pyctl.
        is_exact: Whether the server ran with --exact.
        layers: The names of the layers' devices.
        settings: The settings of the model without automatic values, by group and field.
    """

    model: str
    fingerprint: str
    llama_build: str
    pyctl_version: str
    is_exact: bool
    layers: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def key(self) -> bytes:
        """Bytes that are equal for equal values."""
        return msgspec.msgpack.encode(self)


class PromptRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt without images: see `Prompt`.

    Attributes:
        ids: The token ids.
        boundaries: The token counts at which a message starts.
        headers: The boundaries at which the assistant starts, None if they are unknown.
        turn: The header of the reply to the user's last message, 0 if it is unknown.
        n_raw: The leading tokens that are raw text.
    """

    ids: bytes
    boundaries: tuple[int, ...]
    headers: tuple[int, ...] | None
    turn: int
    n_raw: int


class CacheRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The use of the cache for a prompt.

    Attributes:
        source: The tier that the prompt was restored from.
        n_cached: The tokens that were restored.
        restored: The id of the snapshot that was resumed from, empty without one.
        saved: The ids of the snapshots that were taken.
        rows: The name of the deepest file of rows that were restored: see `ExactReply`.
    """

    source: str
    n_cached: int
    restored: str
    saved: tuple[str, ...]
    rows: str


class ReplyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens of a reply and their logits.

    Attributes:
        ids: The token ids, the end token included.
        logits_digests: The CRC-32 of the logits that each token was sampled from.
        draft_width: The drafts and padding in each verify batch, 0 without drafts.
        sampling: The sampling parameters, with the seed in use.
    """

    ids: bytes
    logits_digests: bytes
    draft_width: int
    sampling: dict[str, Any]


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reply that was evaluated in the batches of an idle server with an empty cache.

    Attributes:
        id: The id for clients: the microseconds of UNIX time at which the reply ended.
        provenance: The program and the model.
        prompt_record: The prompt.
        cache: The use of the cache.
        reply_record: The reply.
    """

    id: int
    provenance: Provenance
    prompt_record: PromptRecord
    cache: CacheRecord
    reply_record: ReplyRecord

    @classmethod
    def from_reply(cls, number: int, provenance: Provenance, reply: ExactReply) -> Receipt:
        """Return the receipt ``number`` of ``reply``, whose prompt has no images."""
        prompt = reply.request.prompt
        stats = reply.stats
        trace = reply.trace
        sampling = msgspec.to_builtins(reply.request.sampling)
        return cls(
            number,
            provenance,
            PromptRecord(
                ids=prompt.tokens.astype("<i4").tobytes(),
                boundaries=prompt.boundaries,
                headers=prompt.headers,
                turn=prompt.turn,
                n_raw=prompt.n_raw,
            ),
            CacheRecord(
                source=stats.source,
                n_cached=stats.n_cached,
                restored=stats.restored,
                saved=tuple(stats.saved),
                rows=reply.rows,
            ),
            ReplyRecord(
                ids=np.array(trace.tokens, "<i4").tobytes(),
                logits_digests=np.array(trace.digests, "<u4").tobytes(),
                draft_width=reply.draft_width,
                sampling={**sampling, "seed": trace.seed},
            ),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """Return the receipt in a file with the bytes ``data``. Raises ReceiptError for others."""
        start = len(MAGIC) + _DIGEST_BYTES
        body = data[start:]
        if not data.startswith(MAGIC):
            raise ReceiptError("it is empty, or of another version")
        if data[len(MAGIC) : start] != _digest(body):
            raise ReceiptError("its checksum is wrong")
        try:
            receipt = msgspec.msgpack.decode(body, type=cls)
            receipt._check()
        except (msgspec.MsgspecError, ValueError) as error:
            raise ReceiptError(f"its content is impossible: {error}") from error
        return receipt

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        body = msgspec.msgpack.encode(self)
        return MAGIC + _digest(body) + body

    def _check(self) -> None:
        """Raise ValueError for tokens that no prompt or reply can have."""
        if not len(self.prompt) or not self.reply.size:
            raise ValueError("no tokens")
        if self.reply.size != len(self.digests):
            raise ValueError("another number of digests than of tokens")
        lowest = min(int(self.prompt.tokens.min()), int(self.reply.min()))
        n_raw = self.prompt_record.n_raw
        if min(lowest, n_raw, self.reply_record.draft_width) < 0:
            raise ValueError("a negative number")

    @property
    def prompt(self) -> Prompt:
        """The prompt. Raises ValueError if its boundaries are impossible."""
        record = self.prompt_record
        return Prompt(
            _tokens(record.ids),
            record.boundaries,
            headers=record.headers,
            turn=record.turn,
            n_raw=record.n_raw,
        )

    @property
    def reply(self) -> Tokens:
        """The tokens of the reply, shape (n,)."""
        return _tokens(self.reply_record.ids)

    @property
    def digests(self) -> list[int]:
        """The digest of the logits for each token of the reply."""
        digests = np.frombuffer(self.reply_record.logits_digests, "<u4")
        return [int(digest) for digest in digests]


def _tokens(data: bytes) -> Tokens:
    return as_tokens(np.frombuffer(data, "<i4"))


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
