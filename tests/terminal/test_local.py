from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.template import Template
from pyctl.engine.backend import EngineInfo
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Event, Failed, Piece, Progress, Request, Timings
from pyctl.engine.sampling import Sampling
from pyctl.errors import ContextSizeError, EngineError, UnavailableError
from pyctl.terminal.chat_backend import ChatDelta, LocalBackend

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}"""
SPECIAL = {"<|im_start|>": 256, "<|im_end|>": 257}
DONE = Done("eos", "", Timings(12, 34, 5.0, 10, 250.0, 0.0, 42.0), RequestStats(46, source="ram"), 0)


class ByteTokenizer:
    """One token a byte, and the special ones."""

    bos, eos, add_bos = -1, 257, False

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        parts = re.split("(<.im_start.>|<.im_end.>)", text) if parse_special else [text]
        return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else part.encode())]

    def detokenize(self, tokens: Sequence[int], *, special: bool = True) -> bytes:
        return b"".join(self.piece(token) for token in tokens)

    def piece(self, token: int, *, special: bool = True) -> bytes:
        return {256: b"<|im_start|>", 257: b"<|im_end|>"}.get(token, b"") or bytes([token])

    def special_tokens(self) -> dict[str, int]:
        return SPECIAL


class Worker:
    """Answers every request with the same events."""

    info = EngineInfo("/m.gguf", "Tiny", "", "qwen35", "F16", 64, 64, 1, 258, 8, 9, 10, TEMPLATE, "", "", "b1", "f")

    def __init__(self, *events: Event) -> None:
        self.events = events
        self.handles: list[RequestHandle] = []

    def submit(self, request: Request) -> RequestHandle:
        if len(request.prompt) >= 500:
            raise ContextSizeError(len(request.prompt), 500)
        handle = RequestHandle(request)
        for event in self.events:
            handle.put(event)
        self.handles.append(handle)
        return handle


def piece(text: str) -> Piece:
    return Piece(text, (1,))


def backend_of(worker: Worker, **options: bool) -> LocalBackend:
    chat_format = ChatFormat(Template(TEMPLATE), ByteTokenizer())
    return LocalBackend(worker, chat_format, Sampling(seed=1), 100, **options)


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_the_request_holds_the_rendered_messages() -> None:
    worker = Worker(DONE)
    list(backend_of(worker, cache_prompt=False).stream(MESSAGES))
    request = worker.handles[0].request
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert ByteTokenizer().detokenize([int(token) for token in request.prompt.tokens]).decode() == text
    assert [int(request.prompt.tokens[at]) for at in request.prompt.boundaries] == [SPECIAL["<|im_start|>"]]
    assert (request.sampling.seed, request.max_tokens, request.cache_prompt) == (1, 100, False)


def test_reasoning_is_told_apart_from_content() -> None:
    worker = Worker(
        Progress(46, 12, 46, 1.0, "live"), piece("I th"), piece("ink</thi"), piece("nk>\n\nYes"), piece("."), DONE
    )
    deltas = list(backend_of(worker).stream(MESSAGES))
    assert "".join(delta.reasoning for delta in deltas) == "I think"
    assert "".join(delta.content for delta in deltas) == "Yes."
    plain = list(backend_of(Worker(*worker.events), split=False).stream(MESSAGES))
    assert "".join(delta.content for delta in plain) == "I think</think>\n\nYes."


def test_the_last_delta_has_the_numbers() -> None:
    *_, last = backend_of(Worker(piece("a"), DONE)).stream(MESSAGES)
    stats = last.stats
    assert stats is not None
    assert (stats.n_cached, stats.n_evaluated, stats.n_predicted, stats.source) == (12, 34, 10, "ram")
    assert (stats.first_token_ms, stats.tokens_per_second, stats.truncated) == (42.0, 40.0, False)


def test_closing_cancels_the_work() -> None:
    worker = Worker(piece("a</think>b"))
    stream = backend_of(worker).stream(MESSAGES)
    assert next(stream) == ChatDelta("a", "b")
    assert not worker.handles[0].cancelled
    stream.close()
    assert worker.handles[0].cancelled


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UnavailableError("shutting down"), UnavailableError, "shutting down"),
        (MemoryError(), EngineError, "MemoryError"),
        (ValueError("odd"), EngineError, "odd"),
    ],
)
def test_failures_are_our_own_errors(error: Exception, kind: type[Exception], text: str) -> None:
    worker = Worker(piece("a"), Failed(error))
    with pytest.raises(kind, match=text):
        list(backend_of(worker).stream(MESSAGES))
    assert worker.handles[0].cancelled


def test_a_prompt_that_does_not_fit() -> None:
    with pytest.raises(ContextSizeError):
        list(backend_of(Worker()).stream([{"role": "user", "content": "x" * 500}]))


def test_name() -> None:
    assert backend_of(Worker()).name() == "Tiny"
