"""Replies as they were sampled, remembered by the conversation before them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from sys import getsizeof
from typing import Any

from pyctl.chat.call_formats.scan import parse_json
from pyctl.chat.images import BEGIN
from pyctl.chat.json_object import JsonDict
from pyctl.chat.replay_log import ReplayLog, SampledReply
from pyctl.prompt import Tokens
from pyctl.settings.limit import limit

__all__ = ["DEFAULT_REPLAY_BYTES", "Replay", "conversation_keys"]

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
        self._lock = threading.Lock()  # guards the members below
        self._replies: OrderedDict[bytes, list[SampledReply]] = OrderedDict()
        self._n_bytes = 0
        self._run_soon = run_soon
        self._unwritten: set[SampledReply] = set()
        maximum = max_bytes if max_file_bytes is None else max_file_bytes
        self._log = ReplayLog(path, maximum, spend) if path is not None and mode != "off" else None
        if self._log is not None:
            for key, reply in self._log.read():
                self._remember(key, reply)
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
        `conversation_keys`.
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
            self._remember(key, reply)
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

    def with_remembered_key_order(self, tools: Any) -> tuple[Any, Callable[[], None]]:
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

    def _remember(self, key: bytes, reply: SampledReply) -> None:
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


def conversation_keys(messages: Sequence[JsonDict], tools: object = None) -> list[bytes]:
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
