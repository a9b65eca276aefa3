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

from pyctl.chat.cached_tokenizer import Tokenizer
from pyctl.chat.json_object import JsonDict, JsonObjects
from pyctl.chat.template import (
    SAMPLE_CALL_ID,
    SAMPLE_TOOL,
    Template,
    TemplateCapabilities,
    sample_call,
    sample_message,
)
from pyctl.errors import RequestError
from pyctl.prompt import ImageSpan, Prompt, Tokens
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
        self._tokenizer = tokenizer
        self._assistant = _assistant_start(template, tokenizer, self.ids)
        self._result = _result_start(template, tokenizer, self.ids)
        self.call_end = _call_end(
            template, tokenizer, self.ids, {token: text for text, token in specials.items()}
        )

    def prompt(self, tokens: Tokens, pictures: Sequence[ImageSpan]) -> Prompt:
        """Return the prompt of ``tokens``, with every place at which something starts or ends."""
        begins = boundaries(tokens, self.ids)
        replies = headers(tokens, begins, self._assistant)
        turn = last_turn(tokens, begins, replies or (), self._result)
        is_chat = tokens.size and int(tokens[0]) in self.ids
        lines = (
            () if is_chat else _line_ends(tokens[: begins[0] if begins else None], self._tokenizer)
        )
        return Prompt(tokens, begins, replies, turn, tuple(pictures), lines)


def boundaries(tokens: Tokens, starts: Sequence[int]) -> tuple[int, ...]:
    """Return the token counts at which a message starts, ascending: the indices above 0 of
    ``starts`` in ``tokens``.
    """
    if not starts:
        return ()
    here = tokens == starts[0] if len(starts) == 1 else np.isin(tokens, starts)
    return tuple(int(index) for index in np.flatnonzero(here) if index)


def headers(
    tokens: Tokens, boundaries: Sequence[int], start: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the ``boundaries`` at which the assistant starts, with the tokens ``start``; None
    without any such tokens.

    One whose tokens are not all there is none yet: what starts there shows when they are.
    """
    if not start:
        return None
    inside = np.array([at for at in boundaries if at + len(start) <= tokens.size], np.int64)
    same = (
        (tokens[inside[:, None] + np.arange(len(start))] == np.array(start)).all(axis=1)
        if inside.size
        else inside
    )
    return tuple(inside[same == 1].tolist())


def last_turn(
    tokens: Tokens, boundaries: Sequence[int], headers: Sequence[int], result: Sequence[int]
) -> int:
    """Return the last of ``headers`` that follows no result of a tool, which starts with the tokens
    ``result``; 0 without one.

    So far a history stays as it is when the user speaks again: many templates strip the reasoning
    after it then.
    """
    for header in reversed(headers):
        before = bisect.bisect_left(boundaries, header)
        begins = boundaries[before - 1] if before else 0
        if not result or tuple(tokens[begins : begins + len(result)].tolist()) != tuple(result):
            return header
    return 0


def _line_ends(tokens: Tokens, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token counts at which a line ends, ascending; no line ends at a token of an
    image.
    """
    ends = [
        token
        for token in np.unique(tokens[tokens >= 0]).tolist()
        if tokenizer.piece(token).endswith(b"\n")
    ]
    return tuple((np.flatnonzero(np.isin(tokens, ends)) + 1).tolist())


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
    gaps = _Gaps(
        template, tokenizer, {token for text, token in specials.items() if text.strip()}, inside
    )
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
    roles = zip(("user", "assistant", "user"), _MARKS, strict=False)
    said = [sample_message(role, mark, as_text=template.capabilities.text) for role, mark in roles]
    header, message, user, first = (
        gaps.last_start(*where)
        for where in ((said[:1], 1, True), (said, 1), (said, 2), (said[:1], 0))
    )
    common = header[: n_common(header, message)]
    return common if all(other[: len(common)] != common for other in (user, first)) else ()


def _result_start(
    template: Template, tokenizer: Tokenizer, starts: Sequence[int]
) -> tuple[int, ...]:
    """Return the tokens with which a message with the result of a tool starts, and no message of
    the user does; else empty.
    """
    gaps = _Gaps(template, tokenizer, starts)
    said, called, result = _samples(template.capabilities)
    begins = gaps.last_start([*called, result], 2)
    user = gaps.last_start(said, 2)
    return begins if template.capabilities.tool_calls and user[: len(begins)] != begins else ()


def _call_end(
    template: Template, tokenizer: Tokenizer, starts: Sequence[int], specials: Mapping[int, str]
) -> str:
    """Return the special token between a call and the token that starts its result; empty if there
    is none.
    """
    _, called, result = _samples(template.capabilities)
    found = _Gaps(template, tokenizer, specials).specials([*called, result], 2) or []
    at = next((at for at, token in enumerate(found) if token in starts), 0)
    return specials[found[at - 1]] if at and template.capabilities.tool_calls else ""


def _samples(
    capabilities: TemplateCapabilities,
) -> tuple[list[JsonDict], list[JsonDict], JsonDict]:
    """Return three messages, two that end with a call, and the result of that."""
    text = capabilities.text
    as_object = capabilities.object_arguments
    roles = zip(("user", "assistant", "user", "tool"), (*_MARKS[:3], _MARKS[2]), strict=True)
    *said, result = (sample_message(role, mark, as_text=text) for role, mark in roles)
    called = [said[0], sample_call({"sample": _MARKS[1]}, as_text=text, as_object=as_object)]
    return said, called, result | {"tool_call_id": SAMPLE_CALL_ID, "name": SAMPLE_TOOL}


def _starts(gaps: _Gaps, capabilities: TemplateCapabilities) -> list[int | None]:
    said, called, result = _samples(capabilities)
    found = [
        gaps.first(said[:1]),
        gaps.start(said[:1], said[:1], 1, header=True),
        gaps.start(said[:2], said, 2),
    ]
    if capabilities.tool_calls:
        found.append(gaps.start(called, [*called, result], 2))
    return found


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
        if before[:1] == [self._tokenizer.bos] and len(before) > 1:
            before = before[1:]
        return before[0] if before else None

    def last_start(self, messages: JsonObjects, gap: int, header: bool = False) -> tuple[int, ...]:
        """Return the tokens before mark ``gap``, or after the last mark, from the last special
        token on that starts a message. Tokens that depend on the text of the message are left out.
        """
        text = self._text(messages, gap, header) or ""
        tokens, *others = (self._tokenizer.tokenize(text + said) for said in _TEXTS)
        tokens = tokens[: min(n_common(tokens, other) for other in others)]
        while tokens and not self._tokenizer.piece(tokens[-1]).strip():
            tokens.pop()
        at = max(
            (i for i, token in enumerate(tokens) if token in self._specials), default=len(tokens)
        )
        return tuple(tokens[at:])

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
        edges = [0]
        for mark in _MARKS[: len(messages)]:
            at = text.find(mark, edges[-1])
            if at < 0:
                return None
            edges += [at, at + len(mark)]
        edges.append(len(text))
        return text[edges[2 * gap] : edges[2 * gap + 1]]

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
        if len(ends) > 1 and ends[-1] == self._tokenizer.eos and between[: len(ends)] != ends:
            ends.pop()  # some templates write EOS when nothing follows
        if between[: len(ends)] != ends or len(between) == len(ends):
            return None
        return between[len(ends)]
