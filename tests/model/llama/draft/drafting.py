"""Greedy replies with drafts on a backend, and hidden rows as they come from a device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from pyctl.engine.backend import SequenceTokens
from pyctl.llama.draft.mtp import MtpHead
from pyctl.llama.library.native import HiddenRows
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.prompt import as_tokens

UBATCH = 64

HYBRIDS = ("tiny-hybrid-nextn", "tiny-moe-nextn")
"""Models with a head."""

KINDS = ("eagle3", "dflash", "dflash2", "dspark", "dflash-window")
"""Draft files that read layers of tiny-hybrid."""


Draft = Callable[[list[int], int], Sequence[int]]


class LateRows:
    """HiddenRows of a device: the next evaluation has begun when they are asked for."""

    def __init__(self, real: HiddenRows) -> None:
        self.real = real
        self.rows = real.rows
        self.copies: list[NDArray[np.float32]] = []

    def start(self, n: int) -> bool:
        self.copies.append(np.array(self.rows(n)))
        for old in self.copies[:-2]:
            old[:] = np.nan
        del self.copies[:-2]
        return True

    def finish(self, before: bool = False) -> NDArray[np.float32]:
        return self.copies[-2 if before else -1]


def set_device(backend: LlamaBackend, n_draft: int, *, as_on_gpu: bool) -> None:
    """Have the draft model work as on a GPU: with as many rows in each call as there, and hidden
    rows that are copied beside the next evaluation.
    """
    drafts = backend.memory.drafts
    if isinstance(head := drafts.model, MtpHead):
        head.n_rows = 1 + n_draft if as_on_gpu else 1
    real = drafts.hidden.real if isinstance(drafts.hidden, LateRows) else drafts.hidden
    drafts.hidden = LateRows(real) if as_on_gpu else real  # type: ignore[assignment, arg-type]


def prompt(n: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(200) for _ in range(n)]


def prefill(backend: LlamaBackend, tokens: list[int], seq: int = 0, start: int = 0) -> int:
    """Evaluate ``tokens``; return the most likely next one."""
    for first in range(start, len(tokens), UBATCH):
        backend.evaluate(seq, as_tokens(tokens[first : first + UBATCH]), first)
    return int(backend.logits(0).argmax())


def greedy_reply(
    backend: LlamaBackend, tokens: list[int], n: int, draft: Draft, seq: int = 0
) -> tuple[list[int], list[NDArray[np.float32]], list[tuple[int, tuple[int, ...]]]]:
    """Return ``n`` tokens after the prompt, verified in batches; their logits, and which drafts
    were made where.
    """
    reply = [prefill(backend, tokens, seq)]
    logits = [backend.logits(0)]
    drafts = []
    end = len(tokens)
    while len(reply) < n:
        proposed = tuple(draft(reply, end))
        drafts.append((end, proposed))
        backend.decode([SequenceTokens(seq, (reply[-1], *proposed), end)])
        for i in count():
            logits.append(backend.logits(i))
            reply.append(int(logits[-1].argmax()))
            end += 1
            if i == len(proposed) or proposed[i] != reply[-1]:
                break
        assert backend.memory.rollback(seq, end) == end
    return reply[:n], logits[:n], drafts


def head_of(backend: LlamaBackend, seq: int = 0) -> Draft:
    return lambda reply, end: backend.draft([SequenceTokens(seq, (reply[-1],), end)], 3)[0]
