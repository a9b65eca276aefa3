"""Typed access to the fields of a JSON object, with llama-server's tolerance: null is absent,
unknown names are ignored.

A body declares its fields with their types; further rules (a range, other names) are annotated:

    class Greeting(Body):
        loud: bool = False
        times: Annotated[int, Integer(low=1), Names("times", "n")] = 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from pyctl.errors import NotSupportedError, RequestError
from pyctl.requests.json_text import parse_object
from pyctl.settings.convert import INT32_MAX
from pyctl.settings.limit import limit

__all__ = [
    "MAX_NAMES",
    "Body",
    "Flattened",
    "Integer",
    "Names",
    "Reader",
    "SameAs",
    "Unsupported",
    "at_most",
    "boolean",
    "is_token",
    "items",
    "json_object",
    "mixed",
    "number",
    "others",
    "out_of_range",
    "reject_unsupported",
    "string",
    "strings",
]

MAX_NAMES = limit(256, "`response_fields`, and adapters in `lora`", "400", "request")

Reader: TypeAlias = Callable[[Any, str], Any]
"""Makes a field of a value, which is not null, and of its name for errors. Raises RequestError."""

B = TypeVar("B", bound="Body")
T = TypeVar("T")


# -- readers
# ----------------------------------------------------------------------------------


def _reader_of(kind: type[T], description: str) -> Callable[[Any, str], T]:
    """Return a reader of values of ``kind``, which errors call ``description``."""

    def read(value: Any, name: str) -> T:
        """Return ``value``, which is the field ``name``. Raises RequestError if it has another
        type.
        """
        if not isinstance(value, kind):
            raise RequestError(f"'{name}' must be {description}")
        return value

    return read


boolean = _reader_of(bool, "true or false")
string = _reader_of(str, "a string")
json_object: Callable[[Any, str], dict[str, Any]] = _reader_of(dict, "an object")
items: Callable[[Any, str], list[Any]] = _reader_of(list, "a list")


def number(value: Any, name: str) -> float:
    """Return a number. Raises RequestError for others."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"'{name}' must be a number")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"'{name}' is too large a number") from None


def strings(value: Any, name: str) -> tuple[str, ...]:
    """Return a list of strings; a single string is a list of one. Raises RequestError for
    others.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"'{name}' must be a string or a list of strings")
    return tuple(value)


def mixed(value: Any, name: str, n_vocab: int) -> list[str | int]:
    """Return a text, or a list of texts and token ids, as such a list. Raises RequestError for
    others.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(f"'{name}' must be a string or a list of strings and token ids")
    for item in value:
        if not isinstance(item, str) and not (is_token(item) and 0 <= item < n_vocab):
            raise RequestError(f"'{name}' must hold strings and token ids in [0, {n_vocab}) only")
    return value


def is_token(value: Any) -> bool:
    """Return whether ``value`` may be a token id: an integer, but not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)


class Integer(msgspec.Struct, frozen=True):
    """A reader of a number without its fraction; outside of [low, high] it is refused.

    With ``is_limit``, more than ``high`` is taken as that: for "as many as you like", clients write
    what they can.
    """

    low: int | None = None
    high: int = INT32_MAX
    is_limit: bool = False

    def __call__(self, value: Any, name: str) -> int:
        number(value, name)
        if self.is_limit:
            value = min(value, self.high)
        is_too_low = self.low is not None and value < self.low
        if is_too_low or value > self.high:
            raise out_of_range(name, value, "-inf" if self.low is None else self.low, self.high)
        return int(value)


def at_most(maximum: int, n: int, name: str, of: str = "entries") -> None:
    """Raise RequestError if the field has more than ``maximum``."""
    if n > maximum:
        raise RequestError(f"'{name}' must have at most {maximum} {of}, not {n}")


def out_of_range(name: str, value: object, low: object, high: object) -> RequestError:
    """Return the error for a number outside of its range."""
    return RequestError(f"'{name}' must be in [{low}, {high}], not {value}")


def _unchanged(value: Any, name: str) -> Any:
    return value


_READERS: dict[object, Reader] = {
    bool: boolean,
    int: Integer(),
    float: number,
    str: string,
    tuple[str, ...]: strings,
    dict[str, Any]: json_object,
    list[Any]: items,
    Any: _unchanged,
}
"""The readers by type, for fields whose annotation has none."""

# -- bodies
# ----------------------------------------------------------------------------------


class Names(tuple[str, ...]):
    """The names of a field in JSON, if not that in Python; of several, the first that is present
    counts.

    ``outer.inner`` is a member of an object.
    """

    def __new__(cls, *names: str) -> Names:
        return super().__new__(cls, names)


class Flattened(msgspec.Struct, frozen=True):
    """A reader that makes a field of the whole object around it."""

    read: Callable[[Mapping[str, Any]], Any]


class SameAs(msgspec.Struct, frozen=True):
    """The value of another field of the same body."""

    field: str


Unsupported: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Known fields that are refused: a hint for the client, and the values without an effect besides
null, false, 0 and empty ones. `SameAs` stands for the value of another field.
"""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object with known members.

    Attributes:
        unsupported: The fields that are refused if they have an effect.
    """

    unsupported: ClassVar[Unsupported] = {}

    @classmethod
    def from_json(cls: type[B], values: Mapping[str, Any]) -> B:
        """Return the body of ``values``. Raises RequestError, and NotSupportedError for a field
        that is ``unsupported``.
        """
        reject_unsupported(values, cls.unsupported)
        present: dict[str, Any] = {}
        for field_name, field in _fields(cls).items():
            if isinstance(field.read, Flattened):
                present[field_name] = field.read.read(values)
                continue
            for name in field.names:
                value = _member(values, name)
                if value is not None:
                    present[field_name] = field.read(value, name)
                    break
        return cls(**present)

    @classmethod
    def parse(cls: type[B], body: bytes) -> B:
        """Return the body of JSON text. Raises RequestError."""
        return cls.from_json(parse_object(body))

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return all names in JSON."""
        return frozenset(name for field in _fields(cls).values() for name in field.names)


def others(values: Mapping[str, Any], body: type[Body], ignored: frozenset[str]) -> dict[str, Any]:
    """Return the ``values`` that are neither a field of ``body`` nor ``ignored``, for another
    body.
    """
    own = body.names() | ignored
    return {name: value for name, value in values.items() if name not in own}


def reject_unsupported(values: Mapping[str, Any], unsupported: Unsupported) -> None:
    """Raise NotSupportedError if one of the ``unsupported`` fields has an effect."""
    for name, (hint, *idle) in unsupported.items():
        value = values.get(name)
        if not value:
            continue
        idle_values = [values.get(one.field) if isinstance(one, SameAs) else one for one in idle]
        if value not in idle_values:
            raise NotSupportedError(f"'{name}' is not supported: {hint}")


def _member(values: Mapping[str, Any], path: str) -> Any:
    """Return the member at ``path``, a name or ``outer.inner``; None without one."""
    outer, dot, inner = path.partition(".")
    value = values.get(outer)
    if not dot:
        return value
    return value.get(inner) if isinstance(value, dict) else None


class _Field(NamedTuple):
    names: tuple[str, ...]
    read: Reader | Flattened


@cache
def _fields(body: type[Body]) -> dict[str, _Field]:
    hints = get_type_hints(body, include_extras=True)
    return {name: _field(name, hints[name]) for name in body.__struct_fields__}


def _field(name: str, hint: Any) -> _Field:
    """Return the names and the reader of the field ``name``, from its annotation or from its type
    ``hint``.
    """
    names: tuple[str, ...] = (name,)
    read: Reader | Flattened | None = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        for extra in extras:
            if isinstance(extra, Names):
                names = extra
            else:
                read = extra
    return _Field(names, _reader_of_type(hint) if read is None else read)


def _reader_of_type(hint: Any) -> Reader:
    """Return the reader of values of the type ``hint``, which may be ``... | None``."""
    kind = hint
    if type(None) in get_args(hint):
        kind = next(option for option in get_args(hint) if option is not type(None))
    if isinstance(kind, type) and issubclass(kind, Body):
        return partial(_nested, body=kind)
    return _READERS[kind]


def _nested(value: Any, name: str, body: type[Body]) -> Body:
    """Return an object as a body."""
    return body.from_json(json_object(value, name))
