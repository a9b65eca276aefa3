"""Several replies to one prompt."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.engine.sampling import RANDOM_SEED
from tests.client import HI
from tests.unit.server.fake import Bench, play


@pytest.mark.parametrize("name", ["n", "n_cmpl"])
def test_each_reply_has_its_index_and_its_seed(name: str) -> None:
    bench = Bench(play("x", "y"))
    body = bench.chat(**{name: 3, "seed": 7, "id_slot": 0})
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [
        (index, "xy") for index in range(3)
    ]
    assert [request.sampling.seed for request in bench.worker.requests] == [7, 8, 9]
    assert [request.seq for request in bench.worker.requests] == [0, -1, -1]
    assert all(
        request.prompt.tokens.tolist() == bench.worker.requests[0].prompt.tokens.tolist()
        for request in bench.worker.requests
    )


def test_a_random_seed_stays_random() -> None:
    bench = Bench(play("x"))
    bench.chat(n=2)
    assert [request.sampling.seed for request in bench.worker.requests] == [RANDOM_SEED] * 2


def test_a_stream_tells_the_replies_apart() -> None:
    *chunks, end = Bench(play("x", "y")).chat_stream(n=2)
    assert end == "[DONE]"
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["delta"] for choice in own] == [
            {"role": "assistant", "content": None},
            {"content": "x"},
            {"content": "y"},
            {},
        ]
        assert own[-1]["finish_reason"] == "stop"


def test_several_prompts_with_several_replies_each() -> None:
    bench = Bench(play("x"))
    bodies = bench.post("/completion", {"prompt": ["one", "two"], "n": 2, "seed": 5}).json()
    assert [
        (body["index"], body["prompt"], body["generation_settings"]["seed"]) for body in bodies
    ] == [
        (0, "one", 5),
        (1, "one", 6),
        (2, "two", 5),
        (3, "two", 6),
    ]
    body = bench.post("/v1/completions", {"prompt": "one", "n": 2}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]


@pytest.mark.parametrize(
    ("path", "fields", "n_prompt", "n_choices"),
    [
        ("/v1/chat/completions", {"messages": HI, "n": 1}, None, 1),
        ("/v1/chat/completions", {"messages": HI, "n": 3}, None, 3),
        ("/v1/completions", {"prompt": "four", "n": 1}, 4, 1),
        ("/v1/completions", {"prompt": "four", "n": 2}, 4, 2),
        ("/v1/completions", {"prompt": ["four", "eleven beds"]}, 15, 2),
        ("/v1/completions", {"prompt": ["four", "four"], "n": 2}, 8, 4),
    ],
)
def test_usage_counts_all_replies_and_each_prompt_once(
    path: str, fields: dict[str, Any], n_prompt: int | None, n_choices: int
) -> None:
    """The usage adds up the tokens of all replies, and those of a prompt once, however many replies
    it has; a stream ends with the same usage.
    """
    bench = Bench(play("x", "y", cached=2))
    usage = bench.post(path, fields).json()["usage"]
    n_prompt = len(bench.worker.requests[0].prompt) if n_prompt is None else n_prompt
    counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    assert counts == (n_prompt, 3 * n_choices, n_prompt + 3 * n_choices)
    n_prompts = len({id(request.prompt) for request in bench.worker.requests})
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 2 * n_prompts,
        "cache_write_tokens": 0,
    }
    *chunks, end = bench.stream(path, {**fields, "stream_options": {"include_usage": True}})
    assert end == "[DONE]"
    assert [chunk["usage"] for chunk in chunks if "usage" in chunk] == [usage]
    assert "usage" in chunks[-1]
    assert n_choices == 1 or chunks[-1]["choices"] == []
    if n_choices > 1:
        assert not any("usage" in chunk for chunk in bench.stream(path, fields)[:-1])


@pytest.mark.parametrize("prompt", ["one ", [111, 110, 101, 32], ["one ", "one "]])
def test_a_completion_echoes_its_prompt(prompt: Any) -> None:
    bench = Bench(play("x", "y"))
    body = bench.post("/v1/completions", {"prompt": prompt, "echo": True, "n": 2}).json()
    assert {choice["text"] for choice in body["choices"]} == {"one xy"}
    *chunks, _ = bench.stream("/v1/completions", {"prompt": prompt, "echo": True})
    first = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == 0]
    assert first == ["one x", "y", ""]
    *chunks, _ = Bench(play(stop="limit")).stream(
        "/v1/completions", {"prompt": "one ", "echo": True, "max_tokens": 0}
    )
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["one "]
