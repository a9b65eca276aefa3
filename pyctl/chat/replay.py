"""Replies as they were sampled: remembered, kept in a file, and put into later prompts."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sys import getsizeof
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

import msgspec

from pyctl.chat.call_formats.scan import parse_json
from pyctl.chat.images import BEGIN
from pyctl.chat.json_object import JsonDict
from pyctl.files.atomic_file import inode, open_regular
from pyctl.prompt import Tokens, as_tokens
from pyctl.settings.limit import limit

__all__ = ["DEFAULT_REPLAY_BYTES", "Part", "Replay", "ReplayMarks", "places"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SampledReply:
    """A reply as it was written: ``header`` is the text from the token that starts the message to
    the first sampled one, ``text`` and ``tokens`` are the sampled ones, tokens None if they are not
    known.

    Its calls had these ``ids``, and its reasoning this digest.
    """

    header: str
    text: str
    tokens: Tokens | None
    ids: tuple[str, ...]
    reasoning: bytes


class ReplayLog:
    """The log of replies in the file at ``path`` and in one of older replies next to it, together
    never more than ``max_bytes``.

    A file that is half of that becomes the older one, whose place it takes: nothing has to be
    rewritten, and replies unused since the last time are forgotten. ``spend`` is called before
    bytes are written, and returns False after enough today. What the disk refuses is a warning and
    no error. Several processes may append; within one, one thread at a time.
    """

    def __init__(
        self, path: Path, max_bytes: int, spend: Callable[[int], bool] = lambda n_bytes: True
    ) -> None:
        self._path = path
        self._spend = spend
        self._older = path.with_name(f"{path.name}.older")
        self._half = max_bytes // 2
        self._inode = 0
        self._fresh: WeakSet[SampledReply] = WeakSet()  # those in the newer file

    @property
    def n_bytes(self) -> int:
        """Bytes of both files."""
        return _size(self._path) + _size(self._older)

    def read(self) -> Iterator[tuple[bytes, SampledReply]]:
        """Yield every reply with its key, the oldest first."""
        for path in (self._older, self._path):
            try:
                with os.fdopen(open_regular(path), "rb") as file:
                    self._note(os.fstat(file.fileno()).st_ino)
                    for line in file:
                        try:
                            key, reply = _unpacked(line)
                        except (msgspec.ValidationError, ValueError, OverflowError, RecursionError):
                            continue
                        self._fresh.add(reply)
                        yield key, reply
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("cannot read remembered replies: %s", error)

    def has(self, reply: SampledReply) -> bool:
        """Return whether the reply is in the newer file; any thread may call it."""
        return reply in self._fresh

    def append(self, key: bytes, reply: SampledReply) -> None:
        """Add a reply at the end, unless it is in the newer file."""
        line = b"" if reply in self._fresh else _packed(key, reply)
        if not 0 < len(line) < self._half:
            return
        try:
            if not self._spend(len(line)):
                return
            descriptor = self._opened(len(line) + 1)
            try:
                # One write, so that lines of several processes do not mix; a line cut off before is
                # ended first.
                size = os.fstat(descriptor).st_size
                whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
                os.write(descriptor, (b"" if whole else b"\n") + line)
            finally:
                os.close(descriptor)
            self._fresh.add(reply)
        except OSError as error:
            log.warning("cannot write a remembered reply: %s", error)

    def shrink(self) -> None:
        """Drop the older file, and the newer one too if it exceeds the limit, which was larger
        before.
        """
        for path in (self._older, self._path):
            if self.n_bytes > 2 * self._half:
                self._fresh.clear()
                with suppress(OSError):
                    path.unlink()

    def _opened(self, n_bytes: int) -> int:
        """Return the newer file, with room for that many bytes."""
        while True:
            descriptor = open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                status = os.fstat(descriptor)
                if inode(self._path) == status.st_ino:
                    self._note(status.st_ino)
                    if status.st_size + n_bytes <= self._half:
                        return descriptor
                    os.replace(self._path, self._older)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(
                descriptor
            )  # which unlocks it, here or where another process has just put it aside

    def _note(self, inode: int) -> None:
        if inode != self._inode:
            self._inode = inode
            self._fresh.clear()


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


class _Line(msgspec.Struct):
    """A reply in the file. ``of`` is the form of the line: in the first, keys left out the
    conversation before it.
    """

    key: str
    head: str
    text: str
    tokens: list[int] | None
    of: Literal[2]
    ids: list[str]
    reasoning: str


def _packed(key: bytes, reply: SampledReply) -> bytes:
    tokens = reply.tokens.tolist() if reply.tokens is not None else None
    line = _Line(
        key.hex(), reply.header, reply.text, tokens, 2, list(reply.ids), reply.reasoning.hex()
    )
    return json.dumps(msgspec.to_builtins(line), separators=(",", ":")).encode() + b"\n"


def _unpacked(text: bytes) -> tuple[bytes, SampledReply]:
    line = msgspec.convert(json.loads(text), _Line)
    tokens = as_tokens(line.tokens) if line.tokens is not None else None
    reply = SampledReply(
        header=line.head,
        text=line.text,
        tokens=tokens,
        ids=tuple(line.ids),
        reasoning=bytes.fromhex(line.reasoning),
    )
    return bytes.fromhex(line.key), reply


DEFAULT_REPLAY_BYTES = limit(
    64 << 20, "replies remembered as sampled", "the oldest are forgotten", "memory", "bytes"
)
"""Some 7 million tokens: weeks of an agent's work."""

_MAX_ALIKE = 8
"""Replies that mean the same at the same place, such as those that differ in their reasoning only.
"""

_MAX_UNWRITTEN = limit(
    256, "remembered replies that wait for the disk", "others are not written", "memory"
)

_MAX_TOOLS = limit(
    1 << 20, "tools whose order of keys is remembered", "rendered as sent", "memory", "characters"
)

_TOOLS = b"tools"  # their place, which no reply has

_ENTRY_BYTES = 600
"""Size of the containers around one reply, roughly."""


class Replay:
    """The memory of replies, and of the order of keys in tools, the last used of together
    ``max_bytes``; ``mode`` is off, equal or full. Thread-safe.

    With a ``path`` they are also in that file and the older one next to it, together at most
    ``max_file_bytes``, by default ``max_bytes``; those in them are remembered from the beginning.
    ``run_soon`` has a thread write them in the background, as far as ``spend`` lets it.
    """

    def __init__(
        self,
        mode: str = "equal",
        max_bytes: int = DEFAULT_REPLAY_BYTES,
        path: Path | None = None,
        max_file_bytes: int | None = None,
        run_soon: Callable[[Callable[[], None]], None] = lambda function: function(),
        spend: Callable[[int], bool] = lambda n_bytes: True,
    ) -> None:
        """Read the replies of earlier processes from the log at ``path``."""
        self.mode = mode
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards what follows
        self._replies: OrderedDict[bytes, list[SampledReply]] = OrderedDict()
        self._n_bytes = 0
        self._run_soon = run_soon
        self._unwritten: set[SampledReply] = set()
        maximum = max_bytes if max_file_bytes is None else max_file_bytes
        self._log = ReplayLog(path, maximum, spend) if path is not None and mode != "off" else None
        if self._log is not None:
            for key, reply in self._log.read():
                self._keep(key, reply)
            self._log.shrink()

    @property
    def n_bytes(self) -> int:
        """Bytes of all remembered replies."""
        return self._n_bytes

    def remember(
        self,
        message: JsonDict,
        place: bytes,
        header: str,
        text: str,
        tokens: Tokens | None,
    ) -> None:
        """Keep a reply that means ``message``, an assistant message as OpenAI writes them, at this
        `places`.
        """
        if self.mode == "off":
            return
        reply = SampledReply(
            header=header,
            text=text,
            tokens=tokens,
            ids=_ids(message),
            reasoning=_reasoning(message),
        )
        key = _digest(place + _meaning(message))
        with self._lock:
            self._keep(key, reply)
        self._write_soon(key, reply)

    def find(self, message: JsonDict, place: bytes) -> SampledReply | None:
        """Return the reply that ``message`` stands for in the conversation of ``place``, and in no
        other.
        """
        if self.mode == "off":
            return None
        key = _digest(place + _meaning(message))
        reasoning = _reasoning(message)
        ids = _ids(message)
        is_any = self.mode == "full" and reasoning == _NOTHING
        with self._lock:
            replies = [
                reply
                for reply in self._replies.get(key, ())
                if is_any or reply.reasoning == reasoning
            ]
            if not replies:
                return None
            self._replies.move_to_end(key)
        best = replies[-1]  # the newest one, unless another has the same ids of calls
        for reply in replies:
            if reply.ids == ids:
                best = reply
        self._write_soon(key, best)  # it is in use: the file of older replies will go
        return best

    def in_order(self, tools: Any) -> tuple[Any, Callable[[], None]]:
        """Return ``tools`` with the keys of all objects in the order that is remembered, and the
        record of that order.
        """
        if not tools or self.mode == "off":
            return tools, lambda: None
        message = {"content": json.dumps(tools, sort_keys=True)}
        remembered = self.find(message, _TOOLS)
        if remembered is not None:
            with suppress(ValueError):  # of a damaged file
                ordered = json.loads(remembered.text)
                if ordered == tools:
                    return ordered, lambda: None
        text = json.dumps(tools)
        if len(text) > _MAX_TOOLS:
            return tools, lambda: None
        return tools, partial(self.remember, message, _TOOLS, "", text, None)

    def _write_soon(self, key: bytes, reply: SampledReply) -> None:
        """Have a thread that may wait for the disk write the reply, unless it is written or queued,
        or the queue is full.
        """
        if self._log is None or self._log.has(reply):
            return
        with self._lock:
            if reply in self._unwritten or len(self._unwritten) >= _MAX_UNWRITTEN:
                return
            self._unwritten.add(reply)
        self._run_soon(partial(self._write, self._log, key, reply))

    def _write(self, log: ReplayLog, key: bytes, reply: SampledReply) -> None:
        log.append(key, reply)
        with self._lock:
            self._unwritten.remove(reply)

    def _keep(self, key: bytes, reply: SampledReply) -> None:
        others = self._replies.pop(key, [])
        identity = (reply.ids, reply.reasoning)
        replies = [other for other in others if (other.ids, other.reasoning) != identity]
        replies = replies[-_MAX_ALIKE + 1 :]
        replies.append(reply)
        self._n_bytes += _charge(replies) - _charge(others)
        self._replies[key] = replies
        while self._n_bytes > self._max_bytes:
            _, old = self._replies.popitem(last=False)
            self._n_bytes -= _charge(old)


def _charge(replies: Sequence[SampledReply]) -> int:
    """Return the approximate bytes of replies in memory."""
    n_bytes = 0
    for reply in replies:
        n_bytes += _ENTRY_BYTES
        n_bytes += getsizeof(reply.header)
        n_bytes += getsizeof(reply.text)
        if reply.tokens is not None:
            n_bytes += reply.tokens.nbytes
    return n_bytes


def _digest(data: str | bytes) -> bytes:
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()


_NOTHING = _digest("")


def _reasoning(message: JsonDict) -> bytes:
    return _digest((message.get("reasoning_content") or "").strip())


def _ids(message: JsonDict) -> tuple[str, ...]:
    return tuple(call.get("id") or "" for call in message.get("tool_calls") or ())


def _content(message: JsonDict) -> str:
    """Return the content as text, with marks of images that are the same in every process."""
    content = message["content"]
    text: str = content if isinstance(content, str) else "\n".join(content)
    return text.replace(BEGIN, "<__image_") if BEGIN in text else text


def _meaning(message: JsonDict) -> bytes:
    """Return a digest that is the same for messages of the same content and calls."""
    content = _content(message).strip()
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append((function["name"], _value(function["arguments"])))
    return _digest(json.dumps([content, calls], sort_keys=True))


def places(messages: Sequence[JsonDict], tools: object = None) -> list[bytes]:
    """Return for each of these checked messages, and for one after them, the key of the
    conversation that precedes it.

    Reasoning does not count, which many clients drop later, nor do the ids of calls. Where anything
    else differs, the tokens do as well, and no replayed reply could be resumed as a whole.
    """
    key = _digest(json.dumps(tools, sort_keys=True))
    keys = [key]
    for message in messages:
        role = message["role"]
        own = _meaning(message) if role == "assistant" else _digest(_content(message))
        head = role.encode("utf-8", "surrogatepass") + b"\0"
        key = _digest(key + head + own)
        keys.append(key)
    return keys


def _value(arguments: Any) -> Any:
    """Return the value of arguments; text that is not JSON stands for itself."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments or "{}")
    except ValueError:
        return arguments


Part: TypeAlias = str | SampledReply
"""Text as it was rendered, or a reply as it was sampled."""

_MARK = "pyctl-said-before-4c9e-"
_IN_CALL = "-call"
"""The text after a mark in the arguments of a call."""

_MAX_TAGS = 4
"""Tags of reasoning between the start of a message and the sampled text."""


def _as_call(message: JsonDict, marked: JsonDict) -> JsonDict:
    """Return ``marked`` as a call of the same tools, with the mark as an argument of the first;
    itself if it calls nothing.

    Names and ids stay: results that follow may name them.
    """
    if marked is message or not message.get("tool_calls"):
        return marked
    arguments = json.dumps({"x": marked["content"] + _IN_CALL})
    calls = []
    for call in message["tool_calls"]:
        function = {**call["function"], "arguments": arguments}
        calls.append({**call, "function": function})
        arguments = "{}"  # of all but the first
    return {"role": "assistant", "content": "", "tool_calls": calls}


class ReplayMarks:
    """A replacer of messages by the replies that ``replay`` remembers. ``starts`` are the texts of
    the tokens that start a message, ``tags`` are around reasoning, which may follow on the same
    line, and ``around`` are the texts that a template writes around content. ``call_end`` is the
    text of the token that ends a message with calls.
    """

    def __init__(
        self,
        replay: Replay,
        starts: Sequence[str],
        tags: Sequence[str] = (),
        around: Sequence[str] = (),
        call_end: str = "",
    ) -> None:
        self.replay = replay
        self._around = around
        self._call_end = call_end
        self._starts = starts
        self._tags = tags

    def mark(
        self, messages: Sequence[JsonDict], tools: object, *, is_continued: bool
    ) -> tuple[bytes, list[JsonDict], Mapping[str, SampledReply]]:
        """Return the place of the reply, the checked messages with a mark for each one that can be
        replaced, and the replies by mark.

        With ``is_continued`` the last message is the beginning of the reply. There is no place if
        no reply is remembered.
        """
        if self.replay.mode == "off" or not self._starts:
            return b"", list(messages), {}
        keys = places(messages, tools)
        n_before = len(messages) - is_continued
        marked = list(messages)
        replayed = {}
        for index, message in enumerate(messages[:n_before]):
            if message["role"] != "assistant":
                continue
            reply = self.replay.find(message, keys[index])
            if reply is None:
                continue
            mark = f"{_MARK}{index};"
            marked[index] = {"role": "assistant", "content": mark}
            replayed[mark] = reply
        return keys[n_before], marked, replayed

    def with_calls(
        self, messages: Sequence[JsonDict], marked: Sequence[JsonDict]
    ) -> list[JsonDict] | None:
        """Return ``marked`` with the mark in a call where one of ``messages`` has calls, for
        templates that refuse a result without a call before it; None where the end of such a
        message is unknown.
        """
        if not self._call_end:
            return None
        pairs = zip(messages, marked, strict=True)
        return [_as_call(message, replacement) for message, replacement in pairs]

    def parts(self, text: str, replayed: Mapping[str, SampledReply]) -> tuple[Part, ...] | None:
        """Return ``text`` with each mark, and the header before it, replaced; None if a mark is not
        where it should be.
        """
        if text.count(_MARK) != len(replayed):
            return None
        parts: list[Part] = []
        done = 0
        for mark, reply in replayed.items():
            position = text.find(mark, done)
            if text.startswith(mark + _IN_CALL, position):
                role = self._role(reply.header)
                start = text.rfind(role, done, max(position, done))
                end = text.find(self._call_end, position)
                if not role or start < 0 or end < 0:
                    return None
                parts += [text[done:start] + reply.header, reply]
                done = end
                continue
            if position < 0:
                return None
            head_end = self._before_delimiters(text, done, position)
            start = self._last_start(text, done, head_end)
            if start < 0 or self._role(text[start:head_end]) != self._role(reply.header):
                return None
            parts += [text[done:start] + reply.header, reply]
            done = position + len(mark)
            for delimiter in self._around:
                if text.startswith(delimiter, done):
                    done += len(delimiter)
                    break
        return (*parts, text[done:])

    def _before_delimiters(self, text: str, low: int, end: int) -> int:
        """Return the position before the texts around content that end at ``end``."""
        is_searched = False
        while not is_searched:
            is_searched = True
            for delimiter in self._around:
                if delimiter and text.endswith(delimiter, low, max(end, low)):
                    end -= len(delimiter)
                    is_searched = False
                    break
        return end

    def header(self, text: str, prefill: str) -> str:
        """Return the part of the prompt ``text`` that belongs to the message of the reply,
        ``prefill`` included; empty if unknown.
        """
        if self.replay.mode == "off" or any(start in prefill for start in self._starts):
            return ""
        start = self._last_start(text, 0, len(text))
        return text[start:] if start >= 0 else ""

    def _last_start(self, text: str, low: int, high: int) -> int:
        """Return the start of the last message in this part, -1 for none: a tag that starts with
        the same token is none.
        """
        for _ in range(_MAX_TAGS):
            positions = [text.rfind(start, low, high) for start in self._starts]
            last = max(positions, default=-1)
            if last < 0 or self._role(text[last:high]):
                return last
            high = last
        return -1

    def _role(self, header: str) -> str:
        """Return the role, which is on the first line. The lines that follow may differ, such as an
        empty reasoning block.
        """
        line = header.partition("\n")[0]
        positions = [line.find(tag) for tag in self._tags]
        end = min((position for position in positions if position >= 0), default=len(line))
        return line[:end]
