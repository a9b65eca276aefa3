"""Replies reduced to what a client's code depends on, and the difference of two of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import httpx

__all__ = ["Reduced", "differences", "reduced"]

Reduced = dict[str, Any]
"""``status``, ``type``, ``headers``, and ``body``: for a stream a list of [event name, data], else
one value.
"""

VALUES = frozenset(
    {
        "object",
        "type",
        "role",
        "finish_reason",
        "stop_reason",
        "stop_type",
        "status",
        "code",
        "stop",
        "index",
    }
)
"""Members whose values matter everywhere: clients branch on them."""

VOLATILE = frozenset(
    {
        "id",
        "created",
        "timings",
        "system_fingerprint",
        "build_info",
        "media_marker",
        "model_path",
        "t_ms",
        "id_task",
    }
    | {"seed", "created_at", "completed_at", "time_ms", "message", "id_slot"}
)
"""Members whose values differ from run to run, or are for people."""

CORS = tuple(
    f"access-control-allow-{name}" for name in ("origin", "credentials", "methods", "headers")
)


def reduced(response: httpx.Response, body: bytes, *, cors: bool) -> Reduced:
    """Return the parts of a reply that are compared; a JSON body or the data of events as they
    are.
    """
    kind = response.headers.get("content-type", "").partition(";")[0]
    found: Reduced = {
        "status": response.status_code,
        "type": kind if body else "",
        "headers": {},
        "body": None,
    }
    if cors:
        found["headers"] = {
            name: response.headers[name] for name in CORS if name in response.headers
        }
    text = body.decode("utf-8", "replace")
    if kind == "text/event-stream":
        found["body"] = [list(event) for event in _events(text)]
    elif kind == "application/json":
        try:
            found["body"] = json.loads(text)
        except ValueError:
            found["body"] = {"": "not JSON"}
    elif kind == "text/plain" and "# TYPE" in text:
        found["body"] = _metrics(text)
    return found


def _events(text: str) -> Iterator[tuple[str, Any]]:
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name = next((line[6:].strip() for line in lines if line.startswith("event:")), "")
        data = "\n".join(line[5:].strip() for line in lines if line.startswith("data:"))
        try:
            yield name, json.loads(data)
        except ValueError:
            yield name, data


def _metrics(text: str) -> dict[str, str]:
    """Return the type of each metric by name."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE))


def differences(theirs: Reduced, ours: Reduced, show: tuple[str, ...] = ()) -> list[str]:
    """Return differences that a client can see, each as one line; llama-server first. ``show`` as
    in `Probe`.
    """
    found = [
        f"{name}: {theirs[name]} / {ours[name]}"
        for name in ("status", "type")
        if theirs[name] != ours[name]
    ]
    for name in sorted({*theirs["headers"], *ours["headers"]}):
        if theirs["headers"].get(name) != ours["headers"].get(name):
            found.append(
                f"header {name}: {theirs['headers'].get(name)} / {ours['headers'].get(name)}"
            )
    a = theirs["body"]
    b = ours["body"]
    if theirs["type"] == ours["type"] == "text/event-stream":
        found += _stream_differences(a, b, show)
    elif theirs["status"] == ours["status"]:
        found += _compare(a, b, "", show, shown="*" in show)
    return list(dict.fromkeys(found))


def _compare(a: Any, b: Any, path: str, show: tuple[str, ...], shown: bool) -> Iterator[str]:
    """Yield the differences of two JSON values at ``path``; ``shown`` compares values, and not only
    types and members.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            inner = f"{path}.{name}" if path else name
            if name not in b:
                yield f"missing {inner}"
            elif name not in a:
                yield f"extra {inner}"
            else:
                matters = name in VALUES or ((shown or name in show) and name not in VOLATILE)
                yield from _compare(a[name], b[name], inner, show, matters)
    elif isinstance(a, list) and isinstance(b, list):
        if shown and len(a) != len(b):
            yield f"{path}[]: {len(a)} / {len(b)} items"
        if shown and a and not isinstance(a[0], dict | list):
            if a != b:
                yield f"value of {path}: {_short(a)} / {_short(b)}"
        elif a and b:
            for left, right in zip(a, b, strict=False):
                yield from _compare(left, right, f"{path}[]", show, shown)
        elif a or b:
            yield f"{path}[]: {len(a)} / {len(b)} items"
    elif _type(a) != _type(b):
        yield f"type of {path}: {_type(a)} / {_type(b)}"
    elif shown and a != b and not (isinstance(a, float) and abs(a - b) < 1e-6):
        yield f"value of {path}: {_short(a)} / {_short(b)}"


def _type(value: Any) -> str:
    return {type(None): "null", dict: "object", list: "list"}.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _sequence(events: list[Any], show: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return the shape of each event beside one event of that shape; a run of one shape counts
    once.
    """
    lines = ((f"{name} {shape(data, show)}".strip(), [name, data]) for name, data in events)
    return [next(run) for _, run in groupby(lines, lambda each: each[0])]


def shape(value: Any, show: tuple[str, ...] = (), shown: bool = False) -> str:
    """Return keys and types, and the values that matter: {choices[{delta{content:str}}]}."""
    if isinstance(value, dict):
        parts = []
        for name in sorted(value):
            matters = name in VALUES or ((shown or name in show) and name not in VOLATILE)
            inner = shape(value[name], show, matters)
            parts.append(name + inner if inner[:1] in "{[" else f"{name}:{inner}")
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list):
        return "[" + "|".join(dict.fromkeys(shape(item, show, shown) for item in value)) + "]"
    return _short(value) if shown or value == "[DONE]" else _type(value)


def _distance(compared: tuple[Sequence[str], bool, object]) -> tuple[int, bool, int]:
    """Return the sort key of a comparison of events: the number of members that are missing or of
    another value; whether ours is like one of theirs; the number of added members.
    """
    lines, is_only_ours, _ = compared
    return sum(not line.startswith("extra ") for line in lines), not is_only_ours, len(lines)


def _stream_differences(theirs: list[Any], ours: list[Any], show: tuple[str, ...]) -> Iterator[str]:
    """Yield the events that only one of the two has, each of theirs beside the most alike of ours;
    else their order.
    """
    left = _sequence(theirs, show)
    right = _sequence(ours, show)
    only_left = [one for line, one in dict(left).items() if line not in dict(right)]
    only_right = [one for line, one in dict(right).items() if line not in dict(left)]
    for name, data in only_left:
        alike = (
            each for each in dict(right).values() if each[0] == name and type(each[1]) is type(data)
        )
        compared = (
            (list(_compare(data, each[1], "", show, "*" in show)), each in only_right, each)
            for each in alike
        )
        lines, _, other = min(compared, key=_distance, default=([], False, None))
        only_right = [each for each in only_right if each is not other]
        if not lines:
            yield f"no event {name} {shape(data, show)}".replace("  ", " ")
        yield from (f"{f'event {name}'.strip()}: {line}" for line in lines)
    yield from (
        f"extra event {name} {shape(data, show)}".replace("  ", " ") for name, data in only_right
    )
    a = [line for line, _ in left]
    b = [line for line, _ in right]
    if set(a) == set(b) and a != b:
        yield f"order of events: {len(a)} / {len(b)} runs"
