from __future__ import annotations

from typing import Any

import pytest

from pyctl.requests.reply_settings import ReplySettings
from tests.unit.chat.toy import chatml_tokenizer
from tests.unit.server.fake import INFO, N_CTX, Bench, play


def native(bench: Bench, **fields: Any) -> Any:
    response = bench.post("/completion", {"prompt": "Once", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def text_of(bench: Bench, index: int = -1) -> bytes:
    return bench.tokenizer.detokenize(bench.worker.requests[index].prompt.tokens.tolist())


def test_a_whole_native_reply() -> None:
    """A reply of `/completion` has exactly llama-server's fields; its options reach the engine."""
    bench = Bench(play("a\n", "b", cached=3, source="ram", stop="word", word="END"))
    body = native(bench, stop=["END", ""], n_predict=9, return_tokens=True, seed=5)
    settings = body.pop("generation_settings")
    timings = body.pop("timings")
    assert body == {
        "index": 0,
        "content": "a\nb",
        "tokens": [97, 98],
        "id_slot": 0,
        "stop": True,
        "model": "toy-1",
        "tokens_predicted": 2,
        "tokens_evaluated": 4,
        "prompt": "Once",
        "has_new_line": True,
        "truncated": False,
        "stop_type": "word",
        "stopping_word": "END",
        "tokens_cached": 5,
    }
    assert timings["cache_n"] == 3
    assert timings["prompt_n"] == 1
    assert settings["stop"] == ["END"]
    assert settings["n_predict"] == 9
    assert settings["seed"] == 5
    assert settings["top_k"] == 40
    request = bench.worker.requests[0]
    assert request.stop == ("END",)
    assert request.max_tokens == 9
    assert request.sampling.seed == 5


def test_a_native_stream() -> None:
    """Each event of a native stream has one piece with its tokens, an empty one too, and the last
    one has the settings and timings.
    """
    *chunks, last = Bench(play("a\n", "", "b")).stream("/completion", {"prompt": "Once"})
    assert chunks == [
        {
            "index": 0,
            "content": content,
            "tokens": [token],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": n,
            "tokens_evaluated": 4,
        }
        for content, token, n in (("a\n", 97, 1), ("", 120, 2), ("b", 98, 3))
    ]
    assert last["stop"] is True
    assert last["content"] == ""
    assert last["tokens"] == []
    assert last["stop_type"] == "eos"
    assert last["has_new_line"] is True
    assert last["generation_settings"]["stream"] is True
    assert last["timings"]["predicted_n"] == 4


def test_native_progress_and_timings_per_token() -> None:
    fields = {"prompt": "Once", "return_progress": True, "timings_per_token": True}
    events = Bench(play("a", cached=2)).stream("/completions", fields)
    assert [event["prompt_progress"]["processed"] for event in events[:2]] == [2, 4]
    assert events[2]["timings"]["cache_n"] == 2


def test_truncated_means_that_the_context_is_full() -> None:
    body = native(Bench(play("a", "b", stop="limit")), prompt="x" * (N_CTX - 2))
    assert body["truncated"] is True
    assert body["stop_type"] == "limit"
    assert native(Bench(play("a", "b", stop="limit")))["truncated"] is False


def test_response_fields() -> None:
    body = native(
        Bench(play("a")),
        response_fields=["content", "generation_settings/n_predict", "no/such", "nothing"],
    )
    assert body == {"content": "a", "generation_settings/n_predict": -1}


def test_n_probs() -> None:
    bench = Bench(play("a", "b", "c", probs=[-1.0, -2.0]))
    found = native(bench, n_probs=1)["completion_probabilities"]
    assert [entry["token"] for entry in found] == ["a", "b", "c"]
    assert found[0]["top_logprobs"] == [{"id": 98, "token": "b", "bytes": [98], "logprob": -2.0}]
    *chunks, _ = bench.stream("/completion", {"prompt": "Once", "logprobs": 1})
    assert [len(chunk["completion_probabilities"]) for chunk in chunks] == [1, 1, 1]
    assert "completion_probabilities" not in native(Bench(play("a", probs=[-1.0])))


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [97, 98]),
        ([97, 98], [97, 98]),
        ([1, "ab", 2], [1, 97, 98, 2]),
        (["ab"], [97, 98]),
        ({"prompt_string": "ab"}, [97, 98]),
        ([[97, "b"]], [97, 98]),
        ("<|im_start|>", [256]),
    ],
)
def test_shapes_of_a_prompt(prompt: Any, tokens: list[int]) -> None:
    bench = Bench(play("x"))
    body = native(bench, prompt=prompt)
    assert bench.worker.requests[0].prompt.tokens.tolist() == tokens
    assert body["prompt"] == bench.tokenizer.detokenize(tokens).decode()


def test_raw_prompts_have_boundaries() -> None:
    bench = Bench(play("x"))
    native(bench, prompt="<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    assert bench.worker.requests[0].prompt.boundaries == (9,)


def test_several_prompts() -> None:
    """Several prompts in one request have their replies in order, streamed one after the other,
    each with its index.
    """
    bench = Bench(play("x", cached=1))
    response = bench.post("/completion", {"prompt": ["one", [97, 98], {"prompt_string": "three"}]})
    assert [(body["index"], body["prompt"]) for body in response.json()] == [
        (0, "one"),
        (1, "ab"),
        (2, "three"),
    ]
    assert "x-pyctl-cache" not in response.headers
    streamed = bench.stream("/completion", {"prompt": ["one", "two"]})
    assert [(event["index"], event["stop"]) for event in streamed] == [
        (0, False),
        (0, True),
        (1, False),
        (1, True),
    ]
    body = bench.post("/v1/completions", {"prompt": ["one", "two"]}).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "x"), (1, "x")]


def test_openai_completions() -> None:
    """`/v1/completions` has the body and the stream of OpenAI's API, down to the final `[DONE]`."""
    bench = Bench(play("a", "b", probs=[-1.0, -2.0]))
    body = bench.post(
        "/v1/completions", {"prompt": "Once", "max_tokens": 5, "logprobs": 1, "suffix": None}
    ).json()
    (choice,) = body["choices"]
    assert choice["text"] == "ab"
    assert choice["index"] == 0
    assert choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b"]
    assert body["object"] == "text_completion"
    assert body["usage"]["total_tokens"] == 4 + 3
    assert bench.worker.requests[0].max_tokens == 5
    *chunks, last, end = bench.stream("/v1/completions", {"prompt": "Once"})
    assert [chunk["choices"] for chunk in chunks] == [
        [{"text": text, "index": 0, "logprobs": None, "finish_reason": None}] for text in "ab"
    ]
    assert last["choices"] == [{"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert last["usage"]["completion_tokens"] == 3
    assert end == "[DONE]"
    assert {chunk["object"] for chunk in (*chunks, last)} == {"text_completion"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, -1),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4, "max_tokens": 3}, 4),
        ({"n_predict": 0, "max_completion_tokens": 4}, 0),
        ({"max_tokens": None}, -1),
        ({"max_tokens": 7.0}, 7),
    ],
)
def test_names_for_the_length(fields: dict[str, Any], expected: int) -> None:
    bench = Bench(play("x"))
    bench.chat(**fields)
    assert bench.worker.requests[0].max_tokens == expected


def test_what_the_server_was_started_with_is_the_default() -> None:
    bench = Bench(play("x"), replies=ReplySettings(n_predict=11, cache_prompt=False))
    bench.chat()
    bench.chat(n_predict=3, cache_prompt=True)
    assert [(r.max_tokens, r.cache_prompt) for r in bench.worker.requests] == [
        (11, False),
        (3, True),
    ]


def test_bos_is_part_of_the_prompt_that_is_shown() -> None:
    tokenizer: Any = chatml_tokenizer()
    tokenizer.add_bos = True
    tokenizer.bos = 256
    bench = Bench(play("x"), tokenizer=tokenizer)
    assert native(bench)["prompt"] == INFO.bos_token + "Once"
    assert bench.worker.requests[0].prompt.tokens[0] == 256
    assert native(bench, prompt=[97])["prompt"] == "a"
