"""Which model is loaded next, and which is unloaded: no model, no thread, and a clock that the test
moves.
"""

from __future__ import annotations

from pyctl.server.load_order import MAX_HELD_SECONDS, LoadOrder, LoadRequest


class Clocked:
    """A `LoadOrder` with a clock: loads and unloads at once what the order allows."""

    def __init__(self, maximum: int, patience: float = 1.0, keeps: tuple[str, ...] = ()) -> None:
        self.order = LoadOrder(maximum, patience)
        self.now = 0.0
        self.keeps = keeps
        self.running: list[LoadRequest] = []
        self.switches: list[tuple[str | None, str]] = []

    def ask(self, name: str) -> LoadRequest:
        ticket = LoadRequest(name, self.now)
        self.order.enqueue(ticket)
        self.settle()
        return ticket

    def end(self, ticket: LoadRequest) -> None:
        self.running.remove(ticket)
        self.order.end(ticket, self.now)
        self.settle()

    def wait(self, seconds: float) -> None:
        """Time passes, and the order is asked whenever it says that it may answer otherwise."""
        end = self.now + seconds
        while (due := self.order.seconds(self.now)) is not None and self.now + due <= end:
            self.now += due + 1e-9
            before = len(self.switches)
            self.settle()
            if len(self.switches) == before and self.order.seconds(self.now) == 0:
                break
        self.now = max(self.now, end)
        self.settle()

    def settle(self) -> None:
        self.running += self.order.admitted()
        while (name := self.order.next_model) is not None:
            victim = None
            if self.order.is_full:
                if (victim := self.order.victim(self.now)) is None:
                    return
                assert self.order.n_running(victim) == 0
                assert victim not in self.keeps
                self.order.unloaded(victim)
            self.order.loaded(name, self.now, keeps=name in self.keeps)
            self.switches.append((victim, name))
            self.running += self.order.admitted()


def test_idle_models_are_unloaded_after_patience_in_lru_order() -> None:
    clocked = Clocked(2)
    first = clocked.ask("a")
    second = clocked.ask("b")
    clocked.end(first)
    clocked.now = 0.5
    clocked.end(second)
    third = clocked.ask("c")
    assert third not in clocked.running
    clocked.wait(0.4)
    assert third not in clocked.running
    clocked.wait(0.2)
    assert third in clocked.running
    assert clocked.switches == [(None, "a"), (None, "b"), ("a", "c")]


def test_requests_that_follow_each_other_go_first_but_not_for_ever() -> None:
    clocked = Clocked(1)
    agent = clocked.ask("a")
    other = clocked.ask("b")
    while other not in clocked.running:
        clocked.now += 2.0
        clocked.end(agent)
        if other in clocked.running:
            break
        agent = clocked.ask("a")  # at once: within the patience
        assert clocked.now <= MAX_HELD_SECONDS + 2.0
    assert clocked.now >= MAX_HELD_SECONDS
    late = clocked.ask("a")
    assert late not in clocked.running
    clocked.end(other)
    clocked.wait(1.1)
    assert late in clocked.running


def test_busy_model_is_closed_after_patience_and_reopened() -> None:
    clocked = Clocked(1)
    long = clocked.ask("a")
    other = clocked.ask("b")
    clocked.wait(MAX_HELD_SECONDS)
    held = clocked.ask("a")
    assert held not in clocked.running
    clocked.order.abandon(other)
    clocked.settle()
    assert {long, held} <= set(clocked.running)


def test_a_kept_model_never_leaves_and_says_when_it_stops_all_others() -> None:
    clocked = Clocked(1, keeps=("a",))
    clocked.end(clocked.ask("a"))
    waiting = clocked.ask("b")
    clocked.wait(10 * MAX_HELD_SECONDS)
    assert waiting not in clocked.running
    assert clocked.order.all_pinned
    assert clocked.order.remove_waiting("b") == [waiting]


def test_an_unload_that_was_asked_for_lets_no_request_in() -> None:
    clocked = Clocked(0)
    running = clocked.ask("a")
    clocked.order.stop_admitting("a")
    waiting = clocked.ask("a")
    assert waiting not in clocked.running
    clocked.end(running)
    clocked.order.unloaded("a")
    clocked.settle()
    assert waiting in clocked.running, "it loads the model again"
