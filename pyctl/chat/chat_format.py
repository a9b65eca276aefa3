"""A model's way of writing conversations: a chat request becomes a prompt, a constraint of the
reply, and the way back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, TypeAlias

import numpy as np

from pyctl.chat.cached_tokenizer import CachedTokenizer
from pyctl.chat.call_formats.bare_call import BareCallParser
from pyctl.chat.constraint import Constraint, reply_constraint
from pyctl.chat.dialect import Dialect
from pyctl.chat.images import ImageReader, split_marked, split_marker, with_media_markers
from pyctl.chat.json_object import JsonDict, JsonObject
from pyctl.chat.messages import unreadable
from pyctl.chat.reasoning import ReasoningLimit
from pyctl.chat.rendering import Continue, RenderedChat
from pyctl.chat.replay import Replay
from pyctl.chat.reply import (
    ParsedReply,
    ReasoningSplitter,
    ReplyDelta,
    ReplyPart,
    ReplySplitter,
    reasoning_limit,
)
from pyctl.chat.template import Template, TemplateCapabilities
from pyctl.chat.tokenizer import Tokenizer
from pyctl.chat.tool_definitions import Tools, read_tools, template_tools
from pyctl.errors import RequestError
from pyctl.files.image_file import ImageFile
from pyctl.prompt import ImageSpan, Prompt, Tokens, as_tokens, common_prefix

__all__ = ["ChatFormat", "ChatRequest", "PreparedChat", "ReasoningFormat"]

ReasoningFormat: TypeAlias = Literal["auto", "deepseek", "none"]
"""``none`` leaves the reasoning in the content, with its tags; the others take it out."""

_NEXT_TEXTS = "0", "x"
"""Two beginnings of the next message that have nothing in common."""


@dataclass(frozen=True)
class ChatRequest:
    """A chat request. ``messages``, ``tools`` and ``tool_choice`` are as it sent them, in OpenAI's
    form. ``callable_tools`` are the tools that the reply may call, None for all that the template
    shows.

    ``template_kwargs`` are variables of the template. With ``continue_final_message`` the reply
    continues the last message; with ``prefill_assistant`` it does so whenever that is the
    assistant's. At most one of ``schema`` (JSON schema of the content, if there is no call) and
    ``grammar`` (GBNF of the whole reply) binds the reply; None for neither. The reasoning is ended
    after ``reasoning_budget`` tokens, None for no limit, after ``reasoning_budget_message``.
    """

    messages: object
    tools: object = None
    callable_tools: object = None
    tool_choice: object = None
    parallel_tool_calls: bool = True
    parse_tool_calls: bool = True
    template_kwargs: JsonObject = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: Continue | None = None
    prefill_assistant: bool = True
    reasoning_format: ReasoningFormat = "auto"
    schema: Any = None
    grammar: str | None = None
    reasoning_budget: int | None = None
    reasoning_budget_message: str = ""


class ChatFormat:
    """The format of a model's conversations: ``ChatFormat(template,
    tokenizer).prepare(ChatRequest([{"role": "user", "content": "Hi"}])).prompt``

    ``kwargs`` are variables of the template that a request may override; ``replay`` remembers
    replies and puts them into later conversations. Without ``images`` there can be none. Tools that
    differ from an earlier reply's in the order of keys alone take that order, unless
    ``keeps_order``. Requests with tools are written by ``template.of_tools`` if the model has one.
    Thread-safe. Whatever is wrong with a request raises RequestError.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        kwargs: JsonObject | None = None,
        replay: Replay | None = None,
        images: ImageReader | None = None,
        *,
        keeps_order: bool = False,
    ) -> None:
        """Prepare the dialect of the template, and the dialect of its template for tools if it
        differs.
        """
        self.template = template
        self.tokenizer = tokenizer
        self.images = images
        specials = tokenizer.special_tokens()
        controls = {
            text: id for text, id in specials.items() if not tokenizer.piece(id, special=False)
        }
        replay = replay or Replay("off")
        self.orders = Replay("off") if keeps_order else replay
        self.dialect = Dialect(
            template=template,
            tokenizer=tokenizer,
            specials=specials,
            controls=controls,
            kwargs=kwargs or {},
            replay=replay,
        )
        self.tool_dialect = self.dialect
        of_tools = template.of_tools
        if of_tools is not None and of_tools.source != template.source:
            self.tool_dialect = Dialect(
                template=of_tools,
                tokenizer=tokenizer,
                specials=specials,
                controls=controls,
                kwargs=kwargs or {},
                replay=replay,
            )
        sources = template.source + (of_tools.source if of_tools is not None else "")
        usual = [text for text in specials if text in sources]
        self._memo = CachedTokenizer(tokenizer, specials, usual=usual)
        self._bos = as_tokens([tokenizer.bos] if tokenizer.add_bos else [])

    @property
    def n_bytes(self) -> Mapping[str, int]:
        """Bytes that are remembered between requests: of tokens by their text, and of replies, with
        tools.
        """
        replays = (self.dialect.marks.replay, self.tool_dialect.marks.replay, self.orders)
        return {
            "tokenizer": self._memo.n_bytes,
            "replies": max(replay.n_bytes for replay in replays),
        }

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """The abilities of the template; those that concern tools are of the one for tools."""
        of_tools = self.tool_dialect.capabilities
        return replace(
            self.dialect.capabilities,
            tools=of_tools.tools,
            tool_calls=of_tools.tool_calls,
            object_arguments=of_tools.object_arguments,
            parallel_calls=of_tools.parallel_calls,
        )

    def find_dialect(self, tools: Sequence[object] | None) -> Dialect:
        """Return the dialect of a request with these ``tools``."""
        return self.tool_dialect if tools else self.dialect

    def prepare(self, request: ChatRequest) -> PreparedChat:
        """Check and render ``request``. Other faults show only when that part of the answer is
        requested.
        """
        ordered, remember = self.orders.with_remembered_key_order(request.tools)
        request = replace(request, tools=ordered)
        tools, callables = read_tools(
            request.tools,
            request.tool_choice,
            callable_tools=request.callable_tools,
            parallel=request.parallel_tool_calls,
            parse=request.parse_tool_calls,
            has_grammar=request.grammar is not None,
        )
        dialect = self.find_dialect(tools)
        rendered = dialect.renderer.render(
            request.messages,
            tools=tools,
            variables=request.template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continues=request.continue_final_message,
            prefill=request.prefill_assistant,
        )
        return PreparedChat(
            chat=self,
            dialect=dialect,
            request=request,
            rendered=rendered,
            tools=callables,
            remember_tools=remember,
        )

    def beginning(self, request: ChatRequest) -> Prompt:
        """Return the certain beginning of the next prompt of a conversation, for any next role and
        text.

        After a message of the user, or the result of a tool, it is the whole prompt. ``messages``
        may be empty.
        """
        messages = [] if request.messages is None else request.messages
        if not isinstance(messages, list):
            return self.prepare(request).prompt  # with the reason
        last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
        if last.get("role") not in (None, "system", "developer", "assistant"):
            return self.prepare(request).prompt
        tools = template_tools(self.orders.with_remembered_key_order(request.tools)[0])
        dialect = self.find_dialect(tools)
        one, other = (
            self.tokenize_rendered(
                dialect.renderer.render(
                    [*messages, *_next(last, text)], tools=tools, variables=request.template_kwargs
                ),
                dialect,
            )
            for text in _NEXT_TEXTS
        )
        return one.first(common_prefix(one.tokens, other.tokens))

    def prompt_from_text(self, text: str, images: Sequence[ImageFile] | None = None) -> Prompt:
        """Return the tokens of ``text``, special tokens included, after BOS where the model needs
        it. ``images`` replace their markers in order; with None the marker is ordinary text.
        """
        pieces = self._pieces([text] if images is None else split_marker(text, images))
        return self.dialect.message_starts.prompt(*_joined([self._bos, *pieces]))

    def prompt_from_mixed(self, parts: Sequence[str | int]) -> Prompt:
        """Return the tokens of strings and token ids in a row; BOS comes first only if a string
        does.
        """
        runs = [self._bos] if parts and isinstance(parts[0], str) else []
        for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
            items = list(run)
            runs += [self._memo.tokenize(str(text)) for text in items] if is_text else [_ids(items)]
        return self.dialect.message_starts.prompt(*_joined(runs))

    def tokenize_rendered(self, rendered: RenderedChat, dialect: Dialect) -> Prompt:
        """Return the tokens of the text that ``dialect`` rendered, with replayed replies as they
        were sampled.
        """
        parts: list[Tokens | ImageSpan] = [self._bos]
        for part in rendered.parts or (rendered.text,):
            if not isinstance(part, str) and part.tokens is not None:
                parts.append(part.tokens)
                continue
            text = part if isinstance(part, str) else part.text
            pieces = split_marked(text, rendered.images) if rendered.images else [text]
            parts += self._pieces(pieces)
        tokens, pictures = _joined(parts)
        return dialect.message_starts.prompt(tokens, pictures, rendered.sections)

    def _pieces(self, pieces: Sequence[str | ImageFile]) -> Iterator[Tokens | ImageSpan]:
        """Yield text as tokens, and each image with the tokens around it."""
        for piece in pieces:
            if isinstance(piece, str):
                yield self._memo.tokenize(piece)
            elif self.images is None:
                raise unreadable("the prompt", "image")
            else:
                before, after = self.images.around
                yield before
                yield self.images.picture(piece)
                yield after


class PreparedChat:
    """The answer to a ChatRequest: ``text`` of the prompt, and from there whatever the engine
    needs.

    The reply starts with ``open_reasoning``, text of the prompt that no token of the reply brings,
    where reasoning stays in the content. ``is_continued`` if the client asked for the last message
    to be continued. ``control_texts`` are the control tokens that the splitter has to see, and
    their texts.
    """

    def __init__(
        self,
        chat: ChatFormat,
        dialect: Dialect,
        request: ChatRequest,
        rendered: RenderedChat,
        tools: Tools | None,
        remember_tools: Callable[[], None],
    ) -> None:
        """Take the ``rendered`` conversation; ``remember_tools`` is called when the reply is
        remembered.
        """
        self._chat = chat
        self._dialect = dialect
        self._remember_tools = remember_tools
        self._request = request
        self.rendered = rendered
        self._tools = tools
        self.text = (
            with_media_markers(rendered.text, rendered.images) if rendered.images else rendered.text
        )
        self.is_continued = request.continue_final_message is not None
        self.control_texts = dialect.control_texts
        self.open_reasoning = rendered.reasoning_start if request.reasoning_format == "none" else ""

    @property
    def has_own_grammar(self) -> bool:
        """True if the request binds the text of the reply."""
        return bool(self._request.grammar) or self._request.schema is not None

    @cached_property
    def prompt(self) -> Prompt:
        """Token ids and boundaries of the prompt; replayed replies have the tokens that were
        sampled.
        """
        return self._chat.tokenize_rendered(self.rendered, self._dialect)

    @property
    def n_tokens(self) -> int:
        """The number of tokens of the prompt as text, replies that could be replayed included."""
        return len(self._chat.tokenize_rendered(replace(self.rendered, parts=()), self._dialect))

    @cached_property
    def constraint(self) -> Constraint | None:
        """The constraint on the reply: a call that is forced goes before the schema, others may
        come in its place.

        None without either. RequestError for a schema that cannot be converted.
        """
        request = self._request
        rendered = self.rendered
        if request.grammar and request.schema is not None:
            raise RequestError("Cannot use both json_schema and grammar")
        if request.grammar:
            return Constraint(request.grammar)
        part = self._reply_start()
        is_forced = self._tools is not None and self._tools.forced
        schema = None if is_forced else request.schema
        prefill = ""
        alone = None
        if schema is not None:
            prefill = rendered.prefill if rendered.reply_part == "content" else ""
            alone = self._schema_constraint(schema, part, prefill)
        return self._call_constraint(schema, part, prefill) or alone

    @cached_property
    def reasoning(self) -> ReasoningLimit | None:
        """The limit at which the engine ends the reasoning; None without a limit, or if there can
        be none.
        """
        request = self._request
        rendered = self.rendered
        tags = self._dialect.tags
        recurs = bool(tags.next_message)
        if request.reasoning_budget is None or (rendered.reply_part == "content" and not recurs):
            return None
        already_read = ""
        if rendered.reply_part == "reasoning":
            already_read = rendered.reasoning_start + rendered.prefill
        return reasoning_limit(
            self._chat.tokenizer,
            tags,
            request.reasoning_budget,
            message=request.reasoning_budget_message,
            read=already_read,
            recurs=recurs,
        )

    def _echo(self) -> ReplyDelta:
        """Return the part of the reply that the prompt holds already, as a parser would have read
        it.
        """
        if not self.rendered.reply_prefix:
            return ReplyDelta()
        if self._request.reasoning_format == "none":
            return ReplyDelta(content=self.rendered.reply_prefix)
        content = self.rendered.prefill if self.rendered.reply_part == "content" else ""
        reader = ReasoningSplitter(self._dialect.tags)
        first = reader.feed(self.rendered.reply_prefix.removesuffix(content))
        last = reader.finish()
        return ReplyDelta(first.reasoning + last.reasoning, content)

    def next_prompt(self, message: JsonObject) -> Prompt | None:
        """Return the certain beginning of the next prompt if the client returns the reply as
        ``message``; None if the template has no place for it.

        It has no reasoning, unless the conversation has some already: where a client returns the
        reasoning, the next prompt continues the reply as it was sampled, and needs none of this.
        """
        request = self._request
        assert isinstance(request.messages, list)
        before = request.messages[:-1] if self._is_continuation else request.messages
        returns_reasoning = any(
            earlier["role"] == "assistant" and earlier.get("reasoning_content")
            for earlier in before
        )
        if not returns_reasoning:
            message = {**message}
            message.pop("reasoning_content", None)
        try:
            return self._chat.beginning(replace(request, messages=[*before, message]))
        except RequestError:
            return None

    @property
    def _is_continuation(self) -> bool:
        """True if the reply continues the last message."""
        request = self._request
        assert isinstance(request.messages, list)
        is_last = request.messages[-1]["role"] == "assistant"
        return self.is_continued or (request.prefill_assistant and is_last)

    def splitter(self, on_reply: Callable[[JsonDict], None] | None = None) -> ReplySplitter:
        """Return a new splitter, which parses one reply and remembers it in the end.

        ``on_reply`` then gets the whole reply, as an assistant message.
        """
        rendered = self.rendered
        echo = self._echo()
        opening = self.open_reasoning
        tags = None if self._request.reasoning_format == "none" else self._dialect.tags
        parser = self._dialect.call_format.parser(self._tools, tags, rendered.reply_part)
        if rendered.reply_part == "reasoning" and rendered.prefill.strip():
            parser.feed(rendered.prefill)
        # With a schema, JSON in the reply is its content, and no call without tags.
        forgets_tags = self._dialect.call_format.may_omit_tags and self._request.schema is None
        if self._tools is not None and forgets_tags and not echo.content.strip():
            parser = BareCallParser(parser, self._tools)

        def ended(text: str, tokens: list[int], reply: ParsedReply) -> None:
            """Remember the reply, and hand its message on."""
            message = reply.message(echo)
            if opening and text.startswith(opening):
                # It is a part of the header, and of the echo.
                text = text.removeprefix(opening)
                message["content"] = echo.content + reply.content.removeprefix(opening)
            marks = self._dialect.marks
            header = marks.header(rendered.text, rendered.prefill)
            if header:
                marks.replay.remember(
                    message,
                    rendered.conversation_key,
                    header,
                    text,
                    self._matching_tokens(text, tokens),
                )
            self._remember_tools()
            if on_reply is not None:
                on_reply(message)

        return ReplySplitter(
            parser=parser,
            echo=echo,
            opening=opening,
            on_end=ended,
        )

    def _reply_start(self) -> ReplyPart:
        """Return the part in which the reply starts: ``start`` only if the template leaves it a
        reasoning block to open.
        """
        if self.rendered.reply_part != "start":
            return self.rendered.reply_part
        tags = self._dialect.tags
        has_reasoning = tags.open in self._dialect.template.source
        is_closed = self.text.rstrip().endswith(tags.close)
        return "start" if has_reasoning and not is_closed else "content"

    def _schema_constraint(self, schema: Any, part: ReplyPart, prefill: str) -> Constraint:
        """Return the constraint on a reply without calls. Raises RequestError."""
        tags = self._dialect.tags
        controls = self._dialect.controls
        try:
            return reply_constraint(schema, tags, part, prefill, controls)
        except RequestError as error:
            raise RequestError(
                f"Field 'json_schema': JSON schema conversion failed: {error}"
            ) from error

    def _call_constraint(self, schema: Any, part: ReplyPart, prefill: str) -> Constraint | None:
        """Return the constraint on calls: on the whole reply if one is forced, or if it is JSON by
        ``schema`` otherwise; else from its first call on. Until then it sleeps, which costs
        nothing.
        """
        tools = self._tools
        if tools is None:
            return None
        return self._dialect.bound_calls.constraint(tools, part, schema, prefill)

    def _matching_tokens(self, text: str, tokens: list[int]) -> Tokens | None:
        """Return ``tokens`` without the tokens of a character that is cut at the end; None if their
        text is another.
        """
        tokenizer = self._chat.tokenizer
        for special in (False, True):
            data = tokenizer.detokenize(tokens, special=special)
            whole, n = codecs.utf_8_decode(data, "replace", False)
            if whole == text:
                while n < len(data):
                    data = data.removesuffix(tokenizer.piece(tokens.pop(), special=special))
                return as_tokens(tokens) if n == len(data) else None
        return None


def _joined(parts: Sequence[Tokens | ImageSpan]) -> tuple[Tokens, list[ImageSpan]]:
    """Return the tokens of ``parts`` in a row, and the images among them at their places."""
    pictures: list[ImageSpan] = []
    runs: list[Tokens] = []
    n = 0
    for part in parts:
        if isinstance(part, ImageSpan):
            pictures.append(replace(part, start=n))
        tokens = part.tokens if isinstance(part, ImageSpan) else part
        runs.append(tokens)
        n += tokens.size
    joined = as_tokens(np.concatenate(runs)) if runs else as_tokens([])
    return joined, pictures


def _next(last: JsonObject, text: str) -> list[JsonDict]:
    """Return messages that may follow: results of calls, or a message of the user."""
    calls = last.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return [{"role": "user", "content": text}]
    return [{"role": "tool", "content": text, **_of_call(call)} for call in calls]


def _of_call(call: Any) -> JsonDict:
    """Return the members of a result that name its ``call``."""
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    members = {
        "tool_call_id": call.get("id"),
        "name": function.get("name") if isinstance(function, dict) else None,
    }
    return {name: value for name, value in members.items() if isinstance(value, str)}


def _ids(values: Sequence[str | int]) -> Tokens:
    try:
        return as_tokens(values)
    except OverflowError as error:
        raise RequestError("token ids must be 32-bit numbers") from error
