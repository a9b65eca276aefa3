"""Parts for several tests of the server: a splitter with given parts of a reply, clients, a
template.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp

from pyctl.cache.cache_stats import RequestStats
from pyctl.chat.chat_format import PreparedChat
from pyctl.chat.reply import CallDelta, ReplyDelta, ReplySplitter
from pyctl.engine.request import Done, DraftCounts, Event, Piece, Request, Timings
from pyctl.errors import PyctlError
from pyctl.server.models import Models
from pyctl.server.server_settings import ServerSettings
from pyctl.server.supervisor import Supervisor
from tests.unit.server.fake import Bench, Gate, Script, play


@contextmanager
def supervised(models: Models) -> Iterator[Models]:
    """Serve ``models`` in a separate thread, which ends with the context."""

    def serve() -> None:
        with suppress(PyctlError):
            Supervisor(models).run()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield models
    finally:
        models.close()
        thread.join(60)
        assert not thread.is_alive()


class PartSplitter:
    """Takes lines: ``r:`` more reasoning, ``c:`` more content, ``k:0:id:name`` a call, ``a:0:``
    more arguments.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> ReplyDelta:
        """Return the parts of each complete line, by its first letter: reasoning, content, the name
        of a call, or its arguments.
        """
        *lines, self._held = (self._held + text).split("\n")
        reasoning = ""
        content = ""
        calls = []
        for line in lines:
            kind, _, rest = line.partition(":")
            if kind == "r":
                reasoning += rest
            elif kind == "c":
                content += rest
            else:
                index, _, value = rest.partition(":")
                name, _, function = value.partition(":")
                call = (
                    CallDelta(int(index), arguments=value)
                    if kind == "a"
                    else CallDelta(int(index), name, function)
                )
                calls.append(call)
        return ReplyDelta(reasoning, content, tuple(calls))

    def finish(self) -> ReplyDelta:
        return self.feed("\n") if self._held else ReplyDelta()


CALLS = (
    "r:h",
    "m\n",
    "c:I \n",
    "c:look\n",
    "k:0:t1:look\n",
    'a:0:{"at":\n',
    "a:0:1}\n",
    "k:1:t2:wait\n",
)
"""Reasoning, a text and two calls of tools, as a `PartSplitter` takes them."""


def split_by_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all replies be taken apart by a `PartSplitter`."""
    monkeypatch.setattr(PreparedChat, "splitter", lambda *_: ReplySplitter(PartSplitter()))


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Return ``test`` as a function that runs it in its own event loop, for a minute at most."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


class Caller:
    """Calls an application as a server does, and hangs up when told to."""

    def __init__(
        self, app: ASGIApp, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self._path = path
        self._body = msgspec.json.encode(body)
        self._asked = False
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def call(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": self._headers,
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("nothing happened")

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


def sent_in_silence(path: str, body: dict[str, Any], until: Callable[[bytes], bool]) -> bytes:
    """Return the bytes that the client of a stream gets whose reply "a" is late: it comes when
    ``until`` holds of the bytes before.
    """
    silence = Gate(threading.Event())

    def script(request: Request) -> Script:
        first, second, *rest = play("a")(request)
        return [first, second, silence, *rest]

    async def run() -> bytes:
        caller = Caller(Bench(script).app, path, {**body, "stream": True, "sse_ping_interval": 1})
        call = asyncio.ensure_future(caller.call())
        await caller.until(lambda: until(b"".join(caller.bodies)))
        silence.opened.set()
        await call
        return b"".join(caller.bodies)

    return asyncio.run(run())


OPENED = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""


COUNTS = DraftCounts.of_draft(3, 2) + DraftCounts.of_draft(3, 0) + DraftCounts.of_draft(2, 1)


def drafting(counts: DraftCounts = COUNTS, **settings: Any) -> Bench:
    """Return a server whose engine reports for every reply drafts with these counts."""

    def script(_: Request) -> Iterable[Event]:
        bench.engine.handles[-1].drafts = counts
        yield Piece("a", (97,))
        yield Piece("b", (98,))
        timings = Timings(0, 21, 2.0, 2, 3.0, 2.5, counts)
        bench.engine.counters.count_reply(timings)
        yield Done("eos", "", timings, RequestStats(21, "none", 0, 21), seq=0)

    bench = Bench(
        script, settings=ServerSettings(**settings), draft_types=("ngram-mod", "draft-mtp")
    )
    return bench
