"""Tool calls, schemas and drafts of models that were trained to answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from pyctl.measure.server_process import ServerProcess
from tests.process.conftest import Server
from tests.real.conftest import CODE, LLAMA_SERVER, TALKERS, ask, client_of, margin_noise


def strict(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with all of ``properties`` and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


CITY = strict(city={"type": "string", "maxLength": 20}, unit={"enum": ["celsius", "fahrenheit"]})
SUM = strict(
    a={"type": "integer", "minimum": 0, "maximum": 99}, b={"type": "integer", "maximum": 9}
)
LIST = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 2, "maxItems": 3}
SCHEMAS = {"get_weather": CITY, "add": SUM}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name.replace("_", " "), "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "add"}}
QUESTIONS = (
    "What is the weather in Paris, in celsius?",
    "What is 17 + 5?",
    "Is it cold in Oslo?",
    "Add 3 and 4.",
)
Pair = tuple[Server, ServerProcess | None]


@pytest.fixture(scope="module", params=TALKERS)
def pair(
    request: pytest.FixtureRequest, start: Callable[..., Any], start_peer: Callable[..., Any]
) -> Iterator[Pair]:
    """Yield pyctl, and llama-server if there is one."""
    ours = start(request.param)
    theirs = start_peer(request.param) if LLAMA_SERVER else None
    yield ours, theirs
    ours.stop()
    if theirs:
        theirs.stop()


def answer(
    server: Server | ServerProcess, content: str, **fields: Any
) -> tuple[dict[str, Any], str]:
    """Return the greedy reply's message, and why it ended."""
    messages = [{"role": "user", "content": content}]
    reply = client_of(server).chat(messages, temperature=0, max_tokens=56, **fields)
    (choice,) = reply.body["choices"]
    return choice["message"], choice["finish_reason"]


def fits(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def is_call(message: dict[str, Any], names: set[str]) -> bool:
    """Return whether the message has calls, all of tools in ``names`` and with arguments that
    fit.
    """
    called = [call["function"] for call in message.get("tool_calls") or ()]
    return bool(called) and all(
        c["name"] in names and fits(c["arguments"], SCHEMAS[c["name"]]) for c in called
    )


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
def test_calls_are_valid_as_often_as_those_of_llama_server(pair: Pair, choice: Any) -> None:
    names = {"add"} if choice == NAMED else set(SCHEMAS)

    def n_valid(server: Server | ServerProcess) -> int:
        replies = [
            answer(server, question, tools=TOOLS, tool_choice=choice) for question in QUESTIONS
        ]
        return sum(is_call(message, names) for message, _ in replies)

    ours = n_valid(pair[0])
    theirs = n_valid(pair[1]) if pair[1] else 0
    print(
        f"{ours} of {len(QUESTIONS)} calls of {sorted(names)} are valid, of llama-server's {theirs}"
    )
    assert ours >= theirs
    assert choice == "auto" or ours == len(QUESTIONS)


def test_replies_fit_their_schemas_as_often_as_those_of_llama_server(pair: Pair) -> None:
    """A reply that is cut has no chance to."""
    asked = [(question, schema) for schema in (CITY, SUM, LIST) for question in QUESTIONS[:2]]

    def shares(server: Server | ServerProcess) -> tuple[int, int]:
        """Return the number of replies that ended, and the number of those that fit."""
        replies = []
        for question, schema in asked:
            form = {
                "type": "json_schema",
                "json_schema": {"name": "it", "strict": True, "schema": schema},
            }
            replies.append((answer(server, question, response_format=form), schema))
        ended = [(message, schema) for (message, reason), schema in replies if reason == "stop"]
        return len(ended), sum(fits(message["content"], schema) for message, schema in ended)

    n_ended, n_fit = shares(pair[0])
    print(f"{n_fit} of {n_ended} replies that ended fit their schema, of {len(asked)}")
    assert n_fit == n_ended > len(asked) / 2
    assert n_fit >= (shares(pair[1])[1] if pair[1] else 0)


@pytest.mark.parametrize("name", TALKERS)
def test_drafts_of_a_rewriting_change_nothing_but_near_ties(
    start: Callable[..., Server], name: str
) -> None:
    """Accepted drafts change a greedy reply only where rounding can exchange the two best."""
    lines = CODE if name == "coder" else CODE[:200]
    asked = [
        {
            "role": "user",
            "content": f"Write this again, with litres named gallons:\n\n```python\n{lines}```",
        }
    ]
    found = {}
    margins = {}
    for source in ("none", "ngram-map-k", "cache"):
        server = start(name, "--spec-type", source, "-np", "1")
        timings = server.chat(asked, max_tokens=160).timings
        n_accepted = timings.get("draft_n_accepted", 0)
        found[source] = ask(server, asked, 160, cache_prompt=False)
        server.stop()
        margins[source] = found["none"].near_tie(found[source])
        print(
            f"{name} {source}: {n_accepted} drafts accepted, parts at a margin of {margins[source]}"
        )
        assert (source == "none") == (n_accepted == 0)
    cold = [(asked, found["none"])]
    noise = margin_noise(start, (name, "--spec-type", "none", "-np", "1"), cold, 160)
    print(f"{name}: noise {noise:.3f}")
    assert [
        source for source, margin in margins.items() if margin is not None and margin > noise
    ] == []
