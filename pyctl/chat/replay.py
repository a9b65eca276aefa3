"""Replies as the model wrote them, put back in place of what the template would make of them.

A template writes a message in its own way: arguments in its own JSON, the reasoning trimmed, and Qwen's leaves out the
reasoning before the last question of the user. From that message on the next prompt differs from what the model has in
memory. So each finished reply is remembered: its tokens, and what it means. The rule, exactly:

- A message of the assistant means the same as a reply if the content is equal but for blanks around it, and the calls
  are equal in number and order, each in name and in the value of its arguments (order of members and white space do
  not count, nor do call ids).
- ``equal``: such a message is replaced if its reasoning is equal, too, but for blanks around it. Nothing comes in that
  the client did not send, except that reasoning which it did send stays in although the template would leave it out.
- ``full``: also a message without reasoning is replaced, which puts back reasoning that the client has dropped. That
  changes what the model sees. One with other reasoning is not replaced.
- Among several replies that fit, one with the same call ids comes first, then one at the same place of the
  conversation, then the newest.
- Replaced is all from the token that begins the message to the end of what the model wrote: by the header that the
  reply had then, and by its sampled tokens. The end of the message is the template's. Where messages of the assistant
  begin with no such token, or the template cannot render one without its calls, nothing is replaced.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from sys import getsizeof
from typing import Any

from pyctl.chat.replay_log import ReplayLog, Said
from pyctl.chat.values import parse_json
from pyctl.prompt import Tokens

__all__ = ["DEFAULT_REPLAY_BYTES", "Replay", "Said"]

DEFAULT_REPLAY_BYTES = 64 << 20
"""Some 7 million tokens: weeks of an agent's work."""

_ENTRY_BYTES = 600
"""What the containers around one reply take, roughly."""


class Replay:
    """Remembers replies, the last used of together ``max_bytes``; ``mode`` is off, equal or full. Thread-safe.

    With a ``path`` they are also in that file, and those in it are remembered from the beginning.
    """

    def __init__(self, mode: str = "equal", max_bytes: int = DEFAULT_REPLAY_BYTES, path: Path | None = None) -> None:
        self.mode = mode
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards what follows
        self._said: OrderedDict[bytes, list[Said]] = OrderedDict()
        self._n_bytes = 0
        self._log = ReplayLog(path) if path is not None and mode != "off" else None
        if self._log is not None:
            for key, said in self._log.read():
                self._keep(key, said)
            if len(self._log) > max_bytes:
                self._log.replace((key, said) for key, replies in self._said.items() for said in replies)

    @property
    def n_bytes(self) -> int:
        """What is remembered takes this many bytes."""
        return self._n_bytes

    def remember(self, message: dict[str, Any], head: str, text: str, tokens: Tokens | None, place: int) -> None:
        """Keep a reply that means ``message``, an assistant message as OpenAI writes them."""
        if self.mode == "off":
            return
        said = Said(head, text, tokens, place, _ids(message), _reasoning(message))
        key = _meaning(message)
        with self._lock:
            self._keep(key, said)
            if self._log is not None:
                self._log.append(key, said)

    def find(self, message: dict[str, Any], place: int) -> Said | None:
        """The reply that ``message``, number ``place`` of a conversation, means."""
        if self.mode == "off":
            return None
        key, reasoning, ids = _meaning(message), _reasoning(message), _ids(message)
        with self._lock:
            found = [
                said
                for said in self._said.get(key, ())
                if said.reasoning == reasoning or (self.mode == "full" and reasoning == _NOTHING)
            ]
            if not found:
                return None
            self._said.move_to_end(key)
        return max(enumerate(found), key=lambda item: (item[1].ids == ids, item[1].place == place, item[0]))[1]

    def _keep(self, key: bytes, said: Said) -> None:
        others = self._said.pop(key, [])
        slot = said.place, said.ids, said.reasoning
        same = [each for each in others if (each.place, each.ids, each.reasoning) == slot]
        self._n_bytes += _charge([said]) - _charge(same)
        self._said[key] = [each for each in others if each not in same] + [said]
        while self._n_bytes > self._max_bytes:
            _, old = self._said.popitem(last=False)
            self._n_bytes -= _charge(old)


def _charge(replies: Sequence[Said]) -> int:
    """What they take in memory, roughly."""
    return sum(
        getsizeof(each.head) + getsizeof(each.text) + (0 if each.tokens is None else each.tokens.nbytes) + _ENTRY_BYTES
        for each in replies
    )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


_NOTHING = _digest("")


def _reasoning(message: dict[str, Any]) -> bytes:
    return _digest((message.get("reasoning_content") or "").strip())


def _ids(message: dict[str, Any]) -> tuple[str, ...]:
    return tuple(call.get("id") or "" for call in message.get("tool_calls") or ())


def _meaning(message: dict[str, Any]) -> bytes:
    """The same for messages of the same content and calls."""
    content = message["content"] if isinstance(message["content"], str) else "\n".join(message["content"])
    calls = [
        (call["function"]["name"], _value(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
    ]
    return _digest(json.dumps([content.strip(), calls], sort_keys=True))


def _value(arguments: Any) -> Any:
    """What arguments mean; those that are no JSON mean themselves."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments or "{}")
    except ValueError:
        return arguments
