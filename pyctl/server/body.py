"""Typed request bodies, read with llama-server's tolerance: null is absent, unknown names are ignored.

A body declares its fields with their types; what a type does not say (a range, other names) stands beside the field:

    class Greeting(Body):
        loud: bool = False
        times: Annotated[int, Integer(low=1), Names("times", "n")] = 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from pyctl.errors import RequestError
from pyctl.limit import limit

__all__ = [
    "INT32_MAX",
    "Body",
    "ControlBody",
    "DetokenizeBody",
    "EmbeddingsBody",
    "Flattened",
    "Integer",
    "Names",
    "Nested",
    "PinBody",
    "RerankBody",
    "SequenceFileBody",
    "TextsBody",
    "TokenizeBody",
    "at_most",
    "boolean",
    "items",
    "json_object",
    "number",
    "others",
    "parse_json",
    "parse_object",
    "string",
    "strings",
]

INT32_MAX = 2**31 - 1

_MAX_SIGNS = {
    (b",",): (limit(1_500_000, "commas of a body, which part its values", "400", "request"), "commas"),
    (b":",): (limit(150_000, "colons of a body, which stand behind its keys", "400", "request"), "colons"),
    (b"[", b"{"): (limit(300_000, "brackets that a body opens", "400", "request"), "brackets"),
}
"""A value of two bytes takes a hundred in memory, and nothing else runs while the library reads them."""

Reader: TypeAlias = Callable[[Any, str], Any]
"""Makes a field of a value, which is not null, and of its name for errors. Raises RequestError."""

B = TypeVar("B", bound="Body")


class Names(tuple[str, ...]):
    """What a field is called in JSON, if not as in Python; of several, the first that is present counts."""

    def __new__(cls, *names: str) -> Names:
        return super().__new__(cls, names)


@dataclass(frozen=True)
class Integer:
    """Reads a number without its fraction; outside of [low, high] it is refused.

    With ``is_limit``, more than ``high`` is taken as that: for "as many as you like", clients write what they can.
    """

    low: int | None = None
    high: int = INT32_MAX
    is_limit: bool = False

    def __call__(self, value: Any, name: str) -> int:
        number(value, name)
        if self.is_limit:
            value = min(value, self.high)
        if (self.low is not None and value < self.low) or value > self.high:
            raise out_of_range(name, value, "-inf" if self.low is None else self.low, self.high)
        return int(value)


@dataclass(frozen=True)
class Nested:
    """Reads an object as a body."""

    body: type[Body]

    def __call__(self, value: Any, name: str) -> Body:
        return self.body.of(json_object(value, name))


@dataclass(frozen=True)
class Flattened:
    """Makes a field of the whole object that it stands in."""

    read: Callable[[Mapping[str, Any]], Any]


def out_of_range(name: str, value: object, low: object, high: object) -> RequestError:
    """What to raise for a number that may not be."""
    return RequestError(f"'{name}' must be in [{low}, {high}], not {value}")


def boolean(value: Any, name: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise RequestError(f"'{name}' must be true or false")
    return value


def number(value: Any, name: str) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"'{name}' must be a number")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"'{name}' is too large a number") from None


def string(value: Any, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise RequestError(f"'{name}' must be a string")
    return value


def strings(value: Any, name: str) -> tuple[str, ...]:
    """A list of strings; a single string is a list of one."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"'{name}' must be a string or a list of strings")
    return tuple(value)


def at_most(most: int, n: int, name: str, of: str = "entries") -> None:
    """Raise RequestError if the field has more than ``most``."""
    if n > most:
        raise RequestError(f"'{name}' must have at most {most} {of}, not {n}")


def json_object(value: Any, name: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise RequestError(f"'{name}' must be an object")
    return value


def items(value: Any, name: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise RequestError(f"'{name}' must be a list")
    return value


def _as_it_is(value: Any, name: str) -> Any:
    return value


_READERS: dict[object, Reader] = {
    bool: boolean,
    int: Integer(),
    float: number,
    str: string,
    tuple[str, ...]: strings,
    dict[str, Any]: json_object,
    list[Any]: items,
}


class _Field(NamedTuple):
    names: tuple[str, ...]
    read: Reader | Flattened


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object with known members."""

    @classmethod
    def of(cls: type[B], values: Mapping[str, Any]) -> B:
        """The body that ``values`` say. Raises RequestError."""
        found: dict[str, Any] = {}
        for field, (names, read) in _fields(cls).items():
            if isinstance(read, Flattened):
                found[field] = read.read(values)
                continue
            for name in names:
                value = values.get(name)
                if value is not None:
                    found[field] = read(value, name)
                    break
        return cls(**found)

    @classmethod
    def parse(cls: type[B], body: bytes) -> B:
        """The same of JSON text."""
        return cls.of(parse_object(body))

    @classmethod
    def names(cls) -> frozenset[str]:
        """All names in JSON."""
        return frozenset(name for field in _fields(cls).values() for name in field.names)


@cache
def _fields(body: type[Body]) -> dict[str, _Field]:
    return {name: _field(name, hint) for name, hint in get_type_hints(body, include_extras=True).items()}


def _field(name: str, hint: Any) -> _Field:
    names: tuple[str, ...] = (name,)
    read: Reader | Flattened | None = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        for extra in extras:
            if isinstance(extra, Names):
                names = extra
            else:
                read = extra
    if read is None:
        kinds = [kind for kind in get_args(hint) if kind is not type(None)] if type(None) in get_args(hint) else [hint]
        read = _as_it_is if kinds[0] is Any else _READERS[kinds[0]]
    return _Field(names, read)


_BOM = b"\xef\xbb\xbf"
"""What .NET and PowerShell write before UTF-8."""


def parse_json(body: bytes) -> Any:
    """The value that ``body`` is the JSON text of, with a byte order mark or without. Raises RequestError."""
    for signs, (most, name) in _MAX_SIGNS.items():
        if sum(body.count(sign) for sign in signs) > most:
            raise RequestError(f"the body has more than {most} {name}")
    if not body:
        raise RequestError("the body is empty, it must be JSON")
    try:
        return msgspec.json.decode(body.removeprefix(_BOM))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def parse_object(body: bytes) -> dict[str, Any]:
    """The same, which must be an object."""
    values = parse_json(body)
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    return values


def others(values: Mapping[str, Any], body: type[Body], ignored: frozenset[str]) -> dict[str, Any]:
    """What of ``values`` is neither a field of ``body`` nor ``ignored``, to be passed on to another body."""
    own = body.names() | ignored
    return {name: value for name, value in values.items() if name not in own}


class TokenizeBody(Body, frozen=True):
    """POST /tokenize"""

    content: Any = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body, frozen=True):
    """POST /detokenize"""

    tokens: Any = None


class EmbeddingsBody(Body, frozen=True):
    """POST /embeddings and /v1/embeddings"""

    input: Any = None
    content: Any = None
    encoding_format: str = "float"
    embd_normalize: Annotated[int | None, Integer(low=-1)] = None
    model: str | None = None


class RerankBody(Body, frozen=True):
    """POST /rerank; ``texts`` in place of ``documents`` asks for the answer of Text Embeddings Inference."""

    query: Any = None
    documents: Any = None
    texts: Any = None
    top_n: Annotated[int | None, Integer(low=0, is_limit=True)] = None
    return_text: bool = False
    model: str | None = None


class SequenceFileBody(Body, frozen=True):
    """POST /slots/{id}?action=save and restore"""

    filename: Any = None


class NewConversationBody(Body, frozen=True):
    """POST /v1/conversations, and of one there is the metadata"""

    items: Any = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class PinBody(Body, frozen=True):
    """POST /cache/pin"""

    id: Any = None
    pinned: bool = True


class TextsBody(Body, frozen=True):
    """POST /page/markdown"""

    texts: Any = None


class ControlBody(Body, frozen=True):
    """POST /v1/chat/completions/control"""

    id: str = ""
    action: str = ""
