"""The marks of Anthropic's ``cache_control`` as an announcement to the prefix cache.

A mark in ``tools`` or ``system`` is about the head of the prompt, one in ``messages`` or at the top
level about all of it. Without a ``ttl`` a mark announces nothing: every prompt is cached, for
longer than the five minutes that it would mean. ``evict_on_complete`` anywhere concerns the whole
request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyctl.errors import RequestError

__all__ = ["retention_fields"]

_SECONDS = {"5m": 300, "1h": 3600}

_HEAD = ("tools", "system")


def retention_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field ``cache_retention`` for the marks in the body ``values``; empty if they
    announce nothing. Raises RequestError for an unknown ``ttl``.
    """
    fields: dict[str, Any] = {}
    for name, mark in _marks(values):
        ttl = mark.get("ttl")
        if ttl is not None and not (isinstance(ttl, str) and ttl in _SECONDS):
            raise RequestError(f"'cache_control.ttl' must be {' or '.join(_SECONDS)}")
        if ttl is not None:
            part = "head_seconds" if name in _HEAD else "prompt_seconds"
            fields[part] = max(fields.get(part, 0), _SECONDS[ttl])
        if mark.get("evict_on_complete") is True:
            fields["evict_on_complete"] = True
    return fields


def _marks(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each mark with the field of the body that it is in."""
    yield from _mark_of("", values)
    for name in _HEAD:
        for block in _dicts(values.get(name)):
            yield from _mark_of(name, block)
    for message in _dicts(values.get("messages")):
        for block in _dicts(message.get("content")):
            yield from _mark_of("messages", block)
            # The result of a tool holds blocks, and those hold none that are marked.
            for inner in _dicts(block.get("content")):
                yield from _mark_of("messages", inner)


def _mark_of(name: str, block: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    mark = block.get("cache_control")
    if isinstance(mark, dict):
        yield name, mark


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))
