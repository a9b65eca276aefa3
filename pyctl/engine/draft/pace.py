"""How many drafts pay: from what steps of each width cost, and from how many drafts were right at each position.

A verify batch costs more than a plain step, and wrong drafts give nothing back. Two things decide, therefore. What is
expected to give the most tokens a second is taken, which may be no draft at all. And all that drafting loses is paid
from an account, which never goes below zero if costs are what they were measured to be. It begins with GRANT, which is
LOSS of the first GRANT / LOSS plain steps, and gets LOSS of each later one, and what drafts save, up to MOST_SAVED. So
the time of all steps since the start is at most 1 + LOSS of what they would have taken without drafts; but for the
first steps of each width, which load kernels once and are charged as if they had not.

Everything is counted in plain steps: the time in which all requests that decode get one token each. No clock is read
here and nothing is random: the same calls give the same answers.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pyctl.engine.draft.step_costs import Curve, StepCosts

__all__ = ["Pace", "PacedDraft"]

LOSS = 0.02
"""How much slower than without drafts everything together may become."""

GRANT = 40.0
"""What may be lost at first, in plain steps, before anything is known: a second of decoding, once."""

MOST_SAVED = 64.0
"""What is saved beyond it cannot be lost later, so that no stretch of text pays for one far away."""

REMEASURE = 256
"""After so many steps with drafts, one without tells what it costs now: it grows with the context."""

STALE = 128
"""A request that begins alone, with a context of its own, measures a plain step if the last one is so long ago."""

LEAST_GAIN = 1.02
"""Drafts that promise less than this, in speed, are not made."""

CURIOSITY, HABIT = 1.05, 1.03
"""What is said for a width that was never measured, and for staying with the last one: another needs another graph."""

LEAST_PROMISE = 1.1
"""What a width that was hardly in use could give beyond the best one, before it is tried for what it costs."""

STAY = 64.0
"""In so many steps it has to pay to go to another number of drafts, or to none, which takes time."""

LONG_TRIAL = 2
"""So often drafts of a trial may be wrong where it takes long to begin it."""

REWEIGH = 16
"""After so many steps without drafts it is weighed anew what they would cost."""

FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Tokens of a request without drafts when they do not pay; doubled as long as they still do not."""

DEAR, MOST_WAITS = 16, 512
"""A pause is so many times longer for each plain step that it takes to end one, but no longer than so many tokens."""

DOUBT = 0.5
"""What was seen of drafts at a position may be by so many standard errors less than it will be: where little was seen,
more of it is worth a try. A few wrong ones would do away with longer drafts for good: nothing is seen of them then."""

TRIAL = 2
"""Drafts after a pause, until they are right."""

PRIOR = 0.8
"""The share of drafts that are right, before anything is known."""

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Lengths that are chosen from, and the ends of the ranges of positions that are counted together."""


class PacedDraft(NamedTuple):
    """One request in a step: ``source`` drafted, and the first ``n_accepted`` were right; "" and 0 for none."""

    key: int
    source: str = ""
    n_drafted: int = 0
    n_accepted: int = 0


class _Acceptance:
    """The share of right drafts at each position, of those whose predecessors were right; the last ones count most."""

    def __init__(self, forget: float) -> None:
        self._keep = 1 - forget
        self.n_tried = [0.0] * (len(LENGTHS) + 1)
        self.n_right = [0.0] * (len(LENGTHS) + 1)

    def saw(self, n_drafted: int, n_accepted: int) -> None:
        first = 0
        for place, last in enumerate((*LENGTHS, max(n_drafted, LENGTHS[-1] + 1))):
            right = min(n_accepted, last) - first
            tried = right + (first <= n_accepted < min(n_drafted, last))
            if tried <= 0:
                return
            self.n_tried[place] = self.n_tried[place] * self._keep + tried
            self.n_right[place] = self.n_right[place] * self._keep + right
            first = last

    def shares(self, n: int, prior: Sequence[float] | None, weight: float) -> list[float]:
        """For the first ``n`` ranges of positions; ``prior``, or the range before, has the ``weight`` of so many."""
        shares: list[float] = []
        for place, (tried, right) in enumerate(zip(self.n_tried[:n], self.n_right[:n], strict=True)):
            expected = prior[place] if prior is not None else (shares[-1] if shares else PRIOR)
            seen = (right + weight * expected) / (tried + weight)
            doubt = DOUBT * math.sqrt(max(seen * (1 - seen), 0.0) / (tried + weight))
            shares.append(max(seen, min(seen + doubt, expected)))
        return shares


class _Option(NamedTuple):
    """``n`` drafts: how much faster all would be, expected and if all are right, and the plain steps lost at worst.

    ``score`` is the gain with what else speaks for it, ``promise`` the gain if it costs as little as it may.
    """

    n: int
    gain: float
    score: float
    hope: float
    risk: float
    promise: float


@dataclass
class _Course:
    """How drafts of one source fare in one request; ``waits`` tokens are left of a pause, ``trial`` follows one,
    with ``n_wrong`` drafts that were.

    ``last`` is how many it had; ``options`` are those of step ``weighed``, for what was ``asked``.
    """

    acceptance: _Acceptance = field(default_factory=lambda: _Acceptance(0.06))
    pause: int = FIRST_PAUSE
    waits: int = 0
    trial: bool = False
    n_wrong: int = 0
    last: int = 0
    asked: tuple[int, int, int, bool, int, int] | None = None
    weighed: int = 0
    options: list[_Option] = field(default_factory=list)


class Pace:
    """Says before each step how many drafts a request should have, and is told afterwards what came of it.

    With ``fixed`` it is always as many as may be. One for an engine; the engine's thread calls it.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self.balance = GRANT
        """Plain steps that may be lost now."""
        self.is_fixed = fixed
        self._granted = GRANT  # what was given of it at first has to be earned before more is given
        self._step = 0
        self._costs: dict[int, StepCosts] = {}
        # Milliseconds of each request by drafts, of a source and how many it drafts for at once.
        self._proposing: defaultdict[tuple[str, int], Curve] = defaultdict(lambda: Curve(0, 0.0, 0.0))
        self._together: set[str] = set()
        self._known: defaultdict[str, _Acceptance] = defaultdict(lambda: _Acceptance(0.02))
        self._courses: defaultdict[int, defaultdict[str, _Course]] = defaultdict(lambda: defaultdict(_Course))
        self._begun: dict[int, int] = {}  # the step at which a request was first asked for
        self._planned: dict[int, tuple[str, int, float]] = {}  # source, drafts and what they risk, by request
        # Requests and tokens of the last step, how many such there were, and whether drafts made them differ.
        self._width, self._place, self._is_changed = (0, 0), 0, False

    def most(
        self,
        key: int,
        source: str,
        limit: int,
        n_seqs: int = 1,
        *,
        n_free: int | None = None,
        together: bool = False,
    ) -> int:
        """How many drafts of ``source`` the request ``key`` should have in the next step, ``limit`` or fewer.

        ``n_seqs`` requests take part in the step, and with ``together`` all get as many. When one of more than
        ``n_free`` drafts is wrong, those before it have to be evaluated again. The last answer for a request is what
        counts.
        """
        if self.is_fixed:
            return limit
        self._planned.pop(key, None)
        costs = self._costs.get(n_seqs)
        begun = self._begun.setdefault(key, self._step)
        if (
            limit <= 0
            or costs is None
            or not costs.plain_ms
            or self._is_due(costs, n_seqs == 1 and begun == self._step)
        ):
            return 0
        course = self._courses[key][source]
        if course.waits:
            return 0
        if together:
            self._together.add(source)
        lengths = [*(n for n in LENGTHS if n < limit), limit]
        asked = limit, n_seqs, limit if n_free is None else n_free, together, len(self._planned), self._width[1]
        # A source that has nothing is asked again and again, with nothing learnt in between.
        if course.asked != asked or self._step >= course.weighed + REWEIGH:
            course.options = self._options(source, course, costs, n_seqs, lengths, asked[2], together=together)
            course.asked, course.weighed = asked, self._step
        option = self._choose(course, course.options, costs)
        if option is None:
            return 0
        course.last = option.n
        self._planned[key] = source, option.n, option.risk
        return option.n

    def settle(
        self,
        drafts: Sequence[PacedDraft],
        n_tokens: int,
        decode_ms: float | None,
        proposing_ms: Mapping[str, float] | None = None,
    ) -> None:
        """A step has ended that evaluated ``n_tokens`` for these requests, one entry each.

        It took ``decode_ms``, None if something else was done in it, and each source ``proposing_ms`` before. Neither
        says anything about drafts where the device had something else to do, such as a prompt.
        """
        if self.is_fixed or not drafts:
            return
        self._step += 1
        width = len(drafts), n_tokens
        if decode_ms is None or width[0] != self._width[0]:
            self._place, self._is_changed = 0, False
        elif width != self._width:
            self._place, self._is_changed = 0, True
        self._width, self._place = width, self._place + 1
        self._settle_time(drafts, n_tokens, decode_ms, proposing_ms or {})
        self._planned.clear()
        costs = self._costs[len(drafts)]
        for key, source, n_drafted, n_accepted in drafts:
            for course in self._courses[key].values():
                course.waits = max(course.waits - 1 - n_accepted, 0)
            if n_drafted:
                course = self._courses[key][source]
                course.acceptance.saw(n_drafted, n_accepted)
                course.asked = None
                self._known[source].saw(n_drafted, n_accepted)
                if course.trial and 2 * n_accepted < n_drafted:
                    course.n_wrong += 1
                    if costs.is_settled(1) or course.n_wrong >= LONG_TRIAL:
                        self._wait(course, costs)
                elif n_accepted == n_drafted:
                    course.pause = FIRST_PAUSE

    def know_step(self, n_seqs: int, n_tokens: int, ms: float) -> None:
        """A step for ``n_seqs`` requests took that, when it was made to be measured; the plain one is told first."""
        self._costs.setdefault(n_seqs, StepCosts(n_seqs)).know(n_tokens, ms)

    def know_settling(self, n_seqs: int, ms: float) -> None:
        """The second step of a width took so much longer than the next."""
        self._costs.setdefault(n_seqs, StepCosts(n_seqs)).know_settling(ms)

    def know_proposal(self, source: str, n_seqs: int, n: int, ms: float) -> None:
        """``n`` drafts for each of ``n_seqs`` requests took that for each, when they were made to be measured."""
        self._proposing[source, n_seqs].know(n, ms)

    def end(self, key: int) -> None:
        """The request has ended."""
        for kept in (self._courses, self._begun, self._planned):
            kept.pop(key, None)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _is_due(self, costs: StepCosts, is_first: bool) -> bool:
        """Whether a plain step has to be measured now."""
        unknown = not any(each.is_known for each in self._costs.values())
        after = (STALE if is_first else REMEASURE) * (1 + costs.change)
        return unknown or costs.is_fresh or self._step - costs.measured >= after

    def _choose(self, course: _Course, options: Sequence[_Option], costs: StepCosts) -> _Option | None:
        # To go back to plain steps takes time, too.
        least = LEAST_GAIN / (1 + costs.change / STAY) if self._width[1] > self._width[0] else LEAST_GAIN
        at_stake = sum(risk for _, _, risk in self._planned.values())
        allowed = [option for option in options if option.risk + at_stake <= self.balance]
        best = max(options, key=lambda option: option.gain)
        # What was measured before the first request, or while a graph was built, may be far too much.
        curious = max(allowed, key=lambda option: option.promise, default=best)
        if not course.trial and curious.promise > LEAST_PROMISE * max(best.gain, 1.0):
            return curious
        if course.trial and best.gain > least:
            course.trial = False
        elif course.trial and max(option.hope for option in options) > LEAST_GAIN:
            # After a pause a short draft has to be right first.
            short = [option for option in allowed if option.n <= TRIAL]
            return max(short, key=lambda option: option.score, default=None)
        elif best.gain <= least:
            self._wait(course, costs)
            return None
        best = max(allowed, key=lambda option: option.score, default=best)
        return best if best.gain > least and best in allowed else None

    def _wait(self, course: _Course, costs: StepCosts) -> None:
        course.waits = min(round(course.pause * (1 + DEAR * costs.change)), MOST_WAITS)
        course.pause, course.trial, course.n_wrong = min(2 * course.pause, LONGEST_PAUSE), True, 0

    def _proposing_of(self, source: str, n_seqs: int) -> Curve:
        """What it takes for so many at once, or by what is known of fewer."""
        for n in range(n_seqs, 0, -1):
            if (source, n) in self._proposing and not self._proposing[source, n].is_empty:
                return self._proposing[source, n]
        return self._proposing[source, n_seqs]

    def _options(
        self,
        source: str,
        course: _Course,
        costs: StepCosts,
        n_seqs: int,
        lengths: Sequence[int],
        n_free: int,
        *,
        together: bool,
    ) -> list[_Option]:
        n_places = bisect.bisect_left(LENGTHS, lengths[-1]) + 1
        shares = course.acceptance.shares(n_places, self._known[source].shares(n_places, None, 1), 2)
        proposing, plain_ms = self._proposing_of(source, n_seqs if together else 1), costs.plain_ms or 1.0
        width = n_seqs + sum(n for _, n, _ in self._planned.values())
        before = costs.wider.of(width)[0]
        options: list[_Option] = []
        n_right, all_right, at, place = 0.0, 1.0, 0, 0
        for n in lengths:
            while at < n:  # the ranges of positions up to n
                last = min(LENGTHS[place], n) if place < len(LENGTHS) else n
                share, more_right = shares[place], shares[place] ** (last - at)
                n_right += all_right * (last - at if share == 1 else share * (1 - more_right) / (1 - share))
                all_right *= more_right
                at = last
                place += place < len(LENGTHS) and at == LENGTHS[place]
            n_tokens = n_seqs * (1 + n) if together else width + n
            expected, worst = costs.wider.of(n_tokens)
            to_propose = proposing.of(n)[0] / plain_ms
            change, is_other = costs.change, (n_seqs, n_tokens) != self._width
            # Found drafts are of many lengths; those of a model are as many again in the next step.
            change_now = (change / STAY if together else costs.excess(1)) / n_seqs if is_other else 0.0
            if together:  # what each has to answer for
                more, risk = (expected - 1) / n_seqs + to_propose, (worst - 1) / n_seqs + to_propose
            else:
                more, risk = max(expected - before, 0.0) + to_propose, max(worst - before, 0.0) + to_propose
            if n > n_free:
                # The one before the draft and those that were right are evaluated again, in the next step.
                again = round((n_right - n * all_right) / max(1 - all_right, 1e-9))
                more += (1 - all_right) * max(costs.wider.of(n_seqs + 1 + again)[0] - 1, 0.0)
                risk += max(
                    costs.wider.of(n_seqs + 1)[1] - 1, costs.wider.of(n_seqs + n)[1] - 1 - (n - 1) / n_seqs, 0.0
                )
            more, risk = more + change_now, risk + change * (2 if is_other else 1) / n_seqs
            cost = 1 + n_seqs * more
            gain = promise = (1 + n_right) / cost
            if together:
                least = costs.wider.floor(n_tokens) + n_seqs * (proposing.floor(n) / plain_ms + change_now)
                promise = (1 + n_right) / least
            score = gain * (HABIT if n == course.last else 1 if costs.wider.is_measured(n_tokens) else CURIOSITY)
            options.append(_Option(n, gain, score, (1 + n) / cost, risk, promise))
        return options

    # -- the account -------------------------------------------------------------------------------------------------

    def _settle_time(
        self, drafts: Sequence[PacedDraft], n_tokens: int, decode_ms: float | None, proposing_ms: Mapping[str, float]
    ) -> None:
        n_seqs = len(drafts)
        costs = self._costs.setdefault(n_seqs, StepCosts(n_seqs))
        # What is typical is charged: what disturbs a step, such as a graph that is captured, says nothing about drafts.
        proposing = 0.0
        for source, ms in proposing_ms.items():
            asked = [n for name, n, _ in self._planned.values() if name == source] or [1]
            n_asked = len(asked) if source in self._together else 1
            if decode_ms is not None:
                is_settled = self._place > 1 or costs.is_settled(1)
                self._proposing[source, n_asked].saw(self._step, max(asked), ms / len(asked), is_settled=is_settled)
            proposing += self._proposing_of(source, n_asked).of(max(asked))[0] * len(asked)
        if decode_ms is not None:
            costs.saw(self._step, n_tokens, decode_ms, self._place)
        if not costs.plain_ms:
            return
        gained = 1 + sum(draft.n_accepted for draft in drafts) / n_seqs
        spent = proposing / costs.plain_ms + costs.wider.of(n_tokens)[0]
        spent += costs.excess(self._place) if self._is_changed else 0.0
        allowance = LOSS * gained
        used = min(allowance, self._granted)
        self._granted -= used
        self.balance = min(self.balance + gained - spent + allowance - used, MOST_SAVED)
