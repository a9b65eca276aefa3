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
"""In raw text, a batch ends once this part of the tokens before it is new."""

RAW_FILL = 2
"""And after a whole number of *fills*, each this part of a full batch. A CPU evaluates tokens in
groups of a power of two: 900 tokens in batches that end at line ends, of 111 to 127 tokens, take
5 % longer than in batches of 128. Two threads also wait for each other in each batch: batches of
128 take 8 % longer than full ones, of 256 0 to 3 %.
"""

RULES = (MIN_BATCH, RAW_PART, RAW_FILL)
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
    - in raw text after `_raw_batch` tokens.

    Except at images, a batch has at least ``min_batch`` tokens. Ends depend on nothing else: a
    prompt that extends another one has all of its ends, except perhaps the very last.
    """
    n = len(prompt)
    edges = {edge for picture in prompt.pictures for edge in (picture.start, picture.end) if edge}
    # A template without known headers may start the assistant at any boundary.
    replies = prompt.boundaries if prompt.headers is None else prompt.headers
    always = {*replies, *prompt.boundaries[:1], n}
    # On a GPU `batch_cost` is half a batch: the earliest end that pays, if nothing ends before it.
    half = n_ubatch // 2
    earliest: set[int] = {half} if batch_cost and half < n else set()
    batches = _Batches(prompt, n_ubatch, min_batch, batch_cost)
    for stop in sorted({*prompt.boundaries, *edges, *always, *earliest}):
        if prompt.is_inside(stop):
            continue  # no prompt can resume within an image
        batches.fill_up_to(stop)
        n_new = stop - batches.start
        if stop in edges and n_new > 0:
            is_end = True  # one evaluation takes tokens of text or rows of an image, never both
        elif n_new < min_batch:
            is_end = False  # too small for the device: the tokens join the next batch
        else:
            is_end = stop in always or batches.pays_at(stop)
        if is_end:
            batches.end(stop)
    if batches.start < n:
        batches.end(n)  # the last batch may be smaller than `min_batch`
    return batches.ends


class _Batches:
    """The batches of a prompt while their ends are chosen from its start on.

    Attributes:
        ends: The ends so far, ascending.
        start: The start of the open batch, which has no end yet.
    """

    def __init__(self, prompt: Prompt, n_ubatch: int, min_batch: int, batch_cost: int) -> None:
        self.ends: list[int] = []
        self.start = 0
        self._prompt = prompt
        self._n_ubatch = n_ubatch
        self._min_batch = min_batch
        self._batch_cost = batch_cost
        # Tokens of the batches so far beyond the cost of each, negative for a lack.
        self._credit = 0

    def end(self, position: int) -> None:
        """End the open batch at ``position``, where the next one starts."""
        gain = position - self.start - self._batch_cost
        # A lack is bounded by one batch's cost: a row of short messages, which end batches in any
        # case, must not keep later boundaries from ending any.
        self._credit = max(self._credit + gain, -self._batch_cost)
        self.ends.append(position)
        self.start = position

    def fill_up_to(self, position: int) -> None:
        """End the batches that are full at ``position`` or before."""
        while (end := self._full_end()) <= position:
            self.end(end)

    def _full_end(self) -> int:
        """Return where the open batch is full."""
        largest = self.start + self._n_ubatch
        n_raw = _raw_batch(self.start, self._n_ubatch, self._batch_cost)
        end = self.start + max(n_raw, self._min_batch)
        if end > self._prompt.n_raw or self._prompt.is_inside(end):
            return largest
        return min(end, largest)

    def pays_at(self, position: int) -> bool:
        """Return whether the batches up to ``position`` are worth their costs on average."""
        return self._credit + position - self.start >= self._batch_cost


def _raw_batch(start: int, n_ubatch: int, batch_cost: int) -> int:
    """Return the tokens of a batch of raw text that starts at ``start``: whole fills, about
    1 / RAW_PART of the tokens before it, and at least one; at least ``batch_cost``.
    """
    fill = max(n_ubatch // RAW_FILL, 1)
    n_fills = max(start // RAW_PART // fill, 1)
    return max(n_fills * fill, batch_cost)


def inner_ends(prompt: Prompt, ends: Sequence[int]) -> list[int]:
    """Return the batch ends at which a snapshot of ``prompt`` is of use: not at its very end, nor
    inside an image.
    """
    inner = list(ends[: bisect.bisect_left(ends, len(prompt))])
    if not prompt.pictures:
        return inner
    return [end for end in inner if not prompt.is_inside(end)]


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
    targets = {*also, *(_rung(prompt, position) for position in _ladder(len(prompt)))}
    if boundaries:
        targets |= {boundaries[0], prompt.turn, *boundaries[-2:]}
    else:
        targets.add(inner[-1])
    if prompt.pictures:
        targets.add(prompt.pictures[-1].end)
    cuts = {last_end(inner, target) for target in targets} - {0}
    if min_step > 0 and boundaries:
        cuts |= _grid(inner, cuts, min_step)
    elif min_step > 0:
        cuts |= set(_spread(inner, cuts, start, min(min_step, RAW_STEP)))
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
    if not index:
        return position
    boundary = prompt.boundaries[index - 1]
    n = len(prompt)
    is_near = 2 * (n - boundary) <= 3 * (n - position)
    return boundary if is_near else position
