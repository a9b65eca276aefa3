"""Where a prefill stops: batch ends, which depend on the prompt alone, and cuts, which deserve a snapshot."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyctl.prompt import Prompt

__all__ = [
    "DEEP",
    "DEFAULT_STEP",
    "FAR",
    "MIN_BATCH",
    "MOST_SEAMS",
    "RULES",
    "batch_ends",
    "choose_cuts",
    "ends_within",
    "full_batch",
    "inner_ends",
    "last_common_end",
    "last_end",
    "next_turn",
]

LADDER = 256
"""The first rung: how far from a prompt's end its history is expected to be changed."""

LEAST_HALF = 128
"""Fewer tokens of a head are not worth a snapshot."""

UNMARKED_STEP = 512
"""So many tokens of text without messages are worth a snapshot: it may be changed anywhere."""

DEFAULT_STEP = 8192
"""Tokens between the snapshots of a long stretch, and twice as many as between them where there is room."""

GRID_PARTS = 4
"""This part of a step before its end, another snapshot will do."""

MIN_BATCH = 32
"""A boundary ends a batch only this many tokens after the last batch end; smaller batches waste the device."""

GPU_BATCH_COST = 480
"""The least tokens that a batch has on average, on a GPU, where it ends at places that are only sometimes of use. With
so many a prompt is evaluated as fast as in full batches of 512 (bench/results/batch-ends.md)."""

DEEP = 32768
"""Behind more tokens than these a batch has as many times more on average: it reads all rows before it, and nobody
comes back to most of so long a history (bench/results/gpu-long.md)."""

FAR = 81_920
"""Behind more tokens than these a GPU attends to twice 512 tokens sooner than to 1,024 (bench/results/gpu-long.md)."""

GPU_FAR_BATCH = 512
"""The largest batch there, if the model has no experts: these read weights of their own for each batch."""

FIRST_RUNG = 64
"""So many tokens, twice, four times, ... behind the beginning a long first message may be left."""

FINE_PART, FINE_LEAST = 4, 64
"""Where batches cost nothing, one ends within a first message as soon as this part of what there is of it is new, and
so many tokens are."""

MOST_SEAMS = 24
"""In so many places of a message a seam ends a batch that would have gone on; a list may have one in each line."""

UNMARKED_PARTS, FINE_STEP = (16, 8), 256
"""The part of text without messages that is new when a batch ends there, without and with a cost; at most so many
tokens without one."""

LEAST_PART = 64
"""Of text without messages at least one in so many tokens is new where another part begins, if a batch ends there."""

RULES = (MIN_BATCH, DEEP, FAR, FIRST_RUNG, FINE_PART, FINE_LEAST, MOST_SEAMS, *UNMARKED_PARTS, FINE_STEP, LEAST_PART)
"""What batch ends follow from, besides the tokens and what is given to `batch_ends`."""


def batch_ends(
    prompt: Prompt, n_ubatch: int, min_batch: int = MIN_BATCH, batch_cost: int = 0, far_batch: int = 0
) -> list[int]:
    """Token counts at which evaluation stops, ascending; the last is len(prompt).

    A batch ends a `full_batch` after the one before, or at a boundary at least ``min_batch`` tokens after it: in
    any case where the assistant begins, since there prompts end, and at the first, the end of the head. Where another
    message begins, and at FIRST_RUNG, twice, four times, ... as many tokens, it does so if the batches up to there have
    ``batch_cost`` tokens on average then, and behind more than DEEP tokens as many times more: a device that works on
    many tokens at a time pays for each batch.
    Without a cost, prompts that part within one of the first messages need not evaluate all of it again: there a batch
    ends at the first line end that is FINE_LEAST tokens, and a FINE_PART of the message so far, after the one before,
    or at a seam before that (half of ``min_batch`` at least, and an eighth as much, after it; MOST_SEAMS times a
    message), or at twice as many tokens without either, and wherever it would end otherwise; replies are left out,
    nobody parts there. A line end shortly before a seam does not count, so that the batch ends at the seam.
    In unmarked text, which has no boundaries, it ends in the same way, but after an eighth of what has been evaluated
    by then, so that a long text is cut into two dozen batches more, and no more than a quarter of it is evaluated
    again. Without a cost it is a sixteenth, and FINE_STEP at most. It also ends there where another part begins, at
    least half of ``min_batch``, and a LEAST_PART of the text, after the one before: text before a cursor grows up to
    there. Without a cost it ends at the last line end shortly before a cursor, too, as far behind the one before: there
    what was typed is written anew.
    Both edges of an image end a batch in any case, and inside of it full batches from its beginning on do.
    Nothing else enters, so a prompt that extends another has the same ends in the shared part, except for the
    shorter one's very end.
    """
    full = partial(full_batch, n_ubatch=n_ubatch, far_batch=far_batch)
    ends = _unmarked_ends(prompt, full, min_batch, batch_cost) if prompt.n_unmarked else []
    last = ends[-1] if ends else 0
    spare = 0  # tokens that the batches so far had beyond the cost of each
    edges = _edges(prompt)
    for stop, is_sure in _stops(prompt, n_ubatch, batch_cost):
        while last + (n_new := full(last)) <= stop:
            spare = _spare(spare, n_new, _cost(batch_cost, last))
            last += n_new
            ends.append(last)
        n_new, cost = stop - last, _cost(batch_cost, last)
        if (n_new >= min_batch and (is_sure or spare + n_new >= cost)) or (n_new > 0 and stop in edges):
            spare = _spare(spare, n_new, cost)
            last = stop
            ends.append(last)
    if len(prompt) > last:
        ends.append(len(prompt))
    seams, half = frozenset(prompt.seams), max(min_batch // 2, 1)
    for line in () if batch_cost else _line_stops(prompt, min_batch):
        at = bisect.bisect_right(ends, line)
        if line - (ends[at - 1] if at else 0) >= (half if line in seams else min_batch) and not prompt.is_inside(line):
            ends.insert(at, line)
    return ends


def full_batch(n_before: int, n_ubatch: int, far_batch: int = 0) -> int:
    """The most tokens of a batch behind ``n_before``: ``n_ubatch``, or ``far_batch`` behind FAR tokens, if not 0."""
    return min(far_batch or n_ubatch, n_ubatch) if n_before > FAR else n_ubatch


def _cost(batch_cost: int, n_before: int) -> int:
    return batch_cost * max(n_before, DEEP) // DEEP


def _spare(spare: int, n_new: int, cost: int) -> int:
    """What is to spare behind a batch of ``n_new`` tokens; what is missing is forgotten beyond one batch."""
    return max(spare + n_new - cost, -cost)


def _stops(prompt: Prompt, n_ubatch: int, batch_cost: int) -> list[tuple[int, bool]]:
    """Where a batch may end, ascending, the prompt's end last, and whether each is worth a batch in any case."""
    boundaries, headers = prompt.boundaries, prompt.headers
    edges = _edges(prompt)
    sure = {*(boundaries if headers is None else headers), *boundaries[:1], len(prompt), *edges}
    stops = {*boundaries, *(_rungs(prompt, n_ubatch) if batch_cost else ()), len(prompt), *edges}
    return [(stop, stop in sure) for stop in sorted(stops) if not prompt.is_inside(stop)]


def _edges(prompt: Prompt) -> set[int]:
    """Where images begin and end."""
    return {edge for picture in prompt.pictures for edge in (picture.start, picture.end) if edge}


def _rungs(prompt: Prompt, n_ubatch: int) -> Iterator[int]:
    rung = FIRST_RUNG
    while rung < min(n_ubatch, len(prompt)):
        if rung > prompt.n_unmarked:
            yield rung
        rung *= 2


def _line_stops(prompt: Prompt, min_batch: int) -> Iterator[int]:
    """Line ends within the first messages, the farther apart the longer a message."""
    replies = frozenset(prompt.headers or ())
    for begin, end in prompt.first_messages:
        at, n_seams = begin, 0
        while begin not in replies:
            step = max(min_batch, FINE_LEAST, (at - begin) // FINE_PART)
            full = at + step
            nearest = at + max(min_batch // 2, step // 8) if n_seams < MOST_SEAMS else full
            at = _line_end(prompt, nearest, full, full + step)
            n_seams += at < full
            if at >= end:
                break
            yield at


def _unmarked_ends(prompt: Prompt, full: Callable[[int], int], min_batch: int, batch_cost: int) -> list[int]:
    ends: list[int] = []
    typed = () if batch_cost else prompt.typed
    is_typed = frozenset(typed).__contains__
    last, part = 0, UNMARKED_PARTS[batch_cost > 0]
    while True:
        picture, most = prompt.picture_at(last), full(last)
        if picture is None:
            step = min(max(min_batch, last // part), most if batch_cost else min(FINE_STEP, most))
            end = _line_end(prompt, last + step * 3 // 4, last + step, last + min(2 * step, most))
            half = max(min_batch // 2, 1)
            least = max(half, last // LEAST_PART)
            at = bisect.bisect_left(prompt.parts, last + (half if is_typed(last) else least))
            line = bisect.bisect_left(typed, last + least)
            pictures = (each.start for each in prompt.pictures if each.start > last)
            last = min([end, *prompt.parts[at : at + 1], *typed[line : line + 1], *pictures])
        else:
            last = min(last + most, picture.end)
        if last > prompt.n_unmarked:
            return ends
        ends.append(last)


def _line_end(prompt: Prompt, nearest: int, first: int, last: int) -> int:
    """The first seam from ``nearest`` on, line end from ``first`` on that is not shortly before a seam, or ``last``:
    whichever comes first."""
    seams, lines = prompt.seams, prompt.line_stops
    seam, line = bisect.bisect_left(seams, nearest), bisect.bisect_left(lines, first)
    return min([*seams[seam : seam + 1], *lines[line : line + 1], last])


def last_end(ends: Sequence[int], limit: int) -> int:
    """The deepest batch end at or before ``limit``, or 0."""
    at = bisect.bisect_right(ends, limit)
    return ends[at - 1] if at else 0


def inner_ends(prompt: Prompt, ends: Sequence[int]) -> list[int]:
    """The batch ends at which a snapshot of ``prompt`` is of use: not at its very end, nor inside an image."""
    inner = list(ends[: bisect.bisect_left(ends, len(prompt))])
    return [end for end in inner if not prompt.is_inside(end)] if prompt.pictures else inner


def last_common_end(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """The deepest position at or before ``limit`` up to which both have the same batch ends, or 0."""
    n = min(bisect.bisect_right(a, limit), bisect.bisect_right(b, limit))
    if list(a[:n]) != list(b[:n]):  # which is seldom
        n = next(i for i in range(n) if a[i] != b[i])
    return a[n - 1] if n else 0


def ends_within(ends: Sequence[int], first: int, last: int | None = None) -> tuple[int, ...]:
    """The batch ends in (first, last]."""
    return tuple(ends[bisect.bisect_right(ends, first) : None if last is None else bisect.bisect_right(ends, last)])


def choose_cuts(
    prompt: Prompt, ends: Sequence[int], start: int, min_step: int, also: Sequence[int] = (), n_most: int = 0
) -> list[int]:
    """The batch ends after ``start`` that deserve a snapshot, ascending.

    These are the last ends at or before: the first boundary (the system and tools head), the two last boundaries (the
    last message and the generation header), the positions in ``also`` (where the prompt leaves another one, since it
    will not be the last to do so; what goes to disk), a ladder of rungs LADDER, twice, four times, ... as many tokens
    before the end (a history that is changed so far back costs about as much again), the half of the head, a quarter,
    and so on (where the head of another day or folder leaves this one, which then costs at most half of what they
    share), likewise of the user's message if it is the last, and one of the first (where what was found for a question
    begins), and each multiple of ``min_step`` tokens that has no other cut shortly before it (0 turns those off; by
    default it is half of that if all of these are ``n_most`` snapshots at most), so that a history that is cut anywhere
    loses little more. In a prompt without boundaries it is every UNMARKED_STEP, or half of that in the same case. That
    one gets the beginnings of its last two parts, too, and of what was typed, or else its last full batch, and all of
    it counts as its head. One of no more than a first message, or two, gets the last one within it: titles and the like
    are asked for with a conversation inside, which grows. Behind the last image there is one, for other questions.
    """
    inner = inner_ends(prompt, ends)
    if not inner:
        return []
    if prompt.boundaries:
        wanted = {prompt.boundaries[0], prompt.turn, *prompt.boundaries[-2:]}
    else:
        wanted = {*sorted({*prompt.parts}.intersection(inner))[-2:], *prompt.typed[-2:]} or {inner[-1]}
    wanted |= {picture.end for picture in prompt.pictures[-1:]}
    if len(prompt.boundaries) in (1, 2):
        wanted.add(prompt.boundaries[-1] - 1)
    rungs = [_rung(prompt, position) for position in _ladder(len(prompt))]
    halves = _halves(0, prompt.boundaries[0] if prompt.boundaries else len(prompt))
    if prompt.turn and prompt.turn == prompt.boundaries[-1]:
        for begin, end in prompt.first_messages[1:]:
            halves += _halves(begin, end) if end == prompt.turn else []
    cuts = {last_end(inner, position) for position in (*wanted, *also, *rungs, *halves)} - {0}
    if min_step > 0:
        step = min_step if prompt.boundaries else min(min_step, UNMARKED_STEP)
        sparse, dense = (
            cuts.union(_grid(inner, cuts, each) if prompt.boundaries else _spread(inner, cuts, start, each))
            for each in (step, step // 2)
        )
        cuts = dense if min_step == DEFAULT_STEP and len(dense) <= n_most else sparse
    return sorted(cut for cut in cuts if cut > start)


def next_turn(prompt: Prompt, n_common: int) -> int:
    """Where a prompt resumes that is this one, written anew and gone on; 0 where nobody can tell.

    One message alone that begins as another prompt did, for ``n_common`` tokens, is a task with a conversation inside,
    which grows within it.
    """
    is_task = len(prompt.boundaries) == 1 and n_common >= LEAST_HALF
    return prompt.boundaries[0] - 1 if is_task else prompt.turn


def _grid(inner: Sequence[int], cuts: Collection[int], step: int) -> set[int]:
    """The last of ``inner`` at or before each multiple of ``step``, without one of ``cuts`` a quarter of that away."""
    known = sorted(cuts)
    places = range(step, inner[-1] + 1, step)
    return {last_end(inner, at) for at in places if at - last_end(known, at) > step // GRID_PARTS} - {0}


def _spread(inner: Sequence[int], cuts: Collection[int], start: int, step: int) -> Iterator[int]:
    """Those of ``inner`` that are at least ``step`` behind ``start``, behind one of ``cuts``, or behind the last."""
    last = start
    for end in inner:
        if end in cuts:
            last = end
        elif end - last >= step:
            yield end
            last = end


def _ladder(n: int) -> list[int]:
    """LADDER, twice, four times as many tokens before ``n``, and so on."""
    rungs, distance = [], LADDER
    while distance < n:
        rungs.append(n - distance)
        distance *= 2
    return rungs


def _halves(begin: int, end: int) -> list[int]:
    """Behind half of the tokens from ``begin`` to ``end``, a quarter, an eighth, and so on, if worth a snapshot."""
    found, n = [], end - begin
    while (n := n // 2) >= LEAST_HALF:
        found.append(begin + n)
    return found


def _rung(prompt: Prompt, position: int) -> int:
    """The last boundary before ``position``, where histories change, or ``position`` if that is much closer."""
    at = bisect.bisect_right(prompt.boundaries, position)
    boundary = prompt.boundaries[at - 1] if at else 0
    return boundary if boundary and 2 * (len(prompt) - boundary) <= 3 * (len(prompt) - position) else position
