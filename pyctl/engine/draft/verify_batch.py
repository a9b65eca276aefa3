"""Verify batches: the sure tokens of all decoding requests, and drafts as outputs, tokens and cells
allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyctl.engine.backend import BackendFacts, SequenceTokens
from pyctl.engine.draft.source import DraftJob
from pyctl.engine.draft.speculation import NO_DRAFT, Draft, Speculation
from pyctl.engine.schedule.admission import ActiveRequest

__all__ = ["BatchItem", "verify_batches"]


class BatchItem(NamedTuple):
    """A request's part of an evaluation."""

    active: ActiveRequest
    tokens: SequenceTokens
    draft: Draft


def verify_batches(
    requests: Sequence[ActiveRequest],
    facts: BackendFacts,
    speculation: Speculation | None,
    n_free: int,
    make_room: Callable[[int], bool],
) -> list[list[BatchItem]]:
    """Return the evaluations, in order, for decoding ``requests``; without ``speculation`` one.

    ``n_free`` cells are available for drafts; ``make_room`` is called once with the total number of
    tokens.
    """
    if not requests:
        return []
    if not speculation:  # one token each
        return [[_item(active, NO_DRAFT) for active in requests]]
    jobs = _jobs(requests, facts, n_free)
    drafts = speculation.propose(jobs)
    if facts.has_state_history and len(jobs) > 1:
        drafts = _pad_drafts(jobs, drafts, facts.n_rollback)
    n_sure = sum(len(job.sure) for job in jobs)
    n_drafted = sum(len(draft.tokens) for draft in drafts)
    make_room(n_sure + n_drafted)
    groups: dict[int, list[BatchItem]] = {}
    for active, draft in zip(requests, drafts, strict=True):
        item = _item(active, draft)
        # Rollback to a plane requires equal token counts in the batch; other items use marks or
        # have no drafts.
        n_tokens = 0
        if facts.has_state_history and 0 < len(draft.tokens) <= facts.n_rollback:
            n_tokens = len(item.tokens.tokens)
        groups.setdefault(n_tokens, []).append(item)
    maximum = max(facts.n_ubatch, facts.n_seqs)
    batches: list[list[BatchItem]] = []
    for group in groups.values():
        batches += _filled(group, maximum)
    return batches


def _jobs(requests: Sequence[ActiveRequest], facts: BackendFacts, n_free: int) -> list[DraftJob]:
    """Return a draft job for each request: all get the same share of outputs, tokens and cells."""
    n = len(requests)
    share = min(
        facts.n_outputs // n - 1,
        n_free // n,
        facts.max_drafts,
    )
    jobs = []
    for active in requests:
        assert active.seq is not None
        assert active.pending is not None
        sure = active.pending
        n_positions = facts.n_ctx - active.seq.n
        n_in_batch = facts.n_ubatch // n
        maximum = min(
            share,
            n_positions - len(sure),
            n_in_batch - len(sure),
        )
        if len(sure) > 1:
            # These follow a rollback to a mark: another mark there could repeat forever.
            maximum = min(maximum, facts.n_rollback)
        job = DraftJob(active.id, active.seq, sure, max(maximum, 0))
        jobs.append(job)
    return jobs


def _pad_drafts(jobs: Sequence[DraftJob], drafts: Sequence[Draft], n_rollback: int) -> list[Draft]:
    """Pad shorter drafts to equal length, so that one evaluation serves all requests."""
    pairs = list(zip(jobs, drafts, strict=True))
    width = 0
    for job, draft in pairs:
        if _is_short(job, draft, n_rollback):
            width = max(width, len(draft.tokens))
    widened: list[Draft] = []
    for job, draft in pairs:
        if _is_short(job, draft, n_rollback) and job.maximum >= width:
            padding = job.sure * (width - len(draft.tokens))
            draft = draft._replace(tokens=draft.tokens + padding)
        widened.append(draft)
    return widened


def _is_short(job: DraftJob, draft: Draft, n_rollback: int) -> bool:
    return len(job.sure) == 1 and len(draft.tokens) <= n_rollback


def _item(active: ActiveRequest, draft: Draft) -> BatchItem:
    seq = active.seq
    sure = active.pending
    assert seq is not None
    assert sure is not None
    tokens = SequenceTokens(seq.id, sure + draft.tokens, seq.n, len(sure))
    return BatchItem(active, tokens, draft)


def _filled(items: list[BatchItem], maximum: int) -> list[list[BatchItem]]:
    """Split ``items`` into batches of at most ``maximum`` tokens."""
    batches: list[list[BatchItem]] = [[]]
    n = 0
    for item in items:
        n += len(item.tokens.tokens)
        if n > maximum:
            batches.append([])
            n = len(item.tokens.tokens)
        batches[-1].append(item)
    return batches
