"""Conversations of the terminal: messages, files of them, and the backends that continue them."""

from __future__ import annotations

import base64
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from pyctl.chat.reply import CallDelta, ReplyDelta
from pyctl.errors import RequestError
from pyctl.files.atomic_file import replacing
from pyctl.files.image_file import ImageFile
from pyctl.files.pdf_file import MAX_PDF_BYTES, is_pdf, pdf_text
from pyctl.settings.limit import limit
from pyctl.text import one_line

__all__ = [
    "MAX_TEXT_BYTES",
    "Call",
    "ChatBackend",
    "Conversation",
    "Message",
    "PromptProgress",
    "ReplyEvent",
    "ReplyStats",
    "load",
    "save",
]

MAX_TEXT_BYTES = limit(
    4 * 2**20,
    "files and standard input in a message of a chat at a terminal",
    "refused",
    "memory",
    "bytes",
)
_MAX_IMAGE_BYTES = limit(
    32 * 2**20, "an image in a chat at a terminal", "refused", "memory", "bytes"
)
_MAX_CHAT_BYTES = limit(64 * 2**20, "the file of a chat at a terminal", "refused", "disk", "bytes")

Role: TypeAlias = Literal["user", "assistant", "tool"]


@dataclass(frozen=True)
class Call:
    """A tool that a reply calls; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str

    def for_model(self) -> dict[str, Any]:
        """Return the call in OpenAI's form."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    @classmethod
    def joined(cls, deltas: Iterable[CallDelta]) -> tuple[Call, ...]:
        """Return the calls that ``deltas`` add up to, without one that was cut short."""
        made: dict[int, Call] = {}
        for delta in deltas:
            call = made.get(delta.index, cls("", "", ""))
            made[delta.index] = cls(
                call.id or delta.id, call.name or delta.name, call.arguments + delta.arguments
            )
        return tuple(
            call for _, call in sorted(made.items()) if call.name and _is_json(call.arguments)
        )


@dataclass(frozen=True)
class Message:
    """A turn; ``stopped`` marks a reply that the user cut short. ``images`` are data URLs, shown
    before the text.

    The first ``n_attached`` characters of ``content`` are files. A tool's message answers the call
    ``call_id``.
    """

    role: Role
    content: str
    reasoning: str = ""
    stopped: bool = False
    calls: tuple[Call, ...] = ()
    images: tuple[str, ...] = ()
    n_attached: int = 0
    call_id: str = ""


@dataclass(frozen=True)
class Conversation:
    """A system text, empty for none, and the turns after it. Methods raise RequestError
    for steps that are not possible.
    """

    system: str = ""
    messages: tuple[Message, ...] = ()

    def with_user(
        self, text: str, images: tuple[str, ...] = (), attached: str = ""
    ) -> Conversation:
        """Append a message of the user, which starts with the files ``attached``."""
        attached = _encodable(attached)
        message = Message(
            "user", attached + _encodable(text), images=images, n_attached=len(attached)
        )
        return replace(self, messages=(*self.messages, message))

    def with_reply(
        self,
        content: str,
        reasoning: str = "",
        calls: tuple[Call, ...] = (),
        *,
        stopped: bool = False,
    ) -> Conversation:
        """Append a reply."""
        return replace(
            self,
            messages=(*self.messages, Message("assistant", content, reasoning, stopped, calls)),
        )

    def with_tool_result(self, call: Call, result: str) -> Conversation:
        """Append the result of a tool."""
        return replace(
            self, messages=(*self.messages, Message("tool", _encodable(result), call_id=call.id))
        )

    def without_last_turn(self) -> Conversation:
        """Drop the last message of the user and all after it."""
        return replace(self, messages=self.messages[: self._last_question()])

    def without_last_reply(self) -> Conversation:
        """Drop all after the last message of the user, ready for another reply."""
        return replace(self, messages=self.messages[: self._last_question() + 1])

    def edited(self, text: str) -> Conversation:
        """Put ``text`` in place of the last message of the user, whose images and files stay, and
        nothing after it.
        """
        message = self.messages[self._last_question()]
        return self.without_last_turn().with_user(
            text, message.images, message.content[: message.n_attached]
        )

    def question(self) -> str:
        """Return the last message of the user, without files."""
        message = self.messages[self._last_question()]
        return message.content[message.n_attached :]

    def with_system(self, system: str) -> Conversation:
        """Replace the system text; empty removes it."""
        return replace(self, system=_encodable(system))

    def for_model(self, *, marked: bool = False) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form, the system text first; ``marked`` with all that
        `from_file` reads back.
        """
        made: list[dict[str, Any]] = (
            [{"role": "system", "content": self.system}] if self.system else []
        )
        for message in self.messages:
            turn: dict[str, Any] = {"role": str(message.role), "content": message.content}
            if message.images:
                shown = [{"type": "image_url", "image_url": {"url": url}} for url in message.images]
                turn["content"] = [*shown, {"type": "text", "text": message.content}]
            if message.reasoning:
                turn["reasoning_content"] = message.reasoning
            if message.call_id:
                turn["tool_call_id"] = message.call_id
            if message.calls:
                turn["tool_calls"] = [call.for_model() for call in message.calls]
            if marked and message.stopped:
                turn["stopped"] = True
            if marked and message.n_attached:
                turn["attached"] = message.n_attached
            made.append(turn)
        return made

    @classmethod
    def from_file(cls, turns: Sequence[object]) -> Conversation:
        """Return a conversation from messages in OpenAI's form: texts, images of the user, a system
        message only at the start. Raises RequestError for others.
        """
        system = ""
        messages = []
        for index, turn in enumerate(turns):
            text, images = _content(turn.get("content") if isinstance(turn, Mapping) else None)
            if not isinstance(turn, Mapping) or text is None:
                raise RequestError(f"message {index + 1} has no text")
            role = turn.get("role")
            content = _encodable(text)
            reasoning = _encodable(str(turn.get("reasoning_content") or ""))
            if role == "system" and index == 0:
                system = content
            elif role in ("user", "assistant") or (role == "tool" and turn.get("tool_call_id")):
                calls = _calls(turn.get("tool_calls"), f"message {index + 1}")
                stopped = turn.get("stopped") is True
                images = images if role == "user" else ()
                attached = turn.get("attached")
                n_attached = (
                    attached if isinstance(attached, int) and 0 < attached <= len(content) else 0
                )
                call_id = _encodable(str(turn.get("tool_call_id") or "")) if role == "tool" else ""
                messages.append(
                    Message(role, content, reasoning, stopped, calls, images, n_attached, call_id)
                )
            else:
                raise RequestError(
                    f"message {index + 1} has the role {role!r}, which is not allowed there"
                )
        return cls(system, tuple(messages))

    def _last_question(self) -> int:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                return index
        raise RequestError("no message has been sent yet")


def _content(content: object) -> tuple[str | None, tuple[str, ...]]:
    """Return the text, None for none, and the images."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None, ()
    parts = [part for part in content if isinstance(part, Mapping)]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    images = [
        part["image_url"].get("url") for part in parts if isinstance(part.get("image_url"), Mapping)
    ]
    return "\n".join(texts) if texts else None, tuple(
        _encodable(url) for url in images if isinstance(url, str)
    )


def _calls(listed: object, where: str) -> tuple[Call, ...]:
    """Return the calls in OpenAI's form; None for none."""
    made = []
    for item in listed if isinstance(listed, list) else []:
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or not _is_json(function.get("arguments")):
            raise RequestError(f"{where} has a tool call without a function and its arguments")
        name = _encodable(str(function.get("name") or ""))
        arguments = _encodable(function["arguments"])
        made.append(Call(_encodable(str(item.get("id") or "")), name, arguments))
    return tuple(made)


def _is_json(text: object) -> bool:
    try:
        json.loads(text if isinstance(text, str) else "")
    except (ValueError, RecursionError):
        return False
    return True


def _encodable(text: str) -> str:
    """Replace lone surrogates, which stand for invalid UTF-8 of a terminal and for \\ud800 in
    JSON.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def read_image(path: Path) -> tuple[str, ImageFile]:
    """Return the image at ``path`` as a data URL, and its description. Raises RequestError."""
    try:
        if path.stat().st_size > _MAX_IMAGE_BYTES:
            raise RequestError(f"{path} has more than {_MAX_IMAGE_BYTES} bytes")
        image = ImageFile.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _failed("read", path, error) from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    return f"data:image/{image.kind};base64,{base64.b64encode(image.data).decode()}", image


def read_text(path: Path) -> str:
    """Return the text or PDF file at ``path``, quoted under its name. Raises RequestError."""
    try:
        if not path.is_file() and path.exists():
            raise RequestError(f"cannot read {path}: not a file")
        with path.open("rb") as file:
            data = file.read(MAX_PDF_BYTES + 1)
        if is_pdf(data):
            data = pdf_text(data).encode("utf-8", "replace")
        if len(data) > MAX_TEXT_BYTES:
            raise RequestError(f"{path} has more than {MAX_TEXT_BYTES:,} bytes of text")
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text; /image shows images") from error
    except (OSError, ValueError) as error:
        raise _failed("read", path, error) from error
    if "\0" in text:
        raise RequestError(f"{path} is not text")
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{one_line(path.name)}:\n{fence}\n{text.rstrip()}\n{fence}\n\n"


FORMAT = "pyctl-chat"

VERSION = 1


def save(path: Path, conversation: Conversation) -> None:
    """Write ``conversation`` to ``path``; a failure leaves the old file and raises RequestError."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "messages": conversation.for_model(marked=True),
    }
    data = (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode("utf-8")
    if len(data) > _MAX_CHAT_BYTES:
        raise RequestError(f"cannot save {path}: the chat has more than {_MAX_CHAT_BYTES:,} bytes")
    try:
        with replacing(path) as file:
            file.write(data)
    except (OSError, ValueError) as error:
        raise _failed("save", path, error) from error


def load(path: Path) -> Conversation:
    """Read a file of `save`, or a bare list of messages in OpenAI's form; raises RequestError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CHAT_BYTES + 1)
        if len(data) > _MAX_CHAT_BYTES:
            raise RequestError(f"more than {_MAX_CHAT_BYTES:,} bytes")
        document = json.loads(data.decode("utf-8-sig"))
        turns = document.get("messages") if isinstance(document, dict) else document
        if not isinstance(turns, list):
            raise RequestError("no list of messages")
        if isinstance(document, dict) and document.get("version", VERSION) != VERSION:
            raise RequestError(f"unknown version {document['version']}")
        return Conversation.from_file(turns)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"cannot load {path}: not JSON in UTF-8 ({error})") from error
    except (OSError, RequestError) as error:
        raise _failed("load", path, error) from error


def _failed(what: str, path: Path, error: Exception) -> RequestError:
    """Return the error of a file in one line."""
    return RequestError(
        f"cannot {what} {path}: {error.strerror if isinstance(error, OSError) else error}"
    )


@dataclass(frozen=True)
class ReplyStats:
    """The numbers of one reply, in tokens, milliseconds and tokens per second; None if they are not
    known.

    Of ``n_drafted`` tokens of drafts the reply has ``n_accepted``. ``source`` is where the cached
    tokens came from, empty when unknown; ``truncated`` that the reply met a limit.
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


@dataclass(frozen=True)
class PromptProgress:
    """The progress before a reply: ``n_read`` of ``n_prompt`` tokens are restored or evaluated;
    ``seconds_left`` is 0 if unknown.

    ``queue_position`` is the place of a request that waits for others, 1 for the next one; 0 once
    it runs.
    """

    n_prompt: int
    n_read: int
    seconds_left: float = 0.0
    queue_position: int = 0


ReplyEvent: TypeAlias = PromptProgress | ReplyDelta | ReplyStats


class ChatBackend(Protocol):
    """The interface of a model that continues a conversation, used from one thread. Failures raise
    PyctlError.
    """

    def name(self) -> str:
        """Return the name of the model, for display."""

    def models(self) -> Sequence[str]:
        """Return the names of the models that can reply."""

    def use(self, model: str) -> None:
        """Let ``model``, one of `models`, reply from now on."""

    def supports_images(self) -> bool:
        """Return whether the model in use has an image encoder; True where the server does not
        report it.
        """

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None
    ) -> Generator[ReplyEvent, None, None]:
        """Return the reply to ``messages`` (OpenAI's form) with more ``fields`` of a request, and
        its figures in the end.

        Before the reply come reports of how much of the prompt is read. Closing the iterator stops
        the work.
        """
