"""Several replies to one prompt."""

from __future__ import annotations

import pytest

from pyctl.engine.sampling import RANDOM_SEED
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
    assert [(body["index"], body["prompt"], body["generation_settings"]["seed"]) for body in bodies] == [
        (0, "one", 5),
        (1, "one", 6),
        (2, "two", 5),
        (3, "two", 6),
    ]
    body = bench.post("/v1/completions", {"prompt": "one", "n": 2}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
