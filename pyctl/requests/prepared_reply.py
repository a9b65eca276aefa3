"""Replies that a request gets: each the engine's request, with the data of its form."""

from __future__ import annotations

import msgspec

from pyctl.chat.chat_format import PreparedChat
from pyctl.chat.reply import ReplySplitter
from pyctl.engine.request import Request
from pyctl.requests.reply_options import ReplyOptions

__all__ = ["PreparedReply"]


class PreparedReply(msgspec.Struct, frozen=True):
    """A reply to prepare.

    Attributes:
        request: The engine's request.
        options: The form of the reply that the client requested.
        prompt_text: The prompt as text.
        splitter: The splitter of the reply into its parts; of the reply to a raw prompt, everything
            is content.
        index: The number of the reply within its request.
        chat: The conversation that the reply continues, None for a raw prompt.
        has_prediction: Whether the client predicted the reply; then the usage counts the accepted
            and the rejected drafts from it.
    """

    request: Request
    options: ReplyOptions
    prompt_text: str
    splitter: ReplySplitter
    index: int = 0
    chat: PreparedChat | None = None
    has_prediction: bool = False
