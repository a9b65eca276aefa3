"""The events of several replies as one stream, each as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pyctl.engine.request import Event
from pyctl.server.settings import TicketLike

__all__ = ["merged"]


async def merged(tickets: Sequence[TicketLike]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """(number of the ticket, events that waited together) until all tickets have ended."""
    if len(tickets) == 1:  # by far the most common: nothing between the engine and the stream
        async for event in tickets[0]:
            yield 0, [event, *tickets[0].waiting()]
        return
    found: asyncio.Queue[tuple[int, list[Event]] | Exception | None] = asyncio.Queue()

    async def take(number: int, ticket: TicketLike) -> None:
        try:
            async for event in ticket:
                found.put_nowait((number, [event, *ticket.waiting()]))
            found.put_nowait(None)
        except Exception as error:
            found.put_nowait(error)

    tasks = [asyncio.ensure_future(take(number, ticket)) for number, ticket in enumerate(tickets)]
    n_running = len(tasks)
    try:
        while n_running:
            item = await found.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
