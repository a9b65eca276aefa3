"""Background requests: their cost to other requests, the snapshots they leave, and how they end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings, PrewarmDelays
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Request
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.errors import UnavailableError
from pyctl.prompt import Prompt, as_tokens
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine import drive
from tests.unit.engine.drive import ManualClock, ask, collect, request, run_all, tier_on
from tests.unit.engine.drive import cold as run_cold
from tests.unit.engine.test_disk import engine_on
from tests.unit.server.fake import INFO
from tests.waiting import until

KINDS = ("hybrid", "attention", "opaque")
HEADER = [61, 62, 61, 62]
MESSAGE = 104
"""Lengths leave 32 to 63 tokens in the last batch of 64, so that every boundary ends a batch."""

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)

AT_ONCE = PrewarmDelays(0.0, 0.0, 0)

engine_of = partial(drive.engine_of, prewarm=AT_ONCE)


def cold(backend: FakeBackend, prompt: Prompt, n: int) -> Any:
    return run_cold(backend, prompt, n, sampling=ENDLESS)


def said(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 60, n).tolist()


class Talk:
    """A conversation on ``engine``: messages of tokens, generation headers in between, replies as
    they are kept.
    """

    def __init__(
        self, engine: Engine, *, strips: bool = True, n: int = 100, head: int = 240
    ) -> None:
        self.engine = engine
        self._strips = strips
        self._n = n
        self._parts = [said(head, head)]

    def prompt(self, *more: list[int]) -> Prompt:
        parts = [*self._parts, *more]
        begins = np.cumsum([len(part) for part in parts]).tolist()[:-1]
        headers = tuple(
            at for at, part in zip(begins, parts[1:], strict=True) if part[: len(HEADER)] == HEADER
        )
        return Prompt(as_tokens(np.concatenate(parts)), tuple(begins), headers=headers)

    def turn(self, seed: int, n_message: int = MESSAGE, **fields: Any) -> tuple[Request, Any]:
        """Ask; the reply goes into the conversation, without its first half if that is stripped."""
        self._parts.append(said(seed, n_message))
        asked = request(self.prompt(HEADER), self._n, sampling=ENDLESS, **fields)
        handle = RequestHandle(asked)
        self.engine.submit(handle)
        while not handle.is_over:
            self.engine.step()
        reply = collect(handle)
        assert reply.error is None
        kept = reply.tokens[len(reply.tokens) // 2 :] if self._strips else reply.tokens
        self._parts.append([*HEADER, *kept, 60])
        return asked, reply

    def next_turn(self, after: Request) -> RequestHandle:
        """Return the handle of a background request for the certain part of the next prompt."""
        policy = after.disk_policy
        handle = RequestHandle(
            Request(
                self.prompt([63]), max_tokens=0, disk_policy=policy, background=True, after=after
            )
        )
        self.engine.submit(handle)
        return handle


@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_evaluates_only_the_new_message_and_is_exact(kind: str, strips: bool) -> None:
    """After a prewarm, a turn evaluates its message and the header of the reply only, and its
    tokens are those of a cold run. Prewarmed tokens are counted apart.
    """
    talk = Talk(engine_of(FakeBackend(kind), exact=not strips), strips=strips)
    for turn in range(4):
        asked, reply = talk.turn(turn)
        assert reply.tokens == cold(FakeBackend(kind), asked.prompt, 100).tokens
        stats = reply.done.stats
        if turn:
            assert stats.n_evaluated == MESSAGE + len(HEADER)
            assert stats.n_prewarmed >= 50
        before = talk.engine.prefix_cache.totals.n_evaluated
        warm = collect_done(talk.next_turn(asked), talk.engine)
        assert warm.stats.n_evaluated >= 50
        assert talk.engine.prefix_cache.totals.n_evaluated == before, "counted apart"
        check_invariants(talk.engine.prefix_cache.cache)
    totals = talk.engine.prefix_cache.totals
    assert totals.n_prewarms == 4
    assert totals.n_prewarmed_used >= totals.n_prewarmed * 3 / 4
    assert totals.requests == 4


def collect_done(handle: RequestHandle, engine: Engine) -> Done:
    run_all(engine)
    return collect(handle).done


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("strips", [True, False])
def test_a_request_stops_it_within_one_batch_and_finds_its_own_live_end(
    kind: str, after_steps: int, strips: bool
) -> None:
    """A request that arrives during a prewarm starts in the next step, after one batch at most. A
    client that kept the whole reply still resumes at its live end, unless the prewarm has gone on
    in the same conversation.
    """
    backend = FakeBackend(kind)
    talk = Talk(engine_of(backend), strips=strips, n=360)
    asked, reply = talk.turn(1)
    talk.next_turn(asked)
    for _ in range(after_steps):
        talk.engine.step()
    # The client kept everything after all: what was live before is still there, however short the
    # warm-up ran.
    kept = Prompt.from_ids(
        [*asked.prompt.tokens, *reply.tokens, *said(5, 40)], asked.prompt.boundaries
    )
    handle = RequestHandle(request(kept, 4))
    talk.engine.submit(handle)
    before = backend.n_evaluated
    talk.engine.step()
    assert handle.request in [active.handle.request for active in talk.engine.running], (
        "it begins at once"
    )
    assert backend.n_evaluated - before <= 64
    run_all(talk.engine)
    stats = collect(handle).done.stats
    if strips or after_steps < 2:
        assert stats.n_evaluated <= 41, "the end of what was live, and no less"
    check_invariants(talk.engine.prefix_cache.cache)


def test_stopped_prewarm_resumes_without_repeating_work() -> None:
    backend = FakeBackend()
    talk = Talk(engine_of(backend), n=360)
    asked, _ = talk.turn(1)
    handle = talk.next_turn(asked)
    for _ in range(2):
        talk.engine.step()
    assert ask(talk.engine, Prompt.from_ids(said(77, 90), [80]), 3).error is None
    run_all(talk.engine)
    stats = collect(handle).done.stats
    totals = talk.engine.prefix_cache.totals
    assert (
        totals.n_prewarmed
        == stats.n_evaluated
        == len(handle.request.prompt) - 1 - len(asked.prompt) + len(HEADER)
    )
    assert talk.turn(2)[1].done.stats.n_evaluated == MESSAGE + len(HEADER)


def test_it_is_given_up_when_its_conversation_goes_on() -> None:
    for submit_late in (False, True):
        talk = Talk(engine_of(FakeBackend(), exact=True))
        asked, _ = talk.turn(1)
        handle = None if submit_late else talk.next_turn(asked)
        if handle is not None:
            talk.engine.step()
        obsolete = talk.prompt([63])
        talk.turn(2)
        if handle is None:
            handle = RequestHandle(Request(obsolete, max_tokens=0, background=True, after=asked))
            talk.engine.submit(handle)
        before = talk.engine.prefix_cache.totals.n_prewarmed
        assert run_all(talk.engine) <= 1
        assert talk.engine.prefix_cache.totals.n_prewarmed == before
        assert collect(handle).done is None


def test_another_reply_to_the_same_prompt_makes_the_first_one_obsolete() -> None:
    talk = Talk(engine_of(FakeBackend()))
    asked, _ = talk.turn(1)
    handle = talk.next_turn(asked)
    again = request(asked.prompt, 3)
    other = RequestHandle(again)
    talk.engine.submit(other)
    run_all(talk.engine)
    assert collect(other).done is not None
    assert collect(handle).done is None


@pytest.mark.parametrize("exact", [False, True])
def test_costly_prewarm_reaches_the_next_message_unless_exact(exact: bool) -> None:
    backend = FakeBackend(n_ubatch=256, batch_cost=250)
    talk = Talk(engine_of(backend, exact=exact), n=2 * 96 - 10)
    asked, _ = talk.turn(1)
    n = len(talk.prompt([63])) - 1
    done = collect_done(talk.next_turn(asked), talk.engine)
    assert (done.stats.n_prompt == n) == (not exact), (
        "the boundary of the next message is no batch end"
    )
    assert talk.engine.sequences[0].n_exact == len(asked.prompt) - len(HEADER)
    _, reply = talk.turn(2)
    assert reply.done.stats.n_evaluated == MESSAGE + len(HEADER) + exact * 96
    assert reply.done.stats.n_prewarmed == (not exact) * 96


@pytest.mark.parametrize(
    ("talk", "options", "n_prewarmed"),
    [
        ({"strips": False, "n": 64 + 15}, {}, 0),  # the next turn goes on from the live end
        ({"strips": False, "n": 64 + 15}, {"exact": True}, 64),  # which is no batch end
        ({"n": 8}, {}, 0),  # within the last batch
        ({}, {"budget": 0}, 0),  # without a cache to park the live end in
    ],
)
def test_nothing_is_made_ready_without_need(
    talk: dict[str, Any], options: dict[str, Any], n_prewarmed: int
) -> None:
    talking = Talk(engine_of(FakeBackend(), **options), **talk)
    asked, _ = talking.turn(1)
    talking.next_turn(asked)
    run_all(talking.engine)
    assert talking.engine.prefix_cache.totals.n_prewarmed == n_prewarmed


def test_what_is_forgotten_is_not_made_ready() -> None:
    backend = FakeBackend()
    talk = Talk(engine_of(backend))
    asked, _ = talk.turn(1)
    for n_steps in (0, 1):
        handle = talk.next_turn(asked)
        for _ in range(n_steps):
            talk.engine.step()
        talk.engine.prewarms.forget()
        run_all(talk.engine)
        assert collect(handle).done is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("exact", "n_new"), [(False, 2), (True, 105)])
def test_a_reply_that_the_next_prompt_has_as_it_is_is_not_evaluated_again(
    kind: str, exact: bool, n_new: int
) -> None:
    """Only with --exact. Behind it one token is missing, and what ends it; its live end is not kept
    beside that.
    """
    talk = Talk(engine_of(FakeBackend(kind), exact=exact), strips=False)
    asked, _ = talk.turn(1)
    assert collect_done(talk.next_turn(asked), talk.engine).stats.n_evaluated == n_new
    assert collect_done(talk.next_turn(asked), talk.engine).stats.n_evaluated == 0
    kept = talk.engine.prefix_cache.cache.snapshots()
    assert sum(not snapshot.exact for snapshot in kept) == (not exact)
    assert talk.turn(2)[1].done.stats.n_evaluated == MESSAGE + len(HEADER)


def test_what_a_client_wants_to_be_ready_is_evaluated_with_all_it_takes() -> None:
    engine = engine_of(FakeBackend())
    prompt = Prompt.from_ids(said(1, 500), [300, 490])
    handle = RequestHandle(Request(prompt, max_tokens=0, background=True))
    engine.submit(handle)
    done = collect_done(handle, engine)
    assert done.stats.n_prompt == 490
    assert done.stats.n_cached == 0
    assert done.stats.n_evaluated == 490
    reply = ask(engine, prompt)
    assert reply.done.stats.n_cached == 490
    assert reply.done.stats.n_prewarmed == 490
    assert reply.tokens == run_cold(FakeBackend(), prompt).tokens
    assert len(engine.prefix_cache.recent) == 1


def test_prewarmed_prompt_survives_restart_unless_policy_is_off(tmp_path: Path) -> None:
    for policy in ("full", "off"):
        directory = tmp_path / policy
        settings = EngineSettings(exact=True, prewarm=AT_ONCE)
        talk = Talk(engine_on(directory, "hybrid", settings=settings))
        asked, _ = talk.turn(1, disk_policy=DiskPolicy.parse(policy))
        talk.next_turn(asked)
        run_all(talk.engine)
        assert talk.engine.prefix_cache.close()
        talk.engine = engine_on(directory, "hybrid", settings=settings)
        _, reply = talk.turn(2)
        if policy == "off":
            assert reply.done.stats.n_cached == 0
        else:
            assert reply.done.stats.n_evaluated == MESSAGE + len(HEADER)
            assert reply.done.stats.source == "disk"
        talk.engine.prefix_cache.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_survives_a_stop_though_nothing_was_made_ready(tmp_path: Path, kind: str) -> None:
    def engine() -> Engine:
        settings = EngineSettings(prewarm=AT_ONCE)
        return Engine(FakeBackend(kind), RamCache(32, None), settings, tier_on(tmp_path))

    talk = Talk(engine(), strips=False)
    talk.turn(1)
    assert talk.engine.close(UnavailableError("the server is shutting down"))
    talk.engine = engine()
    stats = talk.turn(2)[1].done.stats
    assert stats.source == "disk"
    assert stats.n_evaluated == MESSAGE + len(HEADER) + 2
    talk.engine.prefix_cache.close()


def test_with_several_sequences_it_waits_until_all_are_served() -> None:
    """Prewarms wait until no sequence replies. Then all of them run, and each conversation gains
    from its own.
    """
    backend = FakeBackend(n_seqs=4, n_ctx=8192)
    engine = engine_of(backend)
    talks = [Talk(engine, head=240 + 64 * i) for i in range(3)]
    asked = [talk.turn(i)[0] for i, talk in enumerate(talks)]
    handles = [
        RequestHandle(request(Prompt.from_ids(said(40 + i, 300), [290]), 40)) for i in range(2)
    ]
    for handle in handles:
        engine.submit(handle)
    warm = [talk.next_turn(each) for talk, each in zip(talks, asked, strict=True)]
    while not all(handle.is_over for handle in handles):
        engine.step()
        assert engine.prefix_cache.totals.n_prewarmed == 0
    run_all(engine)
    assert all(collect(handle).done is not None for handle in warm)
    for i, talk in enumerate(talks):
        asked_next, reply = talk.turn(90 + i)
        assert reply.done.stats.n_evaluated == MESSAGE + len(HEADER)
        assert reply.tokens == cold(FakeBackend(n_ctx=8192), asked_next.prompt, 100).tokens
    check_invariants(engine.prefix_cache.cache)


def test_the_line_is_bounded() -> None:
    engine = engine_of(FakeBackend())
    handles = [
        RequestHandle(Request(Prompt.from_ids(said(i, 100), [90]), background=True))
        for i in range(20)
    ]
    run_all(engine, *handles)
    ends = [collect(handle) for handle in handles]
    assert [end.error is not None for end in ends] == [True] * 4 + [False] * 16


def test_a_failure_in_it_is_nobody_elses() -> None:
    backend = FakeBackend()
    talk = Talk(engine_of(backend))
    asked, _ = talk.turn(1)
    handle = talk.next_turn(asked)
    original = backend.evaluate
    backend.evaluate = None  # type: ignore[method-assign, assignment]
    run_all(talk.engine)
    assert collect(handle).error is not None
    backend.evaluate = original  # type: ignore[method-assign]
    assert (
        talk.turn(2)[1].tokens
        == cold(
            FakeBackend(), talk.engine.scheduler.occupancy.last[0].handle.request.prompt, 100
        ).tokens
    )


# -- on the engine's thread
# ----------------------------------------------------------------------------------


def served(
    sleep_seconds: float = -1, delays: PrewarmDelays = AT_ONCE
) -> tuple[Worker, Engine, ManualClock]:
    settings = EngineSettings(prewarm=delays)
    engine = Engine(FakeBackend(), RamCache(64, None), settings, clock=ManualClock())
    return Worker(engine, INFO, sleep_seconds), engine, engine.clock


def test_it_is_quiet_when_nobody_asks_whoever_asked_last() -> None:
    """The delay of a prewarm counts from the last request of any client, since the engine has to be
    idle. The second conversation needs none, since its parked end is as good.
    """
    clock = ManualClock()
    settings = EngineSettings(prewarm=PrewarmDelays(0.05, 1.0, 0))
    engine = Engine(FakeBackend(), RamCache(64, None), settings, clock=clock)
    kept = Talk(engine, strips=False)
    stripped = Talk(engine, head=260)
    kept.next_turn(kept.turn(1)[0])
    clock.advance(0.9)
    assert engine.prewarms.seconds == pytest.approx(0.1)
    asked, _ = stripped.turn(2)
    stripped.next_turn(asked)
    assert engine.prewarms.seconds == pytest.approx(0.05), "a client may ask again at once"
    totals = engine.prefix_cache.totals
    run_all(engine)
    assert totals.n_prewarms == 0
    clock.advance(0.6)
    run_all(engine)
    assert totals.n_prewarms == 1
    assert engine.prewarms.seconds == pytest.approx(0.4), "since the other one was asked, too"
    clock.advance(0.4)
    run_all(engine)
    assert totals.n_prewarms == 1
    assert engine.prewarms.seconds is None, "the end that was parked is as good"


def reply_to(worker: Worker, asked: Request) -> list[int]:
    return [
        token
        for event in worker.submit(asked)
        if hasattr(event, "tokens")
        for token in event.tokens
    ]


def test_the_thread_begins_when_its_time_has_come() -> None:
    worker, engine, clock = served(delays=PrewarmDelays(0.0, 50.0, 0))
    try:
        asked = request(Prompt.from_ids(said(1, 244), [240]), 100, sampling=ENDLESS)
        tokens = reply_to(worker, asked)
        follow = Prompt.from_ids(
            [*asked.prompt.tokens, *tokens, 60, 61], [240, 244 + len(tokens) + 1]
        )
        worker.prewarm(Request(follow, background=True, after=asked))
        assert worker.call(lambda: engine.prewarms.seconds).result(60) == 50.0
        worker.call(lambda: clock.advance(50.0)).result(60)
        until(lambda: engine.prefix_cache.totals.n_prewarms)
        assert engine.prefix_cache.totals.n_prewarmed == 2, (
            "the last token of the reply and its end"
        )
    finally:
        assert worker.close()


def test_it_ends_with_the_server_and_sleeps_with_it() -> None:
    """A prewarm that no client waits for does not wake a sleeping engine, while a background
    request of a client does. The end of the server ends both.
    """
    worker, engine, clock = served(sleep_seconds=60.0)
    prompt = Prompt.from_ids(said(1, 3000), [2990])
    assert reply_to(worker, request(Prompt.from_ids(said(2, 100), [90]), 3))
    worker.call(lambda: clock.advance(60.0)).result(60)
    until(lambda: worker.is_sleeping)
    worker.prewarm(Request(prompt, background=True))
    worker.call(lambda: None).result(60)
    assert worker.is_sleeping, "no client waits for it, so the engine stays asleep"
    assert engine.prefix_cache.totals.n_prewarmed == 0
    waited_for = worker.submit(Request(prompt, background=True))
    assert isinstance(list(waited_for)[-1], Done), "a client that asks wakes the engine"

    def while_one_waits() -> float | None:
        engine.submit(RequestHandle(Request(Prompt.from_ids(said(9, 100), [90]), background=True)))
        engine.sleep()
        engine.wake()
        return engine.prewarms.seconds

    assert worker.call(while_one_waits).result(60) is None
    last = worker.submit(Request(Prompt.from_ids(said(3, 3500), [3400]), background=True))
    worker.close()
    end = list(last)[-1]
    assert isinstance(end, Done) or (
        isinstance(end, Failed) and isinstance(end.error, UnavailableError)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_may_wait_until_its_prompt_is_in_the_cache(kind: Any) -> None:
    """A request for no tokens samples none; the prompt that it was for evaluates nothing, and its
    reply is that of a cold run.
    """
    backend = FakeBackend(kind)
    engine = engine_of(backend)
    prompt = drive.chat((1, 300))
    sent_ahead = ask(engine, prompt, 0)
    assert sent_ahead.tokens == []
    assert sent_ahead.done.stop_type == "limit"
    assert sent_ahead.done.timings.n_predicted == 0
    assert sent_ahead.done.stats.n_evaluated == len(prompt)
    assert engine.prefix_cache.totals.n_prewarms == 1
    reply = ask(engine, prompt)
    assert reply.done.stats.n_evaluated == 0
    assert reply.done.stats.n_prewarmed == len(prompt)
    assert reply.tokens == run_cold(FakeBackend(kind), prompt).tokens
    check_invariants(engine.prefix_cache.cache)


def test_a_full_cache_makes_room_for_a_prompt_that_is_sent_ahead() -> None:
    """Its end would otherwise take spare bytes only, and there are none."""
    spare = engine_of(FakeBackend(), budget=None)
    ask(spare, drive.chat((1, 300)), 0)
    needed = spare.prefix_cache.cache.n_bytes
    engine = engine_of(FakeBackend(), budget=needed)
    ask(engine, drive.chat((2, 300)))
    ask(engine, drive.chat((1, 300)), 0)
    assert len(engine.prefix_cache.cache.prompt_ends) == 1
    check_invariants(engine.prefix_cache.cache)


def test_what_is_sent_ahead_twice_counts_once() -> None:
    engine = engine_of(FakeBackend())
    for _ in range(2):
        ask(engine, drive.chat((1, 300)), 0)
    assert engine.prefix_cache.totals.n_prewarms == 1
