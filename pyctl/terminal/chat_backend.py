"""Where replies come from, as the terminal sees it, and the model in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.reasoning import CallDelta
from pyctl.engine.backend import EngineInfo
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece, Request
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, PyctlError

__all__ = ["ChatBackend", "ChatDelta", "LocalBackend", "ReplyStats", "Submitter"]


@dataclass(frozen=True)
class ReplyStats:
    """Numbers of one reply, in tokens, milliseconds and tokens per second; None where they are not known.

    ``source`` says where the cached tokens came from, empty when nobody said; ``truncated`` that the reply met a limit.
    """

    n_cached: int | None = None
    n_evaluated: int | None = None
    n_predicted: int | None = None
    first_token_ms: float | None = None
    tokens_per_second: float | None = None
    source: str = ""
    truncated: bool = False


@dataclass(frozen=True)
class ChatDelta:
    """The next bit of a reply; the last one carries ``stats``."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    stats: ReplyStats | None = None

    @property
    def says(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.reasoning or self.content or self.calls)


class ChatBackend(Protocol):
    """Anything that continues a conversation. Used from one thread."""

    def name(self) -> str:
        """What answers, for people to read. Raises PyctlError when it cannot be reached."""

    def stream(self, messages: Sequence[Mapping[str, Any]]) -> Generator[ChatDelta, None, None]:
        """The reply to ``messages`` (OpenAI's form). Closing the generator stops the work; raises PyctlError."""


class Submitter(Protocol):
    """The side of the engine's worker that a chat needs."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the model."""

    def submit(self, request: Request) -> RequestHandle:
        """Queue ``request``; the handle yields its events."""


class LocalBackend:
    """A chat with ``worker``; ``max_tokens`` -1 means until the context is full.

    ``split`` False leaves the reasoning in the content, with its tags.
    """

    def __init__(
        self,
        worker: Submitter,
        chat_format: ChatFormat,
        sampling: Sampling | None = None,
        max_tokens: int = -1,
        *,
        cache_prompt: bool = True,
        split: bool = True,
    ) -> None:
        self._worker = worker
        self._format = chat_format
        self._sampling = sampling or Sampling()
        self._max_tokens = max_tokens
        self._cache_prompt = cache_prompt
        self._split = split

    def name(self) -> str:
        """The model's name."""
        return self._worker.info.model_alias or self._worker.info.model_name

    def stream(self, messages: Sequence[Mapping[str, Any]]) -> Generator[ChatDelta, None, None]:
        """The model's reply; closing the generator, or Ctrl-C within, stops the work at the next batch end or token."""
        turn = self._format.turn(list(messages))
        splitter = self._format.splitter(turn, "auto" if self._split else "none")
        handle = self._worker.submit(
            Request(
                self._format.prompt_of(turn),
                self._sampling,
                self._max_tokens,
                cache_prompt=self._cache_prompt,
            )
        )
        try:
            for event in handle:
                if isinstance(event, Piece):
                    said = splitter.feed(event.text, event.tokens)
                    yield ChatDelta(said.reasoning, said.content, said.calls)
                elif isinstance(event, Done):
                    said = splitter.finish()
                    yield ChatDelta(said.reasoning, said.content, said.calls, _stats(event))
                elif isinstance(event, Failed):
                    if isinstance(event.error, PyctlError):
                        raise event.error
                    raise EngineError(str(event.error) or type(event.error).__name__) from event.error
        finally:
            handle.cancel()


def _stats(done: Done) -> ReplyStats:
    timings = done.timings
    return ReplyStats(
        n_cached=timings.n_cached,
        n_evaluated=timings.n_evaluated,
        n_predicted=timings.n_predicted,
        first_token_ms=timings.first_token_ms,
        tokens_per_second=1000.0 * timings.n_predicted / timings.predicted_ms if timings.predicted_ms > 0.0 else None,
        source=done.stats.source,
        truncated=done.stop_type == "limit",
    )
