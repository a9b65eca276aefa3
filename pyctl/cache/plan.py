"""Batch ends, which depend only on the prompt, and cuts, the batch ends at which snapshots are
taken.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from pyctl.cache.positions import last_end

if TYPE_CHECKING:
    from pyctl.cache.resume_points import ResumePoints
    from pyctl.prompt import Prompt

__all__ = [
    "DEFAULT_STEP",
    "MIN_BATCH",
    "MIN_SHARED",
    "RULES",
    "batch_ends",
    "choose_cuts",
    "inner_ends",
    "next_turn",
    "snapshot_ends",
]

LADDER = 256
"""The first rung: how far from a prompt's end its history is expected to be changed."""

MIN_SHARED = 128
"""Tokens that prompts share by more than chance."""

RAW_STEP = 512
"""Tokens between the snapshots of raw text, which may be changed anywhere."""

DEFAULT_STEP = 4096
"""Tokens between the snapshots of a long stretch."""

GRID_PARTS = 4
"""This part of a step before its end, another snapshot will do."""

MIN_BATCH = 32
"""A boundary ends a batch only this many tokens after the last batch end; smaller batches waste the
device.
"""

RAW_PART = 8
"""In raw text, a batch ends at a line end once this part of the tokens before it is new."""

RAW_FILL = 4
"""And once this part of a full batch is, a *fill*; batches of 32 tokens take a CPU half as long
again. The cost of a batch rises in steps of 128 tokens, by 5 to 8 % of one: so it ends at the last
line end before a whole number of fills, not at the first one after it.
"""

FILL_SLACK = 4
"""If that line end is at most this part of a fill before it."""

RULES = (MIN_BATCH, RAW_PART, RAW_FILL, FILL_SLACK)
"""The constants that determine batch ends, besides the tokens and the arguments of `batch_ends`."""


def batch_ends(
    prompt: Prompt, n_ubatch: int, min_batch: int = MIN_BATCH, batch_cost: int = 0
) -> list[int]:
    """Return the token counts at which evaluation stops, ascending; the last is len(prompt).

    A batch has at most ``n_ubatch`` tokens. It also ends where later prompts may part from this
    one, so that they can resume there:

    - always where the assistant starts, at the first boundary, and at the edges of images;
    - at other boundaries, and half a batch into the prompt, if the batches up to there have
      ``batch_cost`` tokens on average;
    - at a line end of raw text, if the batch has ``batch_cost`` tokens, 1 / RAW_FILL of a full
      batch, and 1 / RAW_PART of the tokens before it; at the last line end shortly before that
      many tokens, if there is one (`_RawBatch`).

    Except at images, a batch has at least ``min_batch`` tokens. Ends depend on nothing else: a
    prompt that extends another one has all of its ends, except perhaps the very last.
    """
    n = len(prompt)
    boundaries = prompt.boundaries
    line_ends = frozenset(prompt.line_ends)
    edges = {edge for picture in prompt.pictures for edge in (picture.start, picture.end) if edge}
    # A template without known headers may start the assistant at any boundary.
    replies = boundaries if prompt.headers is None else prompt.headers
    always = {*replies, *boundaries[:1], n}
    # On a GPU `batch_cost` is half a batch: the earliest end that pays, if nothing ends before it.
    half = n_ubatch // 2
    earliest: set[int] = {half} if batch_cost and half < n else set()
    ends: list[int] = []
    start = 0  # of the open batch
    credit = 0  # tokens of the batches so far beyond `batch_cost` each, negative for a lack
    raw = _RawBatch(0, n_ubatch, batch_cost)

    def end_batch(end: int) -> None:
        nonlocal start, credit, raw
        # A lack is bounded by one batch's cost: a row of short messages, which end batches in any
        # case, must not keep later boundaries from ending any.
        credit = max(credit + end - start - batch_cost, -batch_cost)
        ends.append(end)
        start = end
        raw = _RawBatch(start, n_ubatch, batch_cost)

    for stop in sorted({*boundaries, *line_ends, *edges, *always, *earliest}):
        if prompt.is_inside(stop):
            continue  # no prompt can resume within an image
        if raw.last_fitting and stop > raw.limit:
            end_batch(raw.last_fitting)
        while start + n_ubatch <= stop:
            end_batch(start + n_ubatch)
        n_new = stop - start
        if stop in edges and n_new > 0:
            end_batch(stop)  # one evaluation takes tokens of text or rows of an image, never both
            continue
        if n_new < min_batch:
            continue  # too small for the device: the tokens join the next batch
        if stop in always:
            pays = True
        elif stop in line_ends:
            pays = n_new >= raw.minimum
            if raw.fits(stop):
                raw.last_fitting = stop
                pays = False  # the next line may fit as well
        else:
            pays = credit + n_new >= batch_cost
        if pays:
            end_batch(stop)
    return ends if start == n else [*ends, n]  # the last batch may be smaller than `min_batch`


class _RawBatch:
    """A batch of raw text that starts at ``start``.

    Attributes:
        minimum: The tokens from which on it ends at a line end.
        limit: The token count up to which it has a whole number of fills, at most ``minimum``
            tokens.
        last_fitting: The last line end shortly before ``limit``, 0 for none yet.
    """

    def __init__(self, start: int, n_ubatch: int, batch_cost: int) -> None:
        fill = max(n_ubatch // RAW_FILL, 1)
        self.minimum = max(fill, batch_cost, start / RAW_PART)
        self._slack = fill // FILL_SLACK
        n_whole = int(self.minimum // fill) * fill
        self.limit = start + max(n_whole, batch_cost)
        self.last_fitting = 0

    def fits(self, end: int) -> bool:
        """Return whether a batch that ends at ``end`` is full but for the slack."""
        return self.limit - self._slack < end <= self.limit


def inner_ends(prompt: Prompt, ends: Sequence[int]) -> list[int]:
    """Return the batch ends at which a snapshot of ``prompt`` is of use: not at its very end, nor
    inside an image.
    """
    inner = list(ends[: bisect.bisect_left(ends, len(prompt))])
    return [end for end in inner if not prompt.is_inside(end)] if prompt.pictures else inner


def snapshot_ends(prompt: Prompt, ends: Sequence[int], points: ResumePoints) -> list[int]:
    """Return the `inner_ends` from which a sequence comes back to the same bits."""
    return points.filter(inner_ends(prompt, ends))


def choose_cuts(
    prompt: Prompt, ends: Sequence[int], start: int, min_step: int, also: Sequence[int] = ()
) -> list[int]:
    """Return the batch ends after ``start`` that deserve a snapshot, ascending.

    These are the last ends at or before

    * the first boundary (the head: system message and tools) and the two last ones (the last
      message, the generation header), or in raw text the last of its inner ends,
    * the turn, the end of the last image, and the positions ``also`` (where another prompt was
      left, what the disk gets),
    * LADDER tokens before the end, twice, four times, ... as many, since a history changed there
      costs as much again,
    * each multiple of ``min_step`` tokens without another cut shortly before it; 0 for none,
      RAW_STEP in raw text.
    """
    inner = inner_ends(prompt, ends)
    if not inner:
        return []
    boundaries = prompt.boundaries
    targets = {boundaries[0], prompt.turn, *boundaries[-2:]} if boundaries else {inner[-1]}
    targets |= {picture.end for picture in prompt.pictures[-1:]}
    rungs = [_rung(prompt, position) for position in _ladder(len(prompt))]
    cuts = {last_end(inner, position) for position in (*targets, *also, *rungs)} - {0}
    if min_step > 0:
        raw_step = min(min_step, RAW_STEP)
        cuts |= (
            _grid(inner, cuts, min_step)
            if boundaries
            else set(_spread(inner, cuts, start, raw_step))
        )
    return sorted(cut for cut in cuts if cut > start)


def next_turn(prompt: Prompt, n_common: int) -> int:
    """Return the token count at which a rewritten and continued version of ``prompt`` resumes; 0 if
    unknown.
    """
    # A single message that shares ``n_common`` tokens with another prompt contains a conversation
    # that grows inside.
    is_task = len(prompt.boundaries) == 1 and n_common >= MIN_SHARED
    return prompt.boundaries[0] - 1 if is_task else prompt.turn


def _grid(inner: Sequence[int], cuts: Collection[int], step: int) -> set[int]:
    """Return the last of ``inner`` at or before each multiple of ``step``, unless one of ``cuts``
    lies within a quarter of a step before the multiple.
    """
    chosen = sorted(cuts)
    places = range(step, inner[-1] + 1, step)
    return {
        last_end(inner, position)
        for position in places
        if position - last_end(chosen, position) > step // GRID_PARTS
    } - {0}


def _spread(inner: Sequence[int], cuts: Collection[int], start: int, step: int) -> Iterator[int]:
    """Return the ends in ``inner`` that are at least ``step`` after ``start``, one of ``cuts``, or
    the last.
    """
    last = start
    for end in inner:
        if end in cuts:
            last = end
        elif end - last >= step:
            yield end
            last = end


def _ladder(n: int) -> list[int]:
    """Return the positions LADDER, twice, four times as many tokens before ``n``, and so on."""
    rungs = []
    distance = LADDER
    while distance < n:
        rungs.append(n - distance)
        distance *= 2
    return rungs


def _rung(prompt: Prompt, position: int) -> int:
    """Return the last boundary before ``position``, where histories change, or ``position`` itself
    if it is much closer.
    """
    index = bisect.bisect_right(prompt.boundaries, position)
    boundary = prompt.boundaries[index - 1] if index else 0
    return (
        boundary
        if boundary and 2 * (len(prompt) - boundary) <= 3 * (len(prompt) - position)
        else position
    )
