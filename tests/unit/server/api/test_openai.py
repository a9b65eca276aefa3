from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from pyctl.requests.reply_settings import ReplySettings
from pyctl.server.server_settings import ServerSettings
from tests.client import HI
from tests.unit.chat import toy
from tests.unit.server.fake import Bench, play

TIMINGS = {
    "cache_n": 16,
    "prompt_n": 5,
    "prompt_ms": 2.0,
    "prompt_per_token_ms": 0.4,
    "prompt_per_second": 2500.0,
    "predicted_n": 3,
    "predicted_ms": 3.0,
    "predicted_per_token_ms": 1.5,
    "predicted_per_second": 2000.0 / 3.0,
    "lookup_ms": 0.0,
    "restore_ms": 0.0,
    "save_ms": 0.0,
}
N_PROMPT = 21


def test_a_whole_reply() -> None:
    """A chat completion has exactly the fields of OpenAI's API and llama-server's timings, and the
    header has the share of the cache.
    """
    bench = Bench(play("Hello", " there", cached=16, source="ram"))
    response = bench.post("/v1/chat/completions", {"messages": HI, "model": "whatever"})
    body = response.json()
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    assert response.headers["x-pyctl-cache"] == "source=ram; cached=16; evaluated=5"
    assert body["choices"] == [
        {
            "finish_reason": "stop",
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there"},
        }
    ]
    assert body["usage"] == {
        "completion_tokens": 3,
        "prompt_tokens": N_PROMPT,
        "total_tokens": N_PROMPT + 3,
        "prompt_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["timings"] == TIMINGS
    assert body["object"] == "chat.completion"
    assert body["model"] == "toy-1"
    assert body["system_fingerprint"] == "b1-toy"
    assert body["id"].startswith("chatcmpl-")
    assert len(body["id"]) == len("chatcmpl-") + 32
    assert isinstance(body["created"], int)
    prompt = bench.worker.requests[0].prompt
    assert bench.tokenizer.detokenize(prompt.tokens.tolist()).endswith(
        b"Hi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.boundaries == (10,)


def test_the_path_without_version_is_the_same() -> None:
    response = Bench(play("x")).post("/chat/completions", {"messages": HI})
    assert response.json()["choices"][0]["message"]["content"] == "x"


def test_a_stream() -> None:
    """A stream has the role, one event for each piece with text, the reason of its end, and
    `[DONE]`; only the last event has timings.
    """
    bench = Bench(play("Hel", "", "lo", cached=16, source="live", stop="limit"))
    response = bench.post("/v1/chat/completions", {"messages": HI, "stream": True})
    assert response.headers["x-pyctl-cache"] == "source=ram; cached=16; evaluated=5"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, end = bench.chat_stream()
    assert end == "[DONE]"
    assert [chunk["choices"][0] for chunk in chunks] == [
        {"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}},
        {"finish_reason": None, "index": 0, "delta": {"content": "Hel"}},
        {"finish_reason": None, "index": 0, "delta": {"content": "lo"}},
        {"finish_reason": "length", "index": 0, "delta": {}},
    ]
    assert [("timings" in chunk, "usage" in chunk) for chunk in chunks] == [(False, False)] * 3 + [
        (True, False)
    ]
    assert {type(value) for value in chunks[-1]["timings"].values()} == {int, float}
    assert (
        len({(chunk["id"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    )
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_is_a_chunk_of_its_own_with_the_timings() -> None:
    *_, last, usage, _ = Bench(play("x")).chat_stream(stream_options={"include_usage": True})
    assert last["choices"][0]["finish_reason"] == "stop"
    assert "timings" not in last
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert usage["timings"]["predicted_n"] == 2


def test_a_reply_without_a_word_still_has_its_role() -> None:
    first, last, _ = Bench(play()).chat_stream()
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert last["choices"][0]["finish_reason"] == "stop"


def test_progress_and_timings_per_token() -> None:
    """Progress of the prompt comes before the role, from the cached tokens to all, and timings per
    token count up.
    """
    *chunks, last, _ = Bench(play("a", "b", cached=16)).chat_stream(
        return_progress=True, timings_per_token=True
    )
    assert [chunk.get("prompt_progress") for chunk in chunks] == [
        {"total": N_PROMPT, "cache": 16, "processed": 16, "time_ms": 0},
        {"total": N_PROMPT, "cache": 16, "processed": N_PROMPT, "time_ms": 2},
        None,
        None,
        None,
    ]
    role, a, b = chunks[2:]
    assert "timings" not in role
    assert a["timings"]["predicted_n"] == 1
    assert b["timings"]["predicted_n"] == 2
    assert b["timings"]["cache_n"] == 16
    assert b["timings"]["prompt_n"] == 5
    assert b["timings"]["prompt_ms"] == 2.0
    assert last["timings"]["predicted_n"] == 3


def deltas(chunks: list[Any]) -> list[dict[str, str]]:
    found = [chunk["choices"][0]["delta"] for chunk in chunks if chunk != "[DONE]"]
    return [delta for delta in found if delta and "role" not in delta]


def test_reasoning_of_a_template_that_opens_it() -> None:
    bench = Bench(play("\nhm", "\n</th", "ink>", "\n\nYes", "."), toy.THINKING)
    reply = bench.chat()
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hm\n",
    }
    *_, usage, _ = bench.chat_stream(stream_options={"include_usage": True})
    for body in (reply, usage):
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert deltas(bench.chat_stream()) == [
        {"reasoning_content": "hm"},
        {"reasoning_content": "\n"},
        {"content": "Yes"},
        {"content": "."},
    ]


def test_reasoning_formats() -> None:
    bench = Bench(play("hm</think>", "Yes"), toy.THINKING)
    inside = {"role": "assistant", "content": "<think>\nhm</think>Yes"}
    for name in ("auto", "deepseek", "deepseek-legacy"):
        assert bench.chat(reasoning_format=name)["choices"][0]["message"]["content"] == "Yes"
    assert bench.chat(reasoning_format="none")["choices"][0]["message"] == inside
    assert deltas(bench.chat_stream(reasoning_format="none")) == [
        {"content": "<think>\nhm</think>"},
        {"content": "Yes"},
    ]
    assert {"reasoning_content": "hm"} in deltas(
        bench.chat_stream(reasoning_format="deepseek-legacy")
    )
    server = Bench(
        play("hm</think>", "Yes"), toy.THINKING, replies=ReplySettings(reasoning_format="none")
    )
    assert server.chat()["choices"][0]["message"] == inside


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"enable_thinking": False}, False),
        ({"think": False}, False),
        ({"thinking": {"type": "enabled"}, "reasoning": {"effort": "low"}, "think": True}, True),
        ({"thinking": {"type": None}, "reasoning": {}, "enable_thinking": None}, True),
    ],
)
def test_reasoning_is_switched_in_the_words_of_any_api(
    fields: dict[str, Any], reasons: bool
) -> None:
    bench = Bench(play("</think>Yes" if reasons else "Yes"), toy.THINKING)
    assert bench.chat(**fields)["choices"][0]["message"] == {"role": "assistant", "content": "Yes"}
    prompt = bench.tokenizer.detokenize(bench.worker.requests[-1].prompt.tokens.tolist())
    assert prompt.endswith(b"<think>\n" if reasons else b"<think>\n\n</think>\n\n")
    assert (
        bench.post("/apply-template", {"messages": HI, **fields}).json()["prompt"].encode()
        == prompt
    )


@pytest.mark.parametrize(
    "fields",
    [{"thinking": {"type": "enabled", "budget_tokens": 7}}, {"reasoning": {"max_tokens": 7}}],
)
def test_a_budget_of_reasoning_in_the_words_of_another_api(fields: dict[str, Any]) -> None:
    bench = Bench(play("</think>Yes"), toy.THINKING)
    bench.chat(**fields)
    limit = bench.worker.requests[0].reasoning
    assert limit is not None
    assert limit.n_tokens == 7


THOUGHT: Any = {"role": "assistant", "content": "", "reasoning_content": "I think"}
SAID: Any = {"role": "assistant", "content": "Well, ", "reasoning_content": "I think"}
EXPLICIT: Any = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("last", "reply", "fields", "reasoning", "content", "begun"),
    [
        ({"role": "assistant", "content": "Well, "}, "hello", {}, None, "Well, hello", True),
        ({"role": "assistant", "content": "Well, "}, "", {}, None, "Well, ", True),
        ({"role": "assistant", "content": "Well, "}, "hello", EXPLICIT, None, "Well, hello", False),
        (
            {"role": "assistant", "content": "Well, "},
            "hello",
            {**EXPLICIT, "echo": True},
            None,
            "Well, hello",
            True,
        ),
        (THOUGHT, " so.</think>Yes", {}, "I think so.", "Yes", True),
        (THOUGHT, " so.</think>Yes", EXPLICIT, "I think so.", "Yes", False),
        (SAID, "hello", {}, "I think\n", "Well, hello", True),
        (SAID, "hello", EXPLICIT, "I think\n", "Well, hello", False),
        (
            SAID,
            "hello",
            {"reasoning_format": "none"},
            None,
            "<think>\nI think\n</think>\n\nWell, hello",
            True,
        ),
        (
            THOUGHT,
            " so.</think>Yes",
            {"reasoning_format": "none"},
            None,
            "<think>\nI think so.</think>Yes",
            True,
        ),
    ],
)
def test_reply_includes_its_prefill_unless_a_stream_continues(
    last: Any, reply: str, fields: Any, reasoning: str | None, content: str, begun: bool
) -> None:
    """A whole reply contains the text that the request began. A stream does too, unless the client
    requests the continuation explicitly: then it has only the rest.
    """
    messages = [*HI, last]
    bench = Bench(play(*reply), template=toy.THINKING)
    message = bench.chat(messages=messages, **fields)["choices"][0]["message"]
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == content
    deltas = [
        event["choices"][0]["delta"]
        for event in bench.chat_stream(messages=messages, **fields)[:-1]
    ]
    streamed = {
        name: "".join(delta.get(name) or "" for delta in deltas)
        for name in ("reasoning_content", "content")
    }
    whole = {"reasoning_content": reasoning or "", "content": content}
    if begun:
        assert streamed == whole
    else:
        rest = {
            "reasoning_content": " so." if last is THOUGHT else "",
            "content": "Yes" if last is THOUGHT else reply,
        }
        assert streamed == rest


def test_the_last_reply_is_not_continued_where_the_server_is_told_so() -> None:
    bench = Bench(play("Anew"), replies=ReplySettings(prefill_assistant=False))
    body = bench.chat(messages=[*HI, {"role": "assistant", "content": "Hello"}])
    assert body["choices"][0]["message"]["content"] == "Anew"
    prompt = bench.worker.requests[0].prompt.tokens.tolist()
    assert bench.tokenizer.detokenize(prompt).endswith(b"Hello<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("can", [True, False])
def test_as_many_calls_as_the_template_can_write_unless_the_client_says(can: bool) -> None:
    """Parallel calls are allowed by default only where the template can render them in the next
    turn. The client's choice counts in either case.
    """
    calls = "messages[-1].tool_calls"
    one = (
        f"{{% if {calls} and {calls} | length > 1 %}}{{{{ raise_exception('only one') }}}}{{% "
        f"endif %}}"
    )
    bench = Bench(play("x"), template=toy.CHATML if can else one + toy.CHATML)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for asked, several in (
        ({}, can),
        ({"parallel_tool_calls": True}, True),
        ({"parallel_tool_calls": False}, False),
    ):
        bench.chat(tools=tools, **asked)
        assert (")+" in bench.worker.requests[-1].sampling.grammar) == several
        body = {"input": "Hi", "tools": [{"type": "function", "name": "f"}], **asked}
        assert bench.post("/v1/responses", body).json()["parallel_tool_calls"] == several
        assert (")+" in bench.worker.requests[-1].sampling.grammar) == several


def test_logprobs() -> None:
    """Probabilities come with the token, its bytes and the alternatives, at most as many as asked
    for, and negative infinity is a number that JSON has.
    """
    bench = Bench(play("a", "b", probs=[-0.5, -0.5, -float("inf")]))
    content = bench.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert bench.worker.requests[0].n_probs == 2
    assert content[0] == {
        "id": 97,
        "token": "a",
        "bytes": [97],
        "logprob": -0.5,
        "top_logprobs": [
            {"id": 98, "token": "b", "bytes": [98], "logprob": -0.5},
            {"id": 99, "token": "c", "bytes": [99], "logprob": -3.4028234663852886e38},
        ],
    }
    assert [entry["token"] for entry in content] == ["a", "b"]
    chunks = bench.chat_stream(logprobs=True)
    assert bench.worker.requests[1].n_probs == 20
    said = [chunk["choices"][0] for chunk in chunks[1:-2]]
    assert [choice["delta"]["content"] for choice in said] == ["a", "b"]
    assert [[entry["token"] for entry in choice["logprobs"]["content"]] for choice in said] == [
        ["a"],
        ["b"],
    ]


def test_logprobs_without_alternatives() -> None:
    """Zero alternatives still have the probability of each sampled token, and null has none."""
    bench = Bench(play("a", "b", probs=[-0.5, -1.0]))
    content = bench.chat(logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"]
    assert [(entry["logprob"], entry["top_logprobs"]) for entry in content] == [
        (-0.5, []),
        (-0.5, []),
    ]
    chunks = bench.chat_stream(logprobs=True, top_logprobs=0)
    assert (
        sum(len(each["choices"][0].get("logprobs", {}).get("content", ())) for each in chunks[1:-2])
        == 2
    )
    text = bench.post("/v1/completions", {"prompt": "x", "logprobs": 0}).json()["choices"][0]
    assert [entry["top_logprobs"] for entry in text["logprobs"]["content"]] == [[], []]
    assert (
        bench.post("/v1/completions", {"prompt": "x", "logprobs": None}).json()["choices"][0][
            "logprobs"
        ]
        is None
    )


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_verbose_shows_the_prompt(server: bool, asked: bool | None) -> None:
    shown = (
        Bench(play("x"), settings=ServerSettings(is_verbose=server))
        .chat(verbose=asked)
        .get("__verbose", {})
    )
    whole = {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "content": "x"}
    is_verbose = server if asked is None else asked
    assert {name: shown.get(name) for name in whole} == (
        whole if is_verbose else dict.fromkeys(whole)
    )


def test_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(play("a", "b", cached=16, source="ram"))
    for stream in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="pyctl.server"):
            bench.post("/v1/chat/completions", {"messages": HI, "stream": stream})
        (line,) = [
            record.getMessage() for record in caplog.records if record.name == "pyctl.server"
        ]
        for part in ("chat ", " 21 tokens", " 16 from RAM", " 5 evaluated", " first ", " 3 at "):
            assert part in line


@pytest.mark.parametrize(
    "name", ["max_tokens", "max_completion_tokens", "n_predict", "thinking_budget_tokens"]
)
def test_as_many_tokens_as_a_client_can_write_is_no_limit(name: str) -> None:
    bench = Bench(play("x"))
    for value in (2**31, 9007199254740991, 10**30, 1e300):
        assert (
            bench.post("/v1/chat/completions", {"messages": HI, name: value}).status_code == 200
        ), value
    if name != "thinking_budget_tokens":
        assert {request.max_tokens for request in bench.worker.requests} == {2**31 - 1}
    assert (
        bench.post("/v1/chat/completions", {"messages": HI, "top_logprobs": 2**31}).status_code
        == 400
    )


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    bench = Bench(play("x"))
    body = b"\xef\xbb\xbf" + json.dumps({"messages": HI}).encode()
    assert bench.client.post("/v1/chat/completions", content=body).status_code == 200
    assert (
        bench.client.post("/v1/chat/completions", content=b"\xef\xbb\xbf" + body).status_code == 400
    )


def test_parts_of_a_message_that_is_continued_are_paragraphs() -> None:
    bench = Bench(play("x"))
    parts = [{"type": "text", "text": text} for text in ("One.", "Two.")]
    bench.post("/v1/chat/completions", {"messages": [*HI, {"role": "assistant", "content": parts}]})
    text = bench.tokenizer.detokenize(bench.worker.requests[0].prompt.tokens.tolist())
    assert text.endswith(b"<|im_start|>assistant\nOne.\n\nTwo.")
