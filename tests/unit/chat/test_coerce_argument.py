from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.call_formats.scan import coerce_argument
from pyctl.chat.tools import ALL_TYPES
from tests.effort import examples


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", {"integer"}, 12),
        ("12", {"string"}, "12"),
        ("12", {"string", "integer"}, 12),
        ("12", {"string", "null"}, "12"),
        (" 1e3 ", {"number", "integer"}, 1000.0),
        ("1.0", {"integer"}, 1.0),
        ("twelve", {"integer"}, "twelve"),
        ("True", {"boolean"}, True),
        ("None", {"null", "string"}, None),
        ("True", {"string"}, "True"),
        ("{'a': [True, 'it\\'s \"x\"', \"None\"]}", {"object"}, {"a": [True, 'it\'s "x"', "None"]}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("Infinity", {"number"}, "Infinity"),
        ("1" * 5000, {"integer"}, "1" * 5000),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("", {"object"}, ""),
    ],
)
def test_a_value_by_its_types(text: str, types: set[str], value: Any) -> None:
    assert json.loads(coerce_argument(text, types)) == value


@settings(max_examples=examples(200))
@given(
    st.text(max_size=20) | st.lists(st.sampled_from("{}[]'\",:\\ TrueNone1a\n"), max_size=20).map("".join),
    st.sets(st.sampled_from(sorted(ALL_TYPES)), min_size=1),
)
def test_it_is_always_json(text: str, types: set[str]) -> None:
    json.loads(coerce_argument(text, types))
