"""The channel of one request's events, from the engine's thread to a blocking or asyncio
consumer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

from pyctl.engine.engine_settings import Clock
from pyctl.engine.request import Done, DraftCounts, Event, Failed, Piece, Request
from pyctl.errors import EngineError
from pyctl.settings.limit import limit

__all__ = ["RequestHandle"]

MAX_UNREAD = limit(
    2**16,
    "tokens, with `n_probs`, that wait for a client that does not read",
    "the reply ends with an error",
    "memory",
)

REST_SECONDS = 0.002
"""Pause of a consumer between a piece of text and waiting for the next one. Waking a thread costs
the engine some microseconds; pieces that arrive faster are read together. Slower ones do not pay
for a pause.
"""

SIGNAL_SECONDS = 0.2
"""Longest uninterrupted wait of a blocking consumer, so that Ctrl-C works."""

Pause: TypeAlias = Callable[[float], Awaitable[None]]
"""Waits for some seconds in an event loop, as `asyncio.sleep` does."""


class RequestHandle:
    """The events of one request; one consumer iterates, blocking or async, up to a Done or Failed
    event.

    The engine's thread calls `defer`, `release` and `put` and counts ``drafts``. Any thread may
    read ``drafts`` and ``has_new_line``, which is whether the reply has one, call `cancel` and
    `end_reasoning`, and put an end. With ``is_over`` an end was put; later events are dropped. If
    more than MAX_UNREAD tokens are unread, the request is cancelled and the consumer gets an error
    after them.
    """

    def __init__(
        self,
        request: Request,
        clock: Clock = time.monotonic,
        pause: Pause = asyncio.sleep,
    ) -> None:
        """Make the channel of ``request``.

        ``clock`` gives monotonic seconds, ``pause`` waits for some in the consumer's event loop.
        """
        self.request = request
        self._clock = clock
        self._pause = pause
        self.cancelled = False
        self.changed = (
            threading.Event()
        )  # set by `cancel`; the scheduler's, once that has the request
        self.ends_reasoning = False
        self.is_over = False
        self.has_new_line = False
        self.drafts = DraftCounts()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._held: deque[Piece] = deque()
        self._wake: Callable[[], object] | None = None
        self._flowing = False
        self._taken_at = 0.0
        self._ended = False
        self._n_put = self._n_taken = 0  # tokens; one thread changes each

    def cancel(self) -> None:
        """Stop the request at the next batch end or token. It may end without a last event."""
        self.cancelled = True
        self.changed.set()

    def end_reasoning(self) -> None:
        """End the reasoning at the next token, if the request has a reasoning limit and the reply
        is in reasoning.
        """
        self.ends_reasoning = True

    def defer(self, piece: Piece) -> None:
        """Deliver ``piece`` with the next `release` or `put`. Waking the consumer now would take
        the interpreter from the engine while the device idles.
        """
        if self.is_over:
            return
        self.has_new_line = self.has_new_line or "\n" in piece.text
        self._n_put += _size(piece)
        if self._n_put - self._n_taken > MAX_UNREAD:
            self.cancel()
            self.put(
                Failed(
                    EngineError("the client reads too slowly: its unread reply exceeds the limit")
                )
            )
        else:
            self._held.append(piece)

    def release(self) -> None:
        """Deliver held pieces."""
        if self._held:
            self._deliver_held()
            self._wake_up()

    def put(self, event: Event) -> None:
        """Deliver held pieces, then ``event``."""
        if isinstance(event, Piece):
            self.defer(event)
            return self.release()
        self._deliver_held()
        self._events.put(event)
        if isinstance(event, (Done, Failed)):
            self.is_over = True
        self._wake_up()

    def _deliver_held(self) -> None:
        while self._held:
            try:
                piece = self._held.popleft()
            except IndexError:
                return  # another thread that puts an end also delivers them
            self._events.put(piece)

    def _wake_up(self) -> None:
        """Wake the consumer if it waits in an event loop, which costs a system call."""
        wake = self._wake
        self._wake = None
        if wake is None:
            return
        try:
            wake()
        except RuntimeError:  # the consumer's loop is closed
            self.cancel()

    def drain(self) -> list[Event]:
        """Return all available events without blocking."""
        events = []
        while not self._ended and not self._events.empty():
            events.append(self._taken(self._events.get()))
        return events

    def _taken(self, event: Event) -> Event:
        if isinstance(event, Piece):
            self._n_taken += _size(event)
        before = self._taken_at
        self._taken_at = self._clock()
        self._flowing = isinstance(event, Piece) and self._taken_at - before < 2 * REST_SECONDS
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
            with suppress(Empty):
                return self._taken(self._events.get(timeout=SIGNAL_SECONDS))

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """Return the next event; wait for it in the running event loop."""
        if self._ended:
            raise StopAsyncIteration
        if self._flowing and self._events.empty():
            await self._pause(REST_SECONDS)
        while self._events.empty():
            loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = loop.create_future()
            self._wake = partial(loop.call_soon_threadsafe, _finish, woken)
            if self._events.empty():  # no event arrived since the loop's test
                await woken
        self._wake = None
        return self._taken(self._events.get())


def _finish(woken: asyncio.Future[None]) -> None:
    """End the wait for ``woken``, unless it was cancelled."""
    if not woken.done():
        woken.set_result(None)


def _size(piece: Piece) -> int:
    """Return the number of token entries in ``piece``, at least 1."""
    return 1 + len(piece.tokens) + sum(map(len, piece.probs))
