"""Where replies come from, as the terminal sees it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyctl.chat.reply import CallDelta

__all__ = ["ChatBackend", "ChatDelta", "ReplyStats"]


@dataclass(frozen=True)
class ReplyStats:
    """Numbers of one reply, in tokens, milliseconds and tokens per second; None where they are not known.

    Of ``n_drafted`` tokens of drafts the reply has ``n_accepted``. ``streamed_bytes`` of K and V were read from RAM,
    and ``selected_chunks`` are what its tokens attended to instead of everything.
    ``source`` says where the cached tokens came from, empty when unknown; ``truncated`` that the reply met a limit.
    """

    n_cached: int | None = None
    n_evaluated: int | None = None
    n_predicted: int | None = None
    first_token_ms: float | None = None
    tokens_per_second: float | None = None
    source: str = ""
    truncated: bool = False
    n_drafted: int | None = None
    n_accepted: int | None = None
    streamed_bytes: int | None = None
    selected_chunks: int | None = None


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
        """The name of the model, for people. Raises PyctlError when it cannot be reached."""

    def stream(self, messages: Sequence[Mapping[str, Any]]) -> Generator[ChatDelta, None, None]:
        """The reply to ``messages`` (OpenAI's form). Closing the generator stops the work; raises PyctlError."""
