"""All sources of drafts at once, behind a real server: many clients, grammars, stops,
probabilities, and a restart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Server

ALL = "ngram-simple,ngram-map-k,ngram-mod,cache,draft-mtp"
LIST = 'root ::= "[" [a-z]+ ("," [a-z]+)* "]"'
TEXT = "def area(x):\n    return width(x) * height(x)\n\n"


def completed(server: Server, prompt: str, n: int = 60, **fields: Any) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "n_predict": n,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        **fields,
    }
    return dict(server.client.post_json("/completion", body))


def drafts_of(reply: dict[str, Any]) -> tuple[int, int]:
    timings = reply["timings"]
    return timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)


@pytest.mark.parametrize("flags", [["--exact"], []])
@pytest.mark.parametrize("name", ["tiny-hybrid-nextn", "tiny-moe-nextn"])
def test_clients_side_by_side_get_what_they_asked_for(
    start: Callable[..., Server], name: str, flags: list[str]
) -> None:
    """Four sequences and too few cells, each reply with limits of its own."""
    drafts = ("--spec-type", ALL, "--spec-ngram-simple-size-n", "2")
    server = start(name, *drafts, "-np", "4", "-c", "2048", *flags)
    whole = completed(server, TEXT * 4, 90)["content"]
    word = whole[30:33]

    def one(i: int) -> tuple[int, dict[str, Any]]:
        prompt = TEXT * (3 + i % 5) + str(i % 3)
        kinds: list[dict[str, Any]] = [
            {"n": 200 + i},
            {"grammar": LIST, "n": 50, "ignore_eos": False},
            {"n_probs": 3, "temperature": 0.7, "seed": i},
            {"stop": [word], "n": 300},
            {"repeat_penalty": 1.3, "logit_bias": [[70, -100.0]]},
            {"post_sampling_probs": True, "n_probs": 2, "temperature": 0.6},
        ]
        return i, completed(server, prompt, **kinds[i % 6])

    with ThreadPoolExecutor(12) as pool:
        replies = dict(pool.map(one, range(36)))
    for i, reply in replies.items():
        tokens = reply["tokens"]
        drafted = drafts_of(reply)
        assert drafted[1] <= min(drafted[0], reply["tokens_predicted"])
        if i % 6 == 0:
            assert len(tokens) == 200 + i
        elif i % 6 == 1:
            assert re.fullmatch(r"\[[a-z]*(,[a-z]+)*,?\]?", reply["content"]), reply["content"]
        elif i % 6 == 2:
            probs = reply["completion_probabilities"]
            assert [each["id"] for each in probs] == tokens
            assert all(each["logprob"] < 0 and len(each["top_logprobs"]) == 3 for each in probs)
        elif i % 6 == 3:
            assert word not in reply["content"]
        elif i % 6 == 4:
            assert 70 not in tokens
        else:
            probs = reply["completion_probabilities"]
            assert [each["id"] for each in probs] == tokens
            assert all(0 < each["prob"] <= 1 for each in probs)
    if flags:
        assert sum(drafts_of(reply)[1] for reply in replies.values()) > 100
    assert server.client.get_json("/health") == {"status": "ok"}
    assert not re.search(r"Traceback|internal error|draft source", server.log()), server.log()
    assert server.stop() == 0


@pytest.mark.parametrize("small", ["tiny-dense", "tiny-hybrid"])
def test_a_small_model_drafts_beside_the_others(
    start: Callable[..., Server], model_path: Callable[[str], Path], small: str
) -> None:
    """For four at once, with too few cells for all."""
    types = "ngram-simple,cache,draft-simple"
    flags = ["--spec-type", types, "-md", str(model_path(small)), "--exact", "-np", "4"]
    server = start("tiny-hybrid", *flags, "-c", "2048")
    alone = completed(server, TEXT * 8, 150, cache_prompt=False)
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(lambda i: completed(server, TEXT * (3 + i % 5) + str(i % 3), 250), range(16))
        )
    assert all(len(reply["tokens"]) == 250 for reply in replies)
    again = completed(server, TEXT * 8, 150, cache_prompt=False)
    assert again["tokens"] == alone["tokens"]
    assert all(drafts_of(reply)[0] > 0 for reply in replies)
    assert not re.search(r"Traceback|internal error|draft source", server.log()), server.log()
