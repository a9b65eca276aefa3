"""Random JSON schemas: each is refused or constrains a reply to JSON, within a time limit."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyctl.chat.constraint import json_constraint
from pyctl.errors import RequestError
from pyctl.llama.loader import Loaded
from tests.model.fuzz.cases import fuzzed
from tests.model.fuzz.test_grammars import compiler_of
from tests.model.llama.sampling.grammars import allowed_by

TYPES = (
    "object",
    "array",
    "string",
    "number",
    "integer",
    "boolean",
    "null",
    "value",
    "odd",
    5,
    [],
    None,
)
NAMES = st.sampled_from(
    ["a", "b", "a b", "", '"', "\\", "é", "a" * 100, "x" * 5000, "\x00", "\ud7ff", "/~", "$ref"]
)
PATTERNS = st.one_of(
    st.text('ab\\d.[]()-^$|*+?{1,}"\n ', max_size=12),
    st.sampled_from(
        [
            "(a{1,50}){1,50}",
            "(?=a)",
            "\\1",
            "(((((((((a)))))))))",
            "[" * 500,
            "(" * 500,
            "a{99999}",
            ".*" * 50,
        ]
    ),
)
NUMBERS = st.one_of(
    st.integers(-5, 40),
    st.sampled_from([-1, 0.5, 1e300, 2**31, 2**63, 2**70, -0.0, 1e-9, 10**9, True]),
)
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, NAMES)
ANYTHING = st.recursive(
    PLAIN, lambda x: st.lists(x, max_size=3) | st.dictionaries(NAMES, x, max_size=3), max_leaves=5
)
REFERENCES = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/a~1b", "http://x", "#/$defs/a/items"]
)


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas of any keywords, whose parts are ``inner`` schemas."""
    schemas = st.lists(inner, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=3)
    known: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), max_size=3),
        "properties": named,
        "required": st.lists(NAMES, max_size=3),
        "additionalProperties": st.booleans() | inner,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "items": inner | schemas,
        "prefixItems": schemas,
        "anyOf": schemas,
        "oneOf": schemas,
        "allOf": schemas,
        "enum": st.lists(ANYTHING, max_size=4),
        "const": ANYTHING,
        "pattern": PATTERNS,
        "format": st.sampled_from(["date", "uuid", "email", "uri", "odd", "uuid4"]),
        "$ref": REFERENCES,
        "$defs": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
        **dict.fromkeys(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBERS
        ),
        **dict.fromkeys(
            ("minLength", "maxLength", "minItems", "maxItems", "minProperties"), NUMBERS
        ),
        "not": inner,
        "x-guidance": ANYTHING,
    }
    chosen = st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True)
    whole = chosen.flatmap(
        lambda names: st.fixed_dictionaries({name: known[name] for name in names})
    )
    return st.one_of(whole, whole, whole, ANYTHING)


SCHEMAS = st.recursive(keywords(st.just({})), keywords, max_leaves=8)


@fuzzed
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_any_schema_is_refused_or_binds(model: Loaded, schema: Any, seed: int) -> None:
    """Any JSON as a schema gets a clear refusal, or a grammar by which a finished reply is JSON;
    neither crashes the process that serves all clients.
    """
    ends = model.tokenizer.end_tokens()
    rng = random.Random(seed)
    said = b""
    try:
        matcher = compiler_of(model).matcher(json_constraint(schema).grammar)
        for _ in range(30):
            if matcher.is_stopped():
                break
            choices = [
                int(token)
                for token in np.flatnonzero(allowed_by(matcher, model))
                if token not in ends
            ]
            if not choices:
                break
            token = rng.choice(choices)
            matcher.consume_token(token)
            said += model.tokenizer.piece(token)
        if matcher.is_accepting() and not matcher.is_error():
            json.loads(said.decode("utf-8", "replace"), strict=False)
    except RequestError as error:
        assert str(error)  # noqa: PT017
