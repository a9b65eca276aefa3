"""Random bodies to every endpoint: each gets an answer, and never a 5xx."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.client import HI
from tests.model.fuzz.cases import fuzzed
from tests.unit.server.fake import Bench

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
CALLED: list[Any] = [
    *HI,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]},
]
FEW = {"max_tokens": 2}
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 4,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 3,
    "n_probs": 2,
    "logit_bias": [[1, 0.5]],
    "stop": ["a", "bc"],
    "samplers": ["top_k", "temp"],
    "dry_multiplier": 0.5,
    "dry_sequence_breakers": ["x"],
    "repeat_last_n": 8,
    "repeat_penalty": 1.1,
    "mirostat": 1,
    "n": 1,
    "id_slot": 0,
    "cache_prompt": True,
    "grammar": 'root ::= "a"',
    "stream": False,
    "timings_per_token": True,
    "return_tokens": True,
    "n_keep": 1,
    "response_fields": ["content"],
    "lora": [{"id": 0, "scale": 1.0}],
    "ignore_eos": False,
    "min_keep": 1,
    "t_max_predict_ms": 1000,
    "n_indent": 1,
    "prefix_cache": "off",
    "sse_ping_interval": 5,
}
CHAT: dict[str, Any] = {
    "messages": HI,
    "tools": [TOOL],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    **SAMPLING,
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "logprobs": True,
    **FEW,
    "stream_options": {"include_usage": True},
    "parallel_tool_calls": False,
    "reasoning_format": "none",
    "add_generation_prompt": True,
    "continue_final_message": False,
    "reasoning_budget_tokens": 1,
    "json_schema": {"type": "object"},
}
COMPLETION: dict[str, Any] = {"prompt": "a", **SAMPLING, **FEW, "reasoning_budget_start_tag": "x"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/chat/completions": {"messages": CALLED, **FEW},
    "/completion": COMPLETION,
    "/v1/completions": {**COMPLETION, "echo": False, "logprobs": 2},
    "/infill": {
        "input_prefix": "a",
        "input_suffix": "b",
        "input_extra": [{"text": "c", "filename": "d"}],
        **FEW,
    },
    "/v1/messages": {
        "messages": HI,
        "system": [{"type": "text", "text": "s"}],
        "stop_sequences": ["x"],
        **FEW,
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1},
        "output_config": {"format": {"type": "text"}},
    },
    "/v1/messages/count_tokens": {"messages": HI, "system": "s"},
    "/v1/responses": {
        "input": [{"role": "user", "content": "a"}],
        "max_output_tokens": 2,
        "tools": [],
        "text": {"format": {}},
        "reasoning": {"effort": "low"},
        "include": ["x"],
        "store": True,
        "previous_response_id": "",
    },
    "/v1/responses/input_tokens": {"input": "a", "instructions": "b"},
    "/tokenize": {"content": ["a", 1], "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [97, 98]},
    "/apply-template": {"messages": CALLED, "tools": [TOOL]},
    "/v1/chat/completions/input_tokens": {"messages": HI},
    "/embeddings": {"input": "a", "encoding_format": "base64"},
    "/api/chat": {
        "model": "m",
        "messages": [
            *HI,
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
                "thinking": "t",
            },
            {"role": "tool", "tool_name": "f", "content": "x"},
            {"role": "user", "content": "a", "images": ["aGk="]},
        ],
        "tools": [TOOL],
        "stream": True,
        "think": "low",
        "format": {"type": "object"},
        "options": {
            "num_predict": 2,
            "temperature": 1.0,
            "top_k": 4,
            "seed": 3,
            "stop": ["a"],
            "num_ctx": 64,
        },
        "keep_alive": "5m",
        "logprobs": True,
        "top_logprobs": 2,
        **FEW,
    },
    "/api/generate": {
        "model": "m",
        "prompt": "a",
        "suffix": "",
        "system": "s",
        "images": [],
        "raw": False,
        "template": "",
        "context": [],
        "format": "json",
        "think": False,
        "options": {
            "num_predict": 2,
            "min_p": 0.1,
            "repeat_penalty": 1.1,
            "logit_bias": [[1, 0.5]],
        },
        "keep_alive": 0,
        **FEW,
    },
    "/api/show": {"model": "m", "verbose": True},
    "/api/embed": {
        "model": "m",
        "input": ["a", "b"],
        "truncate": True,
        "dimensions": 2,
        "options": {},
    },
    "/api/pull": {"model": "m"},
    "/lora-adapters": {"x": 1},
    "/slots/0?action=save": {"filename": "x"},
    "/cache/pin": {"id": "x", "pinned": True},
    "/v1/chat/completions/control": {"id": "x", "action": "y"},
    "/props": {},
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from(
        [
            2**31,
            -(2**31),
            2**63,
            2**64,
            0.5,
            -0.1,
            1e308,
            129,
            "",
            "a",
            "\0",
            "a" * 5000,
            "é\ud7ff",
            "auto",
        ]
    ),
    st.text(max_size=5),
)
VALUES = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "text",
                    "role",
                    "content",
                    "name",
                    "function",
                    "schema",
                    "id",
                    "x",
                    "arguments",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)
LENGTHS = {"max_tokens", "n_predict", "max_output_tokens", "max_completion_tokens", "n"}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return a path, and a body that is right but for some members, or bytes that are no JSON."""
    path = draw(st.sampled_from(sorted(BODIES)))
    known = BODIES[path]
    body = dict(known)
    for name in known:
        if name not in LENGTHS and draw(st.integers(0, 3)) == 0:
            del body[name]
    for _ in range(draw(st.integers(0, 3))):
        target: Any = body
        name = draw(st.sampled_from([*known, "unknown"]))
        if name in LENGTHS:
            continue
        # somewhere within a member, or the member itself
        if isinstance(target.get(name), list) and target[name] and draw(st.booleans()):
            changed = list(target[name])
            at = draw(st.integers(0, len(changed) - 1))
            if isinstance(changed[at], dict) and changed[at] and draw(st.booleans()):
                changed[at] = {
                    **changed[at],
                    draw(st.sampled_from(sorted(changed[at]))): draw(VALUES),
                }
            else:
                changed[at] = draw(VALUES)
            target[name] = changed
        elif isinstance(target.get(name), dict) and target[name] and draw(st.booleans()):
            target[name] = {
                **target[name],
                draw(st.sampled_from(sorted(target[name]))): draw(VALUES),
            }
        else:
            target[name] = draw(VALUES)
    text = json.dumps(body).encode()
    kind = draw(st.integers(0, 19))
    if kind == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=4)) + text[at + draw(st.integers(0, 3)) :]
    elif kind == 1:
        text = draw(st.binary(max_size=30))
    elif kind == 2:
        text = json.dumps(draw(VALUES)).encode()
    return path, text


_BENCH: list[Bench] = []


@fuzzed
@given(requests())
def test_any_body_is_answered(asked: tuple[str, bytes]) -> None:
    path, body = asked
    if not _BENCH or not _BENCH[0].worker._thread.is_alive():
        _BENCH[:] = [Bench()]
    response = _BENCH[0].client.post(path, content=body)
    assert response.status_code in (200, 400, 404, 413, 501), (path, body, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error if path.startswith("/api/") else error["message"]
