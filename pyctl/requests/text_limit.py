"""The maximum length of a text, checked before it is tokenised as a whole."""

from __future__ import annotations

from pyctl.chat.tokenizer import Tokenizer
from pyctl.errors import ContextSizeError, RequestError
from pyctl.settings.limit import limit

__all__ = ["CHARS_PER_TOKEN", "MAX_CHARS", "check_chars", "check_fits"]

CHARS_PER_TOKEN = 8
"""Texts of more characters than this times the context hardly ever fit."""

MAX_CHARS = limit(
    2**20,
    "a text to tokenise; or 8 characters for each token of the context",
    "400",
    "request",
    "characters",
)


def check_chars(text: str, n_ctx: int) -> None:
    """Raise RequestError for a text that takes much memory to tokenise, though it cannot get a
    reply.
    """
    maximum = max(MAX_CHARS, CHARS_PER_TOKEN * n_ctx)
    if len(text) > maximum:
        raise RequestError(
            f"a text of {len(text)} characters is too long: at most {maximum} are allowed"
        )


def check_fits(text: str, tokenizer: Tokenizer, n_ctx: int) -> None:
    """Raise ContextSizeError if the beginning of ``text`` alone exceeds a context of ``n_ctx``
    tokens.

    To tokenise all of some megabytes only to refuse it would take seconds. Where a text is cut, a
    few tokens more may come out than of the whole: hence the margin.
    """
    n_chars = CHARS_PER_TOKEN * n_ctx
    if len(text) <= n_chars:
        return
    n_tokens = len(tokenizer.tokenize(text[:n_chars], add_special=False, parse_special=True))
    margin = n_ctx // 8
    if n_tokens > n_ctx + margin:
        raise ContextSizeError(n_tokens, n_ctx)
