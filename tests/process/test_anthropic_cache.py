"""Anthropic's SDK asks why a prompt missed, changes tools and edits its context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import pytest

from tests.process.conftest import Server

pytest.importorskip("anthropic.lib.threads", reason="this version of the SDK is too old")

SYSTEM = "You answer at length. " * 60
KEY = "secret"
GREEDY = {"temperature": 0}
WAIT = {"name": "wait", "description": "Wait", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "-c", "32768", "--alias", "tiny", "--api-key", KEY, is_f32=True)


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


@anthropic.beta_tool
def look(at: Literal["door"]) -> str:
    """Look at a thing."""
    return f"{at} is red"


@anthropic.beta_tool
def listen(to: Literal["door"]) -> str:
    """Listen to a thing."""
    return f"{to} is silent"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(client: anthropic.Anthropic, *messages: Any, **fields: Any) -> Any:
    return client.beta.messages.create(
        **{
            "model": "tiny",
            "max_tokens": 4,
            "system": SYSTEM,
            "messages": list(messages) or [user("Tell me more")],
            "extra_body": GREEDY,
            **fields,
        }
    )


def result_of(use: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": use["id"]}


def after(message: Any) -> dict[str, Any]:
    return {"diagnostics": {"previous_message_id": message.id}}


FIRST: dict[str, Any] = {"diagnostics": {"previous_message_id": None}}


def test_each_reason_of_a_miss_has_its_type(client: anthropic.Anthropic) -> None:
    """A changed part is named, with the tokens that an unchanged one would have read."""
    first = ask(client, **FIRST)
    assert first.diagnostics is None
    reply = {"role": "assistant", "content": first.content}
    appended = ask(client, user("Tell me more"), reply, user("Why?"), **after(first))
    assert appended.diagnostics is None
    assert appended.usage.cache_read_input_tokens > 0
    other = ask(client, system="You are brief. " * 90, **after(appended))
    reason = other.diagnostics.cache_miss_reason
    assert reason.type == "system_changed"
    assert reason.cache_missed_input_tokens > 0
    tools = ask(client, tools=[WAIT], **after(first)).diagnostics.cache_miss_reason
    assert tools.type == "tools_changed"
    assert tools.cache_missed_input_tokens > 0
    lost = ask(client, diagnostics={"previous_message_id": "msg_unknown"})
    assert lost.diagnostics.cache_miss_reason.type == "previous_message_not_found"


def test_a_stream_begins_with_its_diagnosis(client: anthropic.Anthropic) -> None:
    first = ask(client, **FIRST)
    with client.beta.messages.stream(
        model="tiny",
        max_tokens=4,
        system=SYSTEM,
        messages=[user("Something else entirely. " * 20)],
        **after(ask(client, user("A long question. " * 200), **FIRST)),
    ) as stream:
        stream.until_done()
        message = stream.get_final_message()
    assert first.diagnostics is None
    assert message.diagnostics is not None
    assert message.diagnostics.cache_miss_reason.type == "messages_changed"


def test_a_prewarm_makes_the_first_turn_fast(client: anthropic.Anthropic) -> None:
    """The shared head is in the cache after a request for no tokens, for another first message."""
    system = "You count doors and windows. " * 60
    warmed = ask(client, user("warm"), system=system, max_tokens=0)
    assert warmed.content == []
    assert warmed.stop_reason == "max_tokens"
    assert warmed.usage.output_tokens == 0
    assert warmed.usage.cache_creation_input_tokens > 0
    used = ask(client, user("How many doors are there?"), system=system).usage
    assert used.cache_read_input_tokens > used.input_tokens + used.cache_creation_input_tokens


def test_a_side_request_leaves_nothing(client: anthropic.Anthropic) -> None:
    """Each evaluates its prompt, as nothing of it stays; a request without the mark is kept."""
    mark = {"type": "ephemeral", "evict_on_complete": True}
    fields = {"system": "You write titles. " * 80, "extra_body": {**GREEDY, "cache_control": mark}}
    for _ in range(2):
        usage = ask(client, user("A title, please"), **fields).usage
        assert usage.cache_creation_input_tokens == 0
        ask(client, user("Tell me more"))  # so that the sequence holds another conversation
        assert usage.cache_read_input_tokens < 100
    del fields["extra_body"]
    assert ask(client, user("A title, please"), **fields).usage.cache_creation_input_tokens > 0


def test_an_added_tool_is_called_and_the_head_stays(client: anthropic.Anthropic) -> None:
    tools = [look.to_dict()]
    ask(client, tools=tools, max_tokens=1)
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": WAIT}}
    reply = ask(
        client,
        user("Tell me more"),
        {"role": "system", "content": [added]},
        tools=tools,
        tool_choice={"type": "tool", "name": "wait"},
        max_tokens=256,
    )
    assert [block.name for block in reply.content if block.type == "tool_use"] == ["wait"]
    usage = reply.usage
    assert usage.cache_read_input_tokens > usage.input_tokens + usage.cache_creation_input_tokens


def test_a_tool_that_a_search_found_is_called_and_the_head_stays(
    client: anthropic.Anthropic,
) -> None:
    """Claude Code adds such a tool to ``tools``, and the result of its search refers to it."""
    head = [look.to_dict()]
    first = ask(client, tools=head, max_tokens=1)
    search = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "door"}}
    found = {"type": "tool_reference", "tool_name": "wait"}
    reply = ask(
        client,
        user("Tell me more"),
        {"role": "assistant", "content": [search]},
        {"role": "user", "content": [{**result_of(search), "content": [found]}]},
        tools=[{**WAIT, "defer_loading": True}, *head],
        tool_choice={"type": "tool", "name": "wait"},
        max_tokens=256,
    )
    assert [block.name for block in reply.content if block.type == "tool_use"] == ["wait"]
    n_first = first.usage.input_tokens + first.usage.cache_creation_input_tokens
    n_first += first.usage.cache_read_input_tokens
    assert reply.usage.cache_read_input_tokens > n_first - 64, "but for the header of a reply"


def test_the_tool_runner_adds_a_tool_to_its_thread(client: anthropic.Anthropic) -> None:
    """The SDK changes tools by a system message, since those of a thread are fixed."""
    runner = client.beta.messages.tool_runner(
        model="tiny",
        max_tokens=256,
        system="You answer at length. " * 12,
        messages=[user("What colour is the door?")],
        tools=[look],
        tool_choice={"type": "tool", "name": "look"},
        max_iterations=2,
        extra_body=GREEDY,
    )
    replies = []
    for message in runner:
        replies.append(message)
        if len(replies) == 1:
            runner.add_tools(listen)
    assert len(replies) == 2
    assert replies[0].stop_reason == "tool_use"
    assert replies[1].usage.cache_read_input_tokens > 0


def test_edits_of_the_context_are_reported(client: anthropic.Anthropic) -> None:
    """The counted tokens are those of the edited conversation, too."""
    messages: list[Any] = [user("What colour is the door?")]
    for number in range(4):
        call = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {"at": "door"}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "red " * 50}
        messages += [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 2},
        "keep": {"type": "tool_uses", "value": 1},
    }
    context = {"edits": [edit]}
    reply = ask(client, *messages, tools=[look.to_dict()], context_management=context)
    (applied,) = reply.context_management.applied_edits
    assert applied.type == "clear_tool_uses_20250919"
    assert applied.cleared_tool_uses == 3
    assert applied.cleared_input_tokens > 100
    counted = client.beta.messages.count_tokens(
        model="tiny",
        system=SYSTEM,
        messages=messages,
        tools=[look.to_dict()],
        context_management=context,
    )
    assert counted.context_management is not None
    n_cleared = counted.context_management.original_input_tokens - counted.input_tokens
    assert n_cleared == applied.cleared_input_tokens


def test_a_summary_that_is_due_is_refused(client: anthropic.Anthropic) -> None:
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 100}}
    with pytest.raises(anthropic.APIStatusError) as raised:
        ask(client, context_management={"edits": [edit]})
    assert raised.value.status_code == 501
    assert "summarise" in str(raised.value)
