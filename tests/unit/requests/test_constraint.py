"""Fields that constrain a reply, and the constraint that the engine gets."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.chat.constraint import json_constraint, reply_constraint
from pyctl.chat.reply import THINK
from pyctl.engine.sampling import Sampling
from pyctl.requests.reply_settings import ReplySettings
from tests.client import HI
from tests.unit.chat import toy
from tests.unit.server.fake import Bench, play
from tests.unit.server.parts import OPENED

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANY = {"type": "object"}
CONTROLS = {text: 256 + number for number, text in enumerate(toy.CHATML_SPECIALS)}


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_object"}, "json_schema": SCHEMA}, SCHEMA),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
            SCHEMA,
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_schema"}}, ANY),
        ({"json_schema": SCHEMA}, SCHEMA),
        ({"json_schema": {}}, ANY),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {}}, None),
        ({}, None),
    ],
)
def test_schemas(fields: dict[str, Any], schema: Any) -> None:
    bench = Bench(play("x"))
    bench.chat(**fields)
    bench.post("/completion", {"prompt": "x", **fields})
    chat, raw = (request.sampling for request in bench.worker.requests)
    assert chat.grammar == ("" if schema is None else json_constraint(schema).grammar)
    assert raw.grammar == ("" if schema is None else json_constraint(schema).grammar)


def test_where_a_schema_begins_to_bind() -> None:
    bench = Bench(play("x"), template=OPENED)
    bench.chat(json_schema=SCHEMA)
    bench.post(
        "/v1/chat/completions",
        {"messages": [*HI, {"role": "assistant", "content": '{"a"'}], "json_schema": SCHEMA},
    )
    inside, behind = (request.sampling for request in bench.worker.requests)
    assert inside.grammar == reply_constraint(SCHEMA, THINK, "reasoning", controls=CONTROLS).grammar
    constraint = reply_constraint(SCHEMA, THINK, "content", controls=CONTROLS)
    assert behind.grammar == constraint.grammar
    assert behind.grammar_prefill == '{"a"'


def test_grammars_bind_from_the_start() -> None:
    bench = Bench(play("x"), template=OPENED)
    bench.chat(grammar="root ::= [0-9]")
    bench.post("/completion", {"prompt": "x", "grammar": "root ::= [0-9]", "json_schema": SCHEMA})
    for request in bench.worker.requests:
        assert request.sampling.grammar == "root ::= [0-9]"
        assert request.sampling.grammar_prefill == ""


def test_a_grammar_of_the_server_is_replaced_by_the_requests_own_alone() -> None:
    bench = Bench(play("x"), replies=ReplySettings(sampling=Sampling(grammar="root ::= [a-z]")))
    tool = {"type": "function", "function": {"name": "f"}}
    for fields in ({}, {"tools": [tool], "tool_choice": "required"}, {"grammar": "root ::= [0-9]"}):
        bench.chat(**fields)
    grammars = [request.sampling.grammar for request in bench.worker.requests]
    assert grammars == ["root ::= [a-z]", "root ::= [a-z]", "root ::= [0-9]"]
