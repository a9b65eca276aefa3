"""An application on a real worker, whose engine plays a script or runs on a backend without a
model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Source
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.images import ImageReader
from pyctl.chat.replay import Replay
from pyctl.chat.template import Template
from pyctl.chat.tokenizer import Tokenizer
from pyctl.disk.disk import Disk
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.backend import EngineInfo, ModelTemplates
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Event, Failed, Piece, Progress, Request, StopType, Timings
from pyctl.engine.worker import Worker, WorkerTimes
from pyctl.processes.process_memory import trim_heap
from pyctl.requests.reply_settings import ReplySettings
from pyctl.requests.request_pool import RequestPool
from pyctl.server.app import create_app
from pyctl.server.app_state import AppState, HttpService
from pyctl.server.models import Models
from pyctl.server.server_settings import ServerSettings
from tests.client import CHAT, HI, Client, events, named_events
from tests.fake import FakeBackend
from tests.unit.chat.toy import CHATML, chatml_tokenizer

N_CTX = 4096


@dataclass(frozen=True)
class Pause:
    """The next event comes after so many seconds; None: never."""

    seconds: float | None


@dataclass(frozen=True)
class Gate:
    """The next event comes when ``opened`` is set."""

    opened: threading.Event


Script = Iterable[Event | Pause | Gate]
Playing = tuple[RequestHandle, Iterator[Event | Pause | Gate], Callable[[], bool] | None]
"""A handle, the rest of its script, and whether that may go on: None for never."""


class ScriptedEngine(Engine):
    """Answers each request with ``script(request)``; what lies between two pauses comes without
    any.

    The last of ``handles`` is there before its script begins; ``begun`` are those whose script has
    come to a pause or its end.
    """

    def __init__(
        self, script: Callable[[Request], Script], backend: FakeBackend, cache: RamCache
    ) -> None:
        super().__init__(backend, cache, EngineSettings())
        self.script = script
        self.handles: list[RequestHandle] = []
        self.begun: set[RequestHandle] = set()
        self._playing: list[Playing] = []

    def submit(self, handle: RequestHandle) -> None:
        self.handles.append(handle)
        self._playing.append((handle, iter(self.script(handle.request)), lambda: True))

    def step(self) -> bool:
        self._playing = [left for each in self._playing if (left := self._play(each)) is not None]
        is_pending = any(may_go_on is not None for _, _, may_go_on in self._playing)
        if is_pending:
            time.sleep(0.0005)
        return is_pending

    def _play(self, playing: Playing) -> Playing | None:
        handle, script, may_go_on = playing
        if may_go_on is None or not may_go_on():
            return playing
        try:
            for event in script:
                if isinstance(event, Gate):
                    return handle, script, event.opened.is_set
                if isinstance(event, Pause):
                    return handle, script, _after(event.seconds)
                handle.put(event)
        finally:
            self.begun.add(handle)
        return None

    def close(self, reason: Exception) -> None:
        for handle, _, _ in self._playing:
            handle.put(Failed(reason))
        super().close(reason)


def _after(seconds: float | None) -> Callable[[], bool] | None:
    """Return a check whether ``seconds`` have passed since now; None without ``seconds``."""
    if seconds is None:
        return None
    due = time.monotonic() + seconds
    return lambda: time.monotonic() >= due


_WORKERS: list[Worker] = []


def close_workers() -> None:
    """End the threads of all workers that tests have made."""
    while _WORKERS:
        _WORKERS.pop().close()


class RecordingWorker(Worker):
    """Remembers what it was asked. What a script says before its first pause is there when `submit`
    returns.
    """

    def __init__(self, engine: Any, info: EngineInfo) -> None:
        self.handles: list[RequestHandle] = []
        self._begun: set[RequestHandle] | None = getattr(engine, "begun", None)
        # However long a test takes, nothing moves from the device for want of work.
        super().__init__(engine, info, times=WorkerTimes(copy=3600.0))
        _WORKERS.append(self)

    @property
    def requests(self) -> list[Request]:
        return [handle.request for handle in self.handles]

    def submit(self, request: Request) -> RequestHandle:
        handle = super().submit(request)
        self.handles.append(handle)
        while self._begun is not None and handle not in self._begun and not handle.is_over:
            time.sleep(0.0002)
        return handle


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
    templates=ModelTemplates(CHATML),
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
    """Return a script that sends ``texts``, one token each; ``pause`` lies before each but the
    first, which waits with the progress. ``probs`` are logprobs of every sampled token and of the
    candidates beside it.
    """

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
            n_probs = request.n_probs
            yield Piece(text, (token,), () if n_probs is None else (found[: 1 + n_probs],))
        n = len(texts) + (stop == "eos")
        report = RequestStats(n_prompt, source, cached, evaluated)
        yield Done(stop, word, Timings(cached, evaluated, 2.0, n, 3.0, 2.5), report, seq=0)

    return script


def fail(error: Exception, *texts: str) -> Callable[[Request], Script]:
    """Return a script that sends ``texts`` and then fails."""

    def script(request: Request) -> Script:
        yield from [Piece(text, (1,)) for text in texts]
        if texts:
            yield Pause(0.01)
        yield Failed(error)

    return script


class Bench:
    """An application with its worker and a client: on ``script``, or without one on a
    `FakeBackend`.
    """

    def __init__(
        self,
        script: Callable[[Request], Script] | None = None,
        template: str = CHATML,
        settings: ServerSettings | None = None,
        replay: Replay | None = None,
        *,
        replies: ReplySettings | None = None,
        tokenizer: Tokenizer | None = None,
        n_seqs: int = 1,
        n_slots: int = 4,
        disk: Disk | None = None,
        images: ImageReader | None = None,
        request_pool: RequestPool | None = None,
        **info: Any,
    ) -> None:
        """Make an application over ``script``, or over an engine with a fake backend. ``info``
        replaces facts about the model.
        """
        self.tokenizer: Any = tokenizer or chatml_tokenizer()
        known = replace(
            INFO, n_vocab=self.tokenizer.n_vocab, n_seqs=n_seqs, vision=images is not None, **info
        )
        backend = FakeBackend(n_ctx=N_CTX, n_seqs=n_seqs, n_vocab=known.n_vocab)
        cache = RamCache(n_slots, None)
        played = script is not None
        request_pool = request_pool or RequestPool(trim_heap)
        shared = AppState(settings or ServerSettings(), pool=request_pool)
        self.engine: Any = (
            ScriptedEngine(script, backend, cache)
            if played
            else Engine(backend, cache, EngineSettings(), disk)
        )
        self.engine.prefix_cache.saved_time = shared.saved.account(known.fingerprint)
        self.worker = RecordingWorker(self.engine, known)
        chat = ChatFormat(
            Template(template, eos_token="<|im_end|>"), self.tokenizer, replay=replay, images=images
        )
        admin = EngineAdmin(self.worker, self.engine)
        replies = replies or ReplySettings()
        # A script has no answer to a background request.
        replies = replace(replies, warm_next=replies.warm_next and not played)
        self.service = HttpService(self.worker, chat, replies, shared, admin=admin)
        self.app = create_app(Models.from_service(self.service))
        self.client = Client.to_app(self.app)

    def post(self, path: str, body: Any, **kwargs: Any) -> Any:
        """Send a POST and return its response."""
        return self.client.post(path, body, **kwargs)

    def stream(self, path: str, body: Any) -> list[Any]:
        """Return the events of a stream, decoded; [DONE] stays a string."""
        return events(self.client.stream(path, body))

    def chat(self, **fields: Any) -> Any:
        """Return the body of a chat completion of one short message."""
        return self.client.chat(**{"messages": HI, **fields}).body

    def chat_stream(self, **fields: Any) -> list[Any]:
        """Return the events of a chat completion of one short message."""
        return self.stream(CHAT, {"messages": HI, **fields})

    def message(self, **fields: Any) -> Any:
        """Return the message that answers one short message in Anthropic's API."""
        return self.client.post_json("/v1/messages", {"messages": HI, **fields})

    def message_stream(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a message in Anthropic's API."""
        return named_events(self.client.stream("/v1/messages", {"messages": HI, **fields}))

    def response(self, given: Any = "Hi", **fields: Any) -> Any:
        """Return the response of OpenAI's Responses API to ``given``."""
        return self.client.post_json("/v1/responses", {"input": given, **fields})

    def response_stream(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a response to one short text, which are numbered."""
        found = named_events(self.client.stream("/v1/responses", {"input": "Hi", **fields}))
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        return found
