"""The events of one request, from the engine's thread to its consumer, in a thread or in asyncio."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

from pyctl.engine.request import Done, DraftCounts, Event, Failed, Piece, Request
from pyctl.errors import EngineError
from pyctl.limit import limit

__all__ = ["RequestHandle"]

MOST_UNREAD = limit(
    2**16,
    "tokens of a reply, and of `n_probs`, that wait for a client that does not read",
    "the reply ends with an error",
    "memory",
)

REST_SECONDS = 0.002
"""A consumer that took a piece of text rests so long before it waits for the next one. Waking a thread costs the one
that generates some microseconds; pieces that come faster than this are taken together instead."""

SIGNAL_SECONDS = 0.2
"""A blocked consumer looks up this often, so that Ctrl-C gets through."""


class RequestHandle:
    """One consumer iterates, blocking or async, until a Done or Failed event has been delivered.

    ``drafts`` are counted by the engine's thread during the reply; any thread may read them.
    `hold`, `release` and `put` are called by the engine's thread, except for an end that comes from elsewhere, `cancel`
    and `end_reasoning` by any thread. ``is_over`` says that an end was put: later events are not delivered. A consumer
    that leaves too much unread gets an error after it, and the work stops.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.cancelled = False
        self.ends_reasoning = False
        self.is_over = False
        self.drafts = DraftCounts()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._held: deque[Piece] = deque()
        self._wake: Callable[[], None] | None = None
        self._flowing = False
        self._ended = False
        self._n_put = self._n_taken = 0  # tokens; one thread changes each

    def cancel(self) -> None:
        """Stop the work at the next batch end or token; the last event may be missing then."""
        self.cancelled = True

    def end_reasoning(self) -> None:
        """Have the reasoning end at the next token, if the request has a limit for it and the reply is within one."""
        self.ends_reasoning = True

    def hold(self, piece: Piece) -> None:
        """Deliver ``piece`` with the next `release` or `put`: the consumer is not woken yet, since that takes the
        interpreter from the engine while the device has nothing to do."""
        if self.is_over:
            return
        self._n_put += _size(piece)
        if self._n_put - self._n_taken > MOST_UNREAD:
            self.cancel()
            self.put(Failed(EngineError("the client reads too slowly: its unread reply exceeds the limit")))
        else:
            self._held.append(piece)

    def release(self) -> None:
        """Deliver what was held."""
        if self._held:
            self._deliver_held()
            self._wake_up()

    def put(self, event: Event) -> None:
        """Deliver an event, after all that was held."""
        if isinstance(event, Piece):
            self.hold(event)
            return self.release()
        self._deliver_held()
        self._events.put(event)
        if isinstance(event, (Done, Failed)):
            self.is_over = True
        self._wake_up()

    def _deliver_held(self) -> None:
        with suppress(IndexError):  # an end that comes from elsewhere delivers them, too
            while self._held:
                self._events.put(self._held.popleft())

    def _wake_up(self) -> None:
        """Waking an event loop costs a system call, so it happens only while one waits."""
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def drain(self) -> list[Event]:
        """Events that are here already, taken without waiting."""
        events = []
        while not self._ended and not self._events.empty():
            events.append(self._taken(self._events.get()))
        return events

    def _taken(self, event: Event) -> Event:
        if isinstance(event, Piece):
            self._n_taken += _size(event)
        self._flowing = isinstance(event, Piece)
        self._ended = isinstance(event, (Done, Failed))
        return event

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        if self._flowing and self._events.empty():
            time.sleep(REST_SECONDS)
        while True:
            try:
                return self._taken(self._events.get(timeout=SIGNAL_SECONDS))
            except Empty:
                continue

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        if self._flowing and self._events.empty():
            await asyncio.sleep(REST_SECONDS)
        while self._events.empty():
            loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = loop.create_future()

            def finish(woken: asyncio.Future[None] = woken) -> None:
                if not woken.done():
                    woken.set_result(None)

            def wake(loop: asyncio.AbstractEventLoop = loop, finish: Callable[[], None] = finish) -> None:
                try:
                    loop.call_soon_threadsafe(finish)
                except RuntimeError:  # the consumer's loop is gone, and the consumer with it
                    self.cancel()

            self._wake = wake
            if self._events.empty():  # nothing came between the test and the line above
                await woken
        self._wake = None
        return self._taken(self._events.get())


def _size(piece: Piece) -> int:
    """How many tokens it mentions."""
    return 1 + len(piece.tokens) + sum(map(len, piece.probs))
