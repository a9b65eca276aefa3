"""A worker that plays scripts instead of running a model, and an application on top of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.types import ASGIApp

from pyctl.cache.cache_stats import CacheStats, CacheView, RequestStats, SnapshotView, Source
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.replay import Replay
from pyctl.chat.template import Template
from pyctl.engine.backend import EngineInfo
from pyctl.engine.engine_stats import EngineCounters, EngineStats, SequenceFile, SequenceView
from pyctl.engine.request import Done, Event, Failed, Piece, Progress, Request, StopType, Timings
from pyctl.engine.sampling import Sampling
from pyctl.errors import ContextSizeError, RequestError
from pyctl.prompt import Prompt, Tokens
from pyctl.server.app import create_app
from pyctl.server.service import Settings
from tests.chat.toy import CHATML, ByteTokenizer, chatml_tokenizer

N_CTX = 4096


@dataclass(frozen=True)
class Pause:
    """The next event comes after so many seconds; None: never."""

    seconds: float | None


Script = Iterable[Event | Pause]


class FakeHandle:
    """Delivers a script; what lies between two pauses waits together."""

    def __init__(self, script: Script) -> None:
        self._script = deque(script)
        self._ended = False
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def drain(self) -> list[Event]:
        events: list[Event] = []
        while self._script and not isinstance(self._script[0], Pause) and not self._ended:
            events.append(self._take())
        return events

    def __aiter__(self) -> FakeHandle:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        while isinstance(self._script[0], Pause):
            pause = self._script.popleft()
            assert isinstance(pause, Pause)
            if pause.seconds is None:
                await asyncio.Event().wait()
            else:
                await asyncio.sleep(pause.seconds)
        return self._take()

    def _take(self) -> Event:
        event = self._script.popleft()
        assert not isinstance(event, Pause)
        self._ended = isinstance(event, Done | Failed)
        return event


@dataclass
class FakeWorker:
    """Answers each request with ``script(request)``."""

    script: Callable[[Request], Script]
    requests: list[Request] = field(default_factory=list)
    handles: list[FakeHandle] = field(default_factory=list)
    is_sleeping: bool = False

    @property
    def info(self) -> EngineInfo:
        return INFO

    def check(self, sampling: Sampling) -> None:
        pass

    def submit(self, request: Request) -> FakeHandle:
        if len(request.prompt) >= N_CTX:
            raise ContextSizeError(len(request.prompt), N_CTX)
        self.requests.append(request)
        self.handles.append(FakeHandle(self.script(request)))
        return self.handles[-1]


INFO = EngineInfo(
    model_path="/models/toy.gguf",
    model_name="Toy",
    model_alias="toy-1",
    arch="qwen35",
    ftype_name="F16",
    n_ctx=N_CTX,
    n_ctx_train=8192,
    n_seqs=1,
    n_vocab=chatml_tokenizer().n_vocab,
    n_embd=64,
    n_params=1000,
    model_size=2000,
    chat_template=CHATML,
    bos_token="",
    eos_token="<|im_end|>",
    build="b1-toy",
    fingerprint="f",
)


def play(
    *texts: str,
    cached: int = 0,
    source: Source = "none",
    stop: StopType = "eos",
    word: str = "",
    pause: float | None = 0.0,
    probs: Sequence[float] = (),
) -> Callable[[Request], Script]:
    """A script that says ``texts``, one token each; ``pause`` lies before each but the first, which waits with the
    progress. ``probs`` are logprobs of every sampled token and of the candidates beside it."""

    def script(request: Request) -> Script:
        n_prompt = len(request.prompt)
        evaluated = n_prompt - cached
        if request.return_progress:
            yield Progress(n_prompt, cached, cached, 0.5, "ram" if cached else "none")
            yield Progress(n_prompt, cached, n_prompt, 2.0, "ram" if cached else "none")
        for index, text in enumerate(texts):
            if index and pause != 0.0:
                yield Pause(pause)
            token = text.encode()[0] if text else 120
            found = tuple((token + i, logprob) for i, logprob in enumerate(probs))
            yield Piece(text, (token,), (found,) if request.n_probs else ())
        n = len(texts) + (stop == "eos")
        report = RequestStats(n_prompt, source, cached, evaluated)
        yield Done(stop, word, Timings(cached, evaluated, 2.0, n, 3.0, 0.1, 2.5), report, seq=0)

    return script


def fail(error: Exception, *texts: str) -> Callable[[Request], Script]:
    """A script that says ``texts`` and then fails."""

    def script(request: Request) -> Script:
        yield from [Piece(text, (1,)) for text in texts]
        if texts:
            yield Pause(0.01)
        yield Failed(error)

    return script


class Client:
    """Sends single requests to an application, without a network."""

    def __init__(self, app: ASGIApp) -> None:
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return asyncio.run(self._request(method, path, **kwargs))

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, **kwargs)

    def options(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("OPTIONS", path, **kwargs)

    async def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=self._transport, base_url="http://server") as client:
            return await client.request(method, path, **kwargs)


class Bench:
    """An application with its worker and a client."""

    def __init__(
        self,
        script: Callable[[Request], Script],
        template: str = CHATML,
        settings: Settings | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.tokenizer: ByteTokenizer = chatml_tokenizer()
        self.worker = FakeWorker(script)
        chat = ChatFormat(Template(template, eos_token="<|im_end|>"), self.tokenizer, replay=replay)
        self.app: Starlette = create_app(self.worker, chat, self.tokenizer, settings or Settings())
        self.client = Client(self.app)

    def post(self, path: str, body: Any, **kwargs: Any) -> Any:
        """The response of a POST."""
        return self.client.post(path, json=body, **kwargs)

    def chat(self, **fields: Any) -> Any:
        """The body of a chat completion of one short message."""
        response = self.post("/v1/chat/completions", {"messages": HI, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, decoded; [DONE] stays a string."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream"
        return events(response.content)

    def chat_stream(self, **fields: Any) -> list[Any]:
        """The events of a chat completion of one short message."""
        return self.stream("/v1/chat/completions", {"messages": HI, **fields})


HI = [{"role": "user", "content": "Hi"}]


def events(body: bytes) -> list[Any]:
    """Server-sent events, decoded."""
    frames = [frame for frame in body.split(b"\n\n") if frame and frame != b":"]
    assert all(frame.startswith(b"data: ") for frame in frames)
    data = [frame.removeprefix(b"data: ") for frame in frames]
    return ["[DONE]" if item == b"[DONE]" else msgspec.json.decode(item) for item in data]


class FakeCache:
    """A cache with a head and one conversation on it."""

    def __init__(self) -> None:
        self.pinned: dict[str, bool] = {"100-aa": False, "150-bb": False}

    def view(self) -> Future[CacheView]:
        snapshots = tuple(
            SnapshotView(name, parent, n, 10, 20, 3, 1.5, 0.5, self.pinned[name], tuple(b"hello"))
            for name, parent, n in (("100-aa", "", 100), ("150-bb", "100-aa", 150))
        )
        totals = CacheStats(requests=7, hits={"live": 2, "ram": 3, "disk": 0})
        return done_future(CacheView(4, 3000, -1, 1, totals, snapshots))

    def pin(self, name: str, pinned: bool) -> Future[bool]:
        known = name in self.pinned
        if known:
            self.pinned[name] = pinned
        return done_future(known)

    def clear(self) -> Future[int]:
        return done_future(sum(not pinned for pinned in self.pinned.values()))


def done_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class FakeEngine:
    """An engine with some history, whose embedding of tokens is their sum and their count."""

    def __init__(self) -> None:
        self.last = EngineCounters()

    def stats(self) -> Future[EngineStats]:
        total = EngineCounters(
            10, 12, 90, n_cached=40, n_evaluated=60, prompt_ms=500.0, n_predicted=20, predicted_ms=250.0
        )
        recent = EngineCounters() if self.last.n_calls else total
        self.last = total
        return done_future(EngineStats(total, recent, 1, 2, FakeCache().view().result()))

    def embed(self, tokens: Tokens) -> Future[NDArray[np.float32]]:
        if tokens.size > 8:
            return failed_future(RequestError("input is too large to process"))
        return done_future(np.array([[float(tokens.sum()), float(tokens.size)]], np.float32))


class FakeSlots:
    """Two slots, the second of which serves a request; saving and restoring is noted."""

    def __init__(self, idle: bool = True) -> None:
        self.done: list[tuple[str, int, Path | None]] = []
        self.idle = idle

    def sequences(self) -> Future[tuple[SequenceView, ...]]:
        request = Request(Prompt.of(list(b"hello")), max_tokens=9)
        busy = SequenceView(1, N_CTX, True, 7, request, 8, 2, 3, 4, tuple(b"hello"), tuple(b"a\nb"))
        return done_future((SequenceView(0, N_CTX, not self.idle), busy))

    def save(self, seq: int, path: Path) -> Future[SequenceFile]:
        self.done.append(("save", seq, path))
        return done_future(SequenceFile(11, 222, 3.5))

    def restore(self, seq: int, path: Path) -> Future[SequenceFile]:
        self.done.append(("restore", seq, path))
        if seq == 1:
            return failed_future(RequestError("Unable to restore slot: no"))
        return done_future(SequenceFile(5, 6, 7.0))

    def erase(self, seq: int) -> Future[int]:
        self.done.append(("erase", seq, None))
        return done_future(4)


def failed_future(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
