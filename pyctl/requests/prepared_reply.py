"""Replies that a request gets: each the engine's request, with what its form needs."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.chat.chat_format import PreparedChat
from pyctl.chat.reply import ReplySplitter
from pyctl.engine.request import Request
from pyctl.requests.body import ReplyOptions

__all__ = ["PreparedReply"]


@dataclass(frozen=True)
class PreparedReply:
    """A reply to prepare: number ``index`` of a request, with the engine's request, the client's
    format, and the prompt as text.

    ``splitter`` takes the reply apart; of a raw prompt's, everything is content. ``chat`` is the
    conversation that the reply continues, None for a raw prompt.
    """

    request: Request
    options: ReplyOptions
    prompt_text: str
    splitter: ReplySplitter
    index: int = 0
    chat: PreparedChat | None = None
