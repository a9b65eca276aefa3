"""The kinds of requests, for the log, /cache, spans and recorded sessions."""

from __future__ import annotations

from enum import Enum

__all__ = ["RequestKind", "kind_of_request"]


class RequestKind(Enum):
    """The way in which a request follows from earlier ones.

    An append continues an earlier prompt; a rewrite changes an earlier prompt of its conversation.
    The others open a conversation: a sub-agent has other tools or another system message than the
    active conversation; a side request, such as one for a title, has no tools either.
    """

    FIRST = "first"
    SUB_AGENT = "sub-agent"
    SIDE_REQUEST = "side request"
    APPEND = "append"
    REWRITE = "rewrite"


def kind_of_request(
    *, is_continued: bool, is_same_conversation: bool, is_main: bool, has_tools: bool
) -> RequestKind:
    """Return the kind of a request.

    Args:
        is_continued: Whether it has all of an earlier prompt.
        is_same_conversation: Whether it belongs to the conversation of an earlier prompt.
        is_main: Whether the conversation that it may open is the client's main one.
        has_tools: Whether it has tools.
    """
    if is_continued:
        return RequestKind.APPEND
    if is_same_conversation:
        return RequestKind.REWRITE
    if is_main:
        return RequestKind.FIRST
    return RequestKind.SUB_AGENT if has_tools else RequestKind.SIDE_REQUEST
