from __future__ import annotations

import json
from typing import Any

from tests.unit.chat import toy
from tests.unit.server.fake import Bench, play

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"properties": {"city": {"type": "string"}}}},
}
OTHER = {"type": "function", "function": {"name": "stop"}, "strict": True}
CALL = (
    "<tool_call>\n<function=look_up>\n<parameter=city>\nParis\n"
    "</parameter>\n</function>\n</tool_call>"
)
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


def message(bench: Bench, **fields: Any) -> Any:
    return bench.chat(tools=[TOOL, OTHER], **fields)["choices"][0]["message"]


def test_calls_of_a_whole_reply() -> None:
    (choice,) = Bench(play("Let me ", "see.\n\n" + CALL, "\n" + STOP)).chat(tools=[TOOL, OTHER])[
        "choices"
    ]
    assert choice["finish_reason"] == "tool_calls"
    first, second = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Let me see.\n\n"}
    assert len({first.pop("id"), second.pop("id")}) == 2
    assert first == {
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"city":"Paris"}'},
    }
    assert second == {"type": "function", "function": {"name": "stop", "arguments": "{}"}}


def test_calls_in_a_stream() -> None:
    """The first event of a call has its id and name, the others only parts of its arguments, which
    join to the whole JSON.
    """
    chunks = Bench(play(*CALL, pause=0.0)).chat_stream(tools=[TOOL])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert all(list(delta) == ["tool_calls"] for delta in deltas[1:-1])
    calls = [call for delta in deltas[1:-1] for call in delta["tool_calls"]]
    assert {call["index"] for call in calls} == {0}
    call_id = calls[0].pop("id")
    assert len(call_id) == 32
    assert calls[0] == {
        "index": 0,
        "type": "function",
        "function": {"name": "look_up", "arguments": ""},
    }
    assert all(list(call["function"]) == ["arguments"] for call in calls[1:])
    assert len(calls) > 5
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city":"Paris"}'
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_was_cut_short_ends_by_length() -> None:
    bench = Bench(play(CALL[: CALL.index("ris")], stop="limit"))
    (choice,) = bench.chat(tools=[TOOL])["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":"Pa'
    assert bench.chat_stream(tools=[TOOL])[-2]["choices"][0]["finish_reason"] == "length"


def test_text_that_is_no_call_is_content() -> None:
    text = " <tool_call>\nnothing"
    for fields in ({}, {"tool_choice": "none"}):
        assert message(Bench(play(text)), **fields) == {"role": "assistant", "content": text}
    assert message(Bench(play(CALL)), tool_choice="none") == {"role": "assistant", "content": CALL}
    assert Bench(play(CALL)).chat()["choices"][0]["message"] == {
        "role": "assistant",
        "content": CALL,
    }


def test_one_call_without_parallel_calls() -> None:
    assert len(message(Bench(play(STOP, STOP)))["tool_calls"]) == 2
    assert len(message(Bench(play(STOP, STOP)), parallel_tool_calls=False)["tool_calls"]) == 1


def test_tools_reach_the_template_as_llama_server_writes_them() -> None:
    bench = Bench(play("x"), "{{ tools | tojson if tools }}" + toy.CHATML)
    bench.chat(tools=[OTHER])
    text = bench.tokenizer.detokenize(bench.worker.requests[0].prompt.tokens.tolist()).decode()
    tool = {"type": "function", "function": {"name": "stop", "description": "", "parameters": {}}}
    assert json.loads(text[: text.index("<|im_start|>")]) == [tool]
