"""Starts of messages in a prompt: the tokens with which the chat template starts a message.

Every occurrence of such a token, from index 1 on, is a boundary. So boundaries depend on the tokens
before them and on nothing else, also in raw text, without a system message, and when a user pastes
a marker (one more boundary then). In raw text, before the first of them, lines are all there is to
go by.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Collection, Mapping, Sequence
from string import punctuation

import numpy as np

from pyctl.chat.json_object import JsonDict, JsonObjects
from pyctl.chat.template import (
    SAMPLE_CALL_ID,
    SAMPLE_TOOL,
    Template,
    TemplateCapabilities,
    sample_call,
    sample_message,
)
from pyctl.chat.tokenizer import Tokenizer
from pyctl.errors import RequestError
from pyctl.prompt import ImageSpan, Prompt, PromptSections, Tokens
from pyctl.text import n_common

__all__ = ["MessageStarts", "boundaries", "headers", "last_turn", "message_starts"]

log = logging.getLogger(__name__)

_MARKS = tuple(f"pyctlsample{letter}" for letter in "abcd")

_TEXTS = "x", " x", "\n", "\n\n", *punctuation
"""First characters of a message, with which a tokenizer may join the end of the text before it."""


class MessageStarts:
    """The tokens with which ``template`` starts messages, and where they stand in a prompt; ``ids``
    start any message.

    ``specials`` are the tokenizer's special tokens; the text of one is ``call_end``, with which a
    message that calls a tool ends, empty if unknown. ``inside`` are texts within messages, such as
    the tags of reasoning.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        specials: Mapping[str, int],
        inside: Sequence[str] = (),
    ) -> None:
        self.ids = message_starts(template, tokenizer, specials, inside)
        self._assistant = _assistant_start(template, tokenizer, self.ids)
        self._result = _result_start(template, tokenizer, self.ids)
        texts = {token: text for text, token in specials.items()}
        self.call_end = _call_end(template, tokenizer, self.ids, texts)

    def prompt(
        self,
        tokens: Tokens,
        pictures: Sequence[ImageSpan],
        sections: PromptSections | None = None,
    ) -> Prompt:
        """Return the prompt of ``tokens``, with every place at which something starts or ends;
        ``sections`` are those of the request that it was rendered from.
        """
        starts = boundaries(tokens, self.ids)
        replies = headers(tokens, starts, self._assistant)
        turn = last_turn(tokens, starts, replies or (), self._result)
        is_chat = tokens.size and int(tokens[0]) in self.ids
        n_raw = 0
        if not is_chat:
            n_raw = starts[0] if starts else int(tokens.size)
        return Prompt(
            tokens=tokens,
            boundaries=starts,
            headers=replies,
            turn=turn,
            pictures=tuple(pictures),
            n_raw=n_raw,
            sections=sections,
        )


def boundaries(tokens: Tokens, starts: Sequence[int]) -> tuple[int, ...]:
    """Return the token counts at which a message starts, ascending: the indices above 0 of
    ``starts`` in ``tokens``.
    """
    if not starts:
        return ()
    is_start = tokens == starts[0] if len(starts) == 1 else np.isin(tokens, starts)
    return tuple(int(index) for index in np.flatnonzero(is_start) if index)


def headers(
    tokens: Tokens, boundaries: Sequence[int], start: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the ``boundaries`` at which the assistant starts, with the tokens ``start``; None
    without any such tokens.

    One whose tokens are not all there is none yet: its special token is known once they are.
    """
    if not start:
        return None
    last = tokens.size - len(start)
    positions = np.array([position for position in boundaries if position <= last], np.int64)
    if not positions.size:
        return ()
    offsets = np.arange(len(start))
    first_tokens = tokens[positions[:, None] + offsets]  # (n, len(start))
    is_header = (first_tokens == np.array(start)).all(axis=1)
    return tuple(positions[is_header].tolist())


def last_turn(
    tokens: Tokens,
    boundaries: Sequence[int],
    headers: Sequence[int],
    result: Sequence[int],
) -> int:
    """Return the last of ``headers`` that follows no result of a tool, which starts with the tokens
    ``result``; 0 without one.

    So far a history stays as it is when the user speaks again: many templates strip the reasoning
    after it then.
    """
    for header in reversed(headers):
        index = bisect.bisect_left(boundaries, header)
        previous = boundaries[index - 1] if index else 0
        first_tokens = tokens[previous : previous + len(result)].tolist()
        if not result or first_tokens != list(result):
            return header
    return 0


def message_starts(
    template: Template,
    tokenizer: Tokenizer,
    specials: Mapping[str, int],
    inside: Sequence[str] = (),
) -> tuple[int, ...]:
    """Return the ids of the special tokens that start a message, ascending; none for a template
    that starts them with plain text.

    Found by comparing renderings: between two messages stand the special tokens that end the first,
    which is what also stands there when no message follows, and then the one that starts the
    second. Texts ``inside`` messages start none.
    """
    visible = {token for text, token in specials.items() if text.strip()}
    gaps = _Gaps(template, tokenizer, visible, inside)
    starts = {start for start in _starts(gaps, template.capabilities) if start is not None}
    if not starts:
        log.warning(
            "chat template: no special token starts a message, so prompts have no message "
            "boundaries"
        )
    return tuple(sorted(starts))


def _assistant_start(
    template: Template, tokenizer: Tokenizer, starts: Sequence[int]
) -> tuple[int, ...]:
    """Return the tokens with which a generation header and a message of the assistant start, and no
    other message does.

    Empty where the template has no such header, or all its messages start alike.
    """
    gaps = _Gaps(template, tokenizer, starts)
    as_text = template.capabilities.text
    first = sample_message("user", _MARKS[0], as_text=as_text)
    reply = sample_message("assistant", _MARKS[1], as_text=as_text)
    second = sample_message("user", _MARKS[2], as_text=as_text)
    header = gaps.last_start([first], 1, header=True)
    reply_start = gaps.last_start([first, reply, second], 1)
    common = header[: n_common(header, reply_start)]
    for user_start in (
        gaps.last_start([first, reply, second], 2),
        gaps.last_start([first], 0),
    ):
        if user_start[: len(common)] == common:
            return ()
    return common


def _result_start(
    template: Template, tokenizer: Tokenizer, starts: Sequence[int]
) -> tuple[int, ...]:
    """Return the tokens with which a message with the result of a tool starts, and no message of
    the user does; else empty.
    """
    gaps = _Gaps(template, tokenizer, starts)
    if not template.capabilities.tool_calls:
        return ()
    messages, called, result = _samples(template.capabilities)
    result_start = gaps.last_start([*called, result], 2)
    user_start = gaps.last_start(messages, 2)
    if user_start[: len(result_start)] == result_start:
        return ()
    return result_start


def _call_end(
    template: Template,
    tokenizer: Tokenizer,
    starts: Sequence[int],
    specials: Mapping[int, str],
) -> str:
    """Return the special token between a call and the token that starts its result; empty if there
    is none.
    """
    if not template.capabilities.tool_calls:
        return ""
    _, called, result = _samples(template.capabilities)
    gaps = _Gaps(template, tokenizer, specials)
    before = None
    for token in gaps.specials([*called, result], 2) or ():
        if token in starts:
            return "" if before is None else specials[before]
        before = token
    return ""


def _samples(
    capabilities: TemplateCapabilities,
) -> tuple[list[JsonDict], list[JsonDict], JsonDict]:
    """Return three messages, two that end with a call, and the result of that."""
    as_text = capabilities.text
    messages = [
        sample_message("user", _MARKS[0], as_text=as_text),
        sample_message("assistant", _MARKS[1], as_text=as_text),
        sample_message("user", _MARKS[2], as_text=as_text),
    ]
    call = sample_call(
        {"sample": _MARKS[1]}, as_text=as_text, as_object=capabilities.object_arguments
    )
    result = sample_message("tool", _MARKS[2], as_text=as_text)
    result["tool_call_id"] = SAMPLE_CALL_ID
    result["name"] = SAMPLE_TOOL
    return messages, [messages[0], call], result


def _starts(gaps: _Gaps, capabilities: TemplateCapabilities) -> list[int | None]:
    messages, called, result = _samples(capabilities)
    starts = [
        gaps.first(messages[:1]),
        gaps.start(messages[:1], messages[:1], 1, header=True),
        gaps.start(messages[:2], messages, 2),
    ]
    if capabilities.tool_calls:
        starts.append(gaps.start(called, [*called, result], 2))
    return starts


class _Gaps:
    """The special tokens between the marks of a rendered sample."""

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        specials: Collection[int],
        inside: Sequence[str] = (),
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._specials = specials
        self._inside = inside

    def first(self, messages: JsonObjects) -> int | None:
        """Return the token that starts the first message."""
        before = self.specials(messages, 0) or []
        if len(before) > 1 and before[0] == self._tokenizer.bos:
            return before[1]
        return before[0] if before else None

    def last_start(self, messages: JsonObjects, gap: int, header: bool = False) -> tuple[int, ...]:
        """Return the tokens before mark ``gap``, or after the last mark, from the last special
        token on that starts a message. Tokens that depend on the text of the message are left out.
        """
        text = self._text(messages, gap, header) or ""
        tokens, *others = (self._tokenizer.tokenize(text + beginning) for beginning in _TEXTS)
        n_certain = min(n_common(tokens, other) for other in others)
        tokens = tokens[:n_certain]
        while tokens and not self._tokenizer.piece(tokens[-1]).strip():
            tokens.pop()
        for index in reversed(range(len(tokens))):
            if tokens[index] in self._specials:
                return tuple(tokens[index:])
        return ()

    def specials(self, messages: JsonObjects, gap: int, header: bool = False) -> list[int] | None:
        """Return the special tokens before mark ``gap``, or after the last mark if that is its
        number; None if a mark is missing.
        """
        text = self._text(messages, gap, header)
        if text is None:
            return None
        for inside in self._inside:
            text = text.replace(inside, "")
        return [token for token in self._tokenizer.tokenize(text) if token in self._specials]

    def _text(self, messages: JsonObjects, gap: int, header: bool) -> str | None:
        try:
            text = self._template.render(messages, add_generation_prompt=header)
        except RequestError:
            return None
        gaps = []
        start = 0
        for mark in _MARKS[: len(messages)]:
            end = text.find(mark, start)
            if end < 0:
                return None
            gaps.append(text[start:end])
            start = end + len(mark)
        gaps.append(text[start:])
        return gaps[gap]

    def start(
        self,
        before: JsonObjects,
        after: JsonObjects,
        gap: int,
        header: bool = False,
    ) -> int | None:
        """Return the token in ``gap`` of ``after`` that starts the part that ``before`` does not
        have yet.
        """
        ends = self.specials(before, gap)
        between = self.specials(after, gap, header)
        if ends is None or between is None:
            return None
        starts_alike = between[: len(ends)] == ends
        if not starts_alike and len(ends) > 1 and ends[-1] == self._tokenizer.eos:
            ends.pop()  # some templates write EOS when nothing follows
            starts_alike = between[: len(ends)] == ends
        if not starts_alike or len(between) == len(ends):
            return None
        return between[len(ends)]
