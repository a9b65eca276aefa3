"""Tokens, rendered messages and texts are llama-server's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyctl.measure.server_process import ServerProcess
from tests.process.conftest import Server
from tests.real.conftest import CODE, LLAMA_SERVER, NAMES, ask, client_of

pytestmark = pytest.mark.skipif(
    not LLAMA_SERVER, reason="LLAMA_SERVER names no llama-server to compare with"
)
Pair = tuple[Server, ServerProcess]

WORDS = (
    r"a e th ing the The HELLO we'll don't I'm -> == != // {} () [] ;; 1 23 456 7,890 3.14 "
    r"\frac{1}{2} é ß naïve"
)
SCRIPTS = "你好 世界 こんにちは привет مرحبا שלום 🙂 👩‍👩‍👧 \u0301 \u00a0 \u200b ▁ Ġ"
MARKS = "<|im_start|> <|im_end|> <|endoftext|> <bos> <end_of_turn> <s> <0x0A> <unused7>"
BLANKS = ("\t", "\n", "\n\n", "\r\n", "\x00", "", *(" " * n for n in (1, 1, 2, 4, 17)))
PIECES = [
    *WORDS.split(" "),
    *SCRIPTS.split(" "),
    *MARKS.split(" "),
    *BLANKS,
    "def f(x):\n    return x",
]
LINES = (
    "The capital of France is",
    "Once upon a time there was a keeper of a lighthouse who",
    "def fibonacci(n): return",
    "A recipe of pancakes needs flour, eggs and",
)


@pytest.fixture(scope="module", params=NAMES)
def pair(
    request: pytest.FixtureRequest, start: Callable[..., Any], start_peer: Callable[..., Any]
) -> Iterator[Pair]:
    """Yield pyctl and llama-server; without checkpoints, for which a batch of a model with windows
    would end elsewhere.
    """
    ours = start(request.param, "-nr")
    theirs = start_peer(request.param, "--ctx-checkpoints", "0")
    yield ours, theirs
    ours.stop()
    theirs.stop()


def both(pair: Pair, path: str, bodies: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Return the answers of pyctl and of llama-server to each of ``bodies``."""
    ours, theirs = map(client_of, pair)
    return [(ours.post_json(path, body), theirs.post_json(path, body)) for body in bodies]


def test_tokens_of_2000_strings(pair: Pair) -> None:
    rng = random.Random(5)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(2000)]
    bodies = [
        {"content": text, "add_special": i % 2 == 0, "parse_special": i % 3 == 0}
        for i, text in enumerate(texts)
    ]
    for body, (ours, theirs) in zip(bodies, both(pair, "/tokenize", bodies), strict=True):
        assert ours == theirs, body


def messages_of(rng: random.Random) -> dict[str, Any]:
    """Return a body with some turns, half of them with a tool, its calls and their results."""

    def text() -> str:
        return rng.choice(
            [CODE, "Hello!", " spaces \n\n", "naïve 🙂 <b>&amp;</b>", "<|im_end|>", "0"]
        )

    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": "It's “now”", "parameters": parameters},
    }
    called = {"name": "weather", "arguments": '{"city": "Köln"}'}
    call = [{"id": "call_1", "type": "function", "function": called}]
    has_tool = rng.random() < 0.5
    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] * (rng.random() < 0.5)
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        if has_tool and rng.random() < 0.5:
            messages.append({"role": "assistant", "content": "", "tool_calls": call})
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": text()})
        messages.append({"role": "assistant", "content": text()})
    messages.append({"role": "user", "content": text()})
    return {"messages": messages, **({"tools": [tool]} if has_tool else {})}


def test_50_message_lists_are_rendered(pair: Pair) -> None:
    rng = random.Random(6)
    bodies = [messages_of(rng) for _ in range(50)]
    for body, (ours, theirs) in zip(bodies, both(pair, "/apply-template", bodies), strict=True):
        assert ours["prompt"] == theirs["prompt"], body


def test_texts_of_prompts_that_are_one_batch(pair: Pair) -> None:
    for line in LINES:
        ours, theirs = (
            ask(server, line, 32, cache_prompt=False, ignore_eos=True) for server in pair
        )
        assert ours.ids == theirs.ids, line
        assert [logprob for _, logprob, _ in ours.tokens] == pytest.approx(
            [logprob for _, logprob, _ in theirs.tokens], abs=0.002
        )
