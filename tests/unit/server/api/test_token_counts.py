from __future__ import annotations

from typing import Any

import pytest

from pyctl.requests.text_limit import MAX_CHARS
from tests.case import Case
from tests.client import HI
from tests.unit.chat import toy
from tests.unit.server.fake import Bench, play


@pytest.fixture
def bench() -> Bench:
    return Bench(play())


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"content": "ab"}, [97, 98]),
        ({"content": "<|im_start|>"}, [256]),
        ({"content": "<|im_start|>", "parse_special": False}, list(b"<|im_start|>")),
        ({"content": "a", "add_special": True}, [257, 97]),
        ({"content": [1, "a", 2], "add_special": True}, [1, 97, 2]),
        ({"content": ["a", "b"], "add_special": True}, [257, 97, 98]),
        ({"content": ""}, []),
        ({}, []),
    ],
)
def test_tokenize(bench: Bench, fields: dict[str, Any], tokens: list[int]) -> None:
    bench.tokenizer.add_bos = True
    bench.tokenizer.bos = 257
    assert bench.post("/tokenize", fields).json() == {"tokens": tokens}


def test_pieces_are_text_or_bytes(bench: Bench) -> None:
    assert bench.post("/tokenize", {"content": "á<|im_end|>b", "with_pieces": True}).json()[
        "tokens"
    ] == [
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA1, "piece": [0xA1]},
        {"id": 257, "piece": "<|im_end|>"},
        {"id": 98, "piece": "b"},
    ]


def test_detokenize(bench: Bench) -> None:
    assert bench.post("/detokenize", {"tokens": [256, 0xC3, 0xA1]}).json() == {
        "content": "<|im_start|>á"
    }
    assert bench.post("/detokenize", {"tokens": [0xC3]}).json() == {"content": "\ufffd"}
    assert bench.post("/detokenize", {}).json() == {"content": ""}


@pytest.mark.parametrize(
    "case",
    [
        Case("/tokenize", {"content": 3}, 400, ""),
        Case("/tokenize", {"content": [10**6]}, 400, ""),
        Case("/tokenize", {"content": "a", "with_pieces": 1}, 400, ""),
        Case("/tokenize", {"content": "x" * (MAX_CHARS + 1)}, 400, ""),
        Case("/tokenize", {"content": [1, "x" * (MAX_CHARS + 1)], "with_pieces": True}, 400, ""),
        Case("/detokenize", {"tokens": "ab"}, 400, ""),
        Case("/detokenize", {"tokens": ["ab"]}, 400, ""),
        Case("/detokenize", {"tokens": [-1]}, 400, ""),
        Case("/apply-template", {}, 400, ""),
    ],
    ids=str,
)
def test_bad_input(bench: Bench, case: Case) -> None:
    case.check(bench.client)


def test_apply_template() -> None:
    bench = Bench(play(), toy.THINKING)
    head = "<|im_start|>user\nHi<|im_end|>\n"
    prompt = bench.post("/apply-template", {"messages": HI}).json()
    assert prompt == {"prompt": head + "<|im_start|>assistant\n<think>\n"}
    fields = {"messages": HI, "add_generation_prompt": False}
    assert bench.post("/apply-template", fields).json() == {"prompt": head}
    assert not bench.worker.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/input_tokens", {"messages": HI}),
        (
            "/v1/messages/count_tokens",
            {"messages": HI, "system": "s", "tools": [{"name": "f", "input_schema": {}}]},
        ),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
    ],
)
def test_tokens_are_counted_as_they_would_be_evaluated(path: str, body: dict[str, Any]) -> None:
    bench = Bench(play("x"))
    counted = bench.post(path, body).json()
    assert not bench.worker.requests
    usage = bench.post(path.rpartition("/")[0], body).json()["usage"]
    assert counted.pop("input_tokens") == usage.get("input_tokens", usage.get("prompt_tokens"))
    assert counted == ({} if "messages/" in path else {"object": "response.input_tokens"})
