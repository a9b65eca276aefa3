"""What is evaluated together when several requests decode: their sure tokens, and drafts as far as there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyctl.engine.admission import ActiveRequest
from pyctl.engine.backend import Backend, SequenceTokens
from pyctl.engine.draft.source import DraftJob
from pyctl.engine.draft.speculation import Draft, Speculation

__all__ = ["BatchItem", "verify_batches"]

NO_DRAFT = Draft()


class BatchItem(NamedTuple):
    """One request's part of an evaluation."""

    active: ActiveRequest
    tokens: SequenceTokens
    draft: Draft


def verify_batches(
    requests: Sequence[ActiveRequest],
    backend: Backend,
    speculation: Speculation,
    n_free: int,
    make_room: Callable[[int], bool],
) -> list[list[BatchItem]]:
    """Evaluations, one after the other, for ``requests``, which all wait for tokens.

    ``n_free`` cells are left beside those that are sure to be needed; ``make_room`` is asked for all that are taken.
    """
    drafts: Sequence[Draft] = [NO_DRAFT] * len(requests)
    if speculation:
        jobs = _jobs(requests, backend, n_free)
        drafts = speculation.propose(jobs)
        make_room(sum(len(job.sure) + len(draft.tokens) for job, draft in zip(jobs, drafts, strict=True)))
    items = [_item(active, draft) for active, draft in zip(requests, drafts, strict=True)]
    return _split(items, backend) if speculation and len(items) > 1 else [items]


def _jobs(requests: Sequence[ActiveRequest], backend: Backend, n_free: int) -> list[DraftJob]:
    """Who may have how many drafts: everybody the same share of outputs, tokens and cells."""
    n = len(requests)
    share = min(backend.n_outputs // n - 1, n_free // n, backend.most_drafts)
    jobs = []
    for active in requests:
        assert active.seq is not None
        assert active.pending is not None
        sure, position = active.pending
        most = min(share, backend.n_ctx - position - len(sure), backend.n_ubatch // n - len(sure))
        if len(sure) > 1:  # behind a mark: to go back there again would be to go round in circles
            most = min(most, backend.n_rollback)
        jobs.append(DraftJob(active.id, active.seq, sure, max(most, 0)))
    return jobs


def _item(active: ActiveRequest, draft: Draft) -> BatchItem:
    assert active.seq is not None
    assert active.pending is not None
    sure, position = active.pending
    return BatchItem(active, SequenceTokens(active.seq.id, sure + draft.tokens, position, len(sure)), draft)


def _split(items: list[BatchItem], backend: Backend) -> list[list[BatchItem]]:
    """Where planes have to count, those with as many tokens together; never more than one evaluation takes."""
    groups: dict[int, list[BatchItem]] = {}
    for item in items:
        needs_planes = backend.kind == "hybrid" and 0 < item.tokens.n_drafts <= backend.n_rollback
        groups.setdefault(len(item.tokens.tokens) if needs_planes else 0, []).append(item)
    return [batch for group in groups.values() for batch in _filled(group, max(backend.n_ubatch, backend.n_seqs))]


def _filled(items: list[BatchItem], most: int) -> list[list[BatchItem]]:
    batches: list[list[BatchItem]] = [[]]
    n = 0
    for item in items:
        n += len(item.tokens.tokens)
        if n > most:
            batches.append([])
            n = len(item.tokens.tokens)
        batches[-1].append(item)
    return batches
