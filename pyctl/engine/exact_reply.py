"""Replies with the logits of a cold run, and a digest of the logits at each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.request import Request

__all__ = ["ExactReply", "ReplyRecorder", "ReplyTrace"]


@dataclass
class ReplyTrace:
    """The tokens of a reply that is being generated, with the digests of their logits.

    Attributes:
        tokens: The sampled tokens, the last of which may end the reply.
        digests: The `Evaluator.logits_digest` of the output that each token was sampled from.
        seed: The seed of the sampler.
    """

    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    seed: int = 0


class ExactReply(msgspec.Struct, frozen=True):
    """A finished reply that was evaluated in the batches of an idle server with an empty cache.

    Attributes:
        request: The request.
        trace: The tokens of the reply and the digests of their logits.
        stats: The account of the prompt, which may have been restored.
        draft_width: The drafts and padding in each verify batch, 0 without drafts.
        rows: The name of the deepest file with rows that the prompt was restored from. Its tag is
            a digest of these rows, and of the file before. Empty if no file has them.
    """

    request: Request
    trace: ReplyTrace
    stats: RequestStats
    draft_width: int = 0
    rows: str = ""


class ReplyRecorder(Protocol):
    """A keeper of exact replies. The engine's thread calls it, so it may not wait for a disk."""

    def accepts(self, request: Request) -> bool:
        """Return whether a reply to ``request`` may be recorded."""

    def record(self, reply: ExactReply) -> int:
        """Record ``reply``; return the id by which clients can name it, 0 if it is not kept."""
