"""The way back: the events of one request, from the engine's thread to whoever waits, in a thread or in asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from pyctl.engine.request import Done, Event, Failed, Request

__all__ = ["Ticket"]


class Ticket:
    """One consumer iterates, blocking or async, until a Done or Failed event has been delivered.

    `put` is called by the engine's thread only, `cancel` by anyone.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.cancelled = False
        self._events: deque[Event] = deque()
        self._wake: Callable[[], None] | None = None
        self._ended = False

    def cancel(self) -> None:
        """Stop the work at the next batch end or token; the last event may be missing then."""
        self.cancelled = True

    def put(self, event: Event) -> None:
        """Deliver an event. Waking costs a system call, so it happens only for a consumer that waits."""
        self._events.append(event)
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def waiting(self) -> list[Event]:
        """Events that are here already, taken without waiting."""
        events = []
        while self._events and not self._ended:
            events.append(self._take())
        return events

    def _take(self) -> Event:
        event = self._events.popleft()
        self._ended = isinstance(event, (Done, Failed))
        return event

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        while not self._events:
            woken = threading.Event()
            self._wake = woken.set
            # An event may have come between the test and the line above. The timeout lets Ctrl-C through.
            while not self._events and not woken.wait(0.2):
                pass
        self._wake = None
        return self._take()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        while not self._events:
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
            if not self._events:
                await woken
        self._wake = None
        return self._take()
