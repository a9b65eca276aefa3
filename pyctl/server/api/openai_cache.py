"""OpenAI's words for the prompt cache: ``prompt_cache_options``, ``prompt_cache_breakpoint`` and
``prompt_cache_key`` in requests, ``prompt_cache_diagnostics`` in replies.

A lifetime is an announcement to the prefix cache, which caches every prompt anyway: a breakpoint in
a system message is about the head of the prompt, one in another message about all of it. Without a
``ttl`` they announce nothing, since prompts stay for as long as there is room. As at OpenAI, a
request of ``mode`` explicit without a breakpoint does not use the cache. ``prompt_cache_key`` has
no effect but that replies repeat it: prefixes are found by their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pyctl.errors import RequestError
from pyctl.requests.body_reader import Body, at_most, json_object
from pyctl.requests.cache_diagnosis import MissReason, RequestRecord, RequestRecords, diagnose
from pyctl.settings.limit import limit

__all__ = ["CACHE_FIELDS", "ComparedReply", "PromptCaching"]

CACHE_FIELDS = frozenset({"prompt_cache_options", "prompt_cache_key", "prompt_cache_retention"})
"""The fields of a request's body that `PromptCaching` reads."""

MAX_KEY = limit(
    1_024, "`prompt_cache_key`, `comparison_response_id`", "400", "request", "characters"
)

_SECONDS = {"30m": 1_800, "12h": 43_200}
_DEFAULT_TTL = "30m"
_MODES = ("implicit", "explicit")
_RETENTIONS = ("in_memory", "24h")
_HEAD_ROLES = ("system", "developer")

_REASONS: dict[MissReason, str] = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "input_changed",
    "messages": "input_changed",
    "options": "reasoning_effort_changed",
}
"""OpenAI's reasons. Of the options of a template its API has the effort alone. The other reasons of
OpenAI change nothing in a prompt here.
"""


class _Options(Body, frozen=True):
    mode: str = "implicit"
    ttl: str | None = None
    prewarm: bool = False
    comparison_response_id: str | None = None


class PromptCaching(msgspec.Struct, frozen=True):
    """The cache options of a request.

    Attributes:
        options: The member ``prompt_cache_options``, None if the request has none.
        key: The ``prompt_cache_key``, None for none.
        head_seconds: The lifetime that breakpoints announce for the head of the prompt, in
            seconds; 0 for none.
        prompt_seconds: The same for the whole prompt.
        has_breakpoint: Whether any part of the input has a breakpoint.
    """

    options: _Options | None = None
    key: str | None = None
    head_seconds: int = 0
    prompt_seconds: int = 0
    has_breakpoint: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, Any], items: Any) -> PromptCaching:
        """Return the cache options of the body ``values``, whose messages or input are ``items``.
        Raises RequestError.
        """
        options = _options(values.get("prompt_cache_options"))
        _choice(values.get("prompt_cache_retention"), "prompt_cache_retention", _RETENTIONS)
        key = _short(values.get("prompt_cache_key"), "prompt_cache_key")
        requested_ttl = options.ttl if options is not None else None
        head_seconds = 0
        prompt_seconds = 0
        has_breakpoint = False
        for is_head, own_ttl in _breakpoints(items):
            has_breakpoint = True
            seconds = _SECONDS.get(own_ttl or requested_ttl or "", 0)
            if is_head:
                head_seconds = max(head_seconds, seconds)
            else:
                prompt_seconds = max(prompt_seconds, seconds)
        if options is not None and options.mode == "implicit" and options.ttl is not None:
            prompt_seconds = max(prompt_seconds, _SECONDS[options.ttl])
        return cls(options, key, head_seconds, prompt_seconds, has_breakpoint)

    @property
    def is_prewarm(self) -> bool:
        """True if the prompt is to be cached, and nothing to be generated."""
        return self.options is not None and self.options.prewarm

    @property
    def comparison_id(self) -> str:
        """The id of the reply to compare with, empty for none."""
        return (self.options is not None and self.options.comparison_response_id) or ""

    def with_chat_fields(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a ``chat`` completion with those that the cache options mean."""
        fields = dict(chat)
        if self.is_prewarm:
            for name in ("n_predict", "max_completion_tokens"):
                fields.pop(name, None)
            fields["max_tokens"] = 0
        is_explicit = self.options is not None and self.options.mode == "explicit"
        if is_explicit and not self.has_breakpoint:
            fields["cache_prompt"] = False
        announced = {"head_seconds": self.head_seconds, "prompt_seconds": self.prompt_seconds}
        retention = fields.get("cache_retention")
        if any(announced.values()) and retention is None:
            fields["cache_retention"] = announced
        return fields

    def applied(self) -> dict[str, Any]:
        """Return the members of a reply that repeat the options; empty for a request without."""
        members: dict[str, Any] = {}
        if self.key is not None:
            members["prompt_cache_key"] = self.key
        if self.options is not None:
            applied = {"mode": self.options.mode, "ttl": self.options.ttl or _DEFAULT_TTL}
            if self.comparison_id:
                applied["comparison_response_id"] = self.comparison_id
            members["prompt_cache_options"] = applied
        return members


class ComparedReply(msgspec.Struct, frozen=True):
    """A reply to a request that later ones can compare with, and that may compare with an earlier
    one.

    Attributes:
        caching: The cache options of the request.
        records: The records of earlier requests.
        record: The record of this one.
    """

    caching: PromptCaching
    records: RequestRecords
    record: RequestRecord

    def remember(self, reply_id: str) -> None:
        """Let later requests compare with this one by the id of its reply."""
        self.records.add(reply_id, self.record)

    def diagnostics(self, n_cached: int) -> dict[str, Any]:
        """Return the member ``prompt_cache_diagnostics`` of a reply, of whose prompt ``n_cached``
        tokens were restored; empty if the request compares with none.
        """
        if not self.caching.comparison_id:
            return {}
        return {"prompt_cache_diagnostics": self._diagnosis(n_cached)}

    def _diagnosis(self, n_cached: int) -> dict[str, Any]:
        earlier = self.records.find(self.caching.comparison_id, self.record.owner)
        if earlier is None:
            return {"type": "comparison_response_not_found"}
        miss = diagnose(earlier, self.record, n_cached)
        if miss is None:
            return {"type": "cache_hit"}
        reason = _REASONS.get(miss.reason)
        if reason is None:
            return {"type": "unavailable"}
        return {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": miss.n_missed,
            "comparison_reusable_tokens": earlier.n_tokens,
        }


def _options(value: Any) -> _Options | None:
    """Return the ``prompt_cache_options``; None without any. Raises RequestError."""
    name = "prompt_cache_options"
    if value is None:
        return None
    options = _Options.from_json(json_object(value, name))
    _choice(options.mode, f"{name}.mode", _MODES)
    _choice(options.ttl, f"{name}.ttl", tuple(_SECONDS))
    _short(options.comparison_response_id, f"{name}.comparison_response_id")
    return options


def _breakpoints(items: Any) -> Iterator[tuple[bool, str | None]]:
    """Yield whether each breakpoint in the messages or input ``items`` is in a system message, and
    its own lifetime, None for that of the request. Raises RequestError.
    """
    for item in _objects(items):
        is_head = item.get("role") in _HEAD_ROLES
        for name in ("content", "output"):
            for part in _objects(item.get(name)):
                mark = part.get("prompt_cache_breakpoint")
                if mark is not None:
                    yield is_head, _lifetime(mark)


def _lifetime(mark: Any) -> str | None:
    name = "prompt_cache_breakpoint"
    fields = json_object(mark, name)
    if fields.get("mode") != "explicit":
        raise RequestError(f"'{name}.mode' must be explicit")
    return _choice(fields.get("ttl"), f"{name}.ttl", tuple(_SECONDS))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _choice(value: Any, name: str, choices: tuple[str, ...]) -> str | None:
    """Return ``value``, which is None or one of ``choices``. Raises RequestError for others."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in choices:
        raise RequestError(f"'{name}' must be {' or '.join(choices)}")
    return value


def _short(value: Any, name: str) -> str | None:
    """Return ``value``, which is None or a string of at most `MAX_KEY` characters. Raises
    RequestError for others.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise RequestError(f"'{name}' must be a string")
    at_most(MAX_KEY, len(value), name, "characters")
    return value
