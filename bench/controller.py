"""What a warm turn costs besides the model: body, rendering, tokenising, lookup, plan, bookkeeping.

    python -m bench.controller                  # the vocabulary and template of the pinned release, if unpacked

The backend evaluates nothing and its rows are empty, so all that is left is the controller. Each turn adds one user
message to a history that the cache knows; the median over turns is shown by history length.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import msgspec
import numpy as np
from llama_cpp import llama_cpp as api

from bench.common import answered, show
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Block
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.template import Template
from pyctl.engine.engine import Engine
from pyctl.engine.engine_options import EngineOptions
from pyctl.engine.fake import FakeBackend
from pyctl.engine.llama import LlamaTokenizer
from pyctl.engine.request import Request
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Tokens

VENDOR = Path(__file__).resolve().parent.parent / "vendor/llama.cpp"
EMPTY = np.zeros(64, np.uint8)


class NullBackend(FakeBackend):
    """Evaluates nothing: positions are kept, bytes are not."""

    def evaluate(self, seq: int, tokens: Tokens, start: int, *, output: bool = True) -> None:
        self._outputs = [b"\1" * 16]

    def save_rows(self, seq: int, first: int, last: int) -> Block:
        return EMPTY

    def save_state(self, seq: int, n: int) -> Block:
        return EMPTY

    def load_rows(self, seq: int, first: int, spans: object) -> None:
        pass

    def load_state(self, seq: int, n: int, state: Block) -> None:
        pass

    def rewind(self, seq: int, n: int) -> None:
        pass


def history(n_messages: int, words_each: int) -> list[dict[str, object]]:
    """A conversation with tool calls and results, as an agent's client sends it."""
    rng = random.Random(7)
    vocabulary = ["".join(rng.choice("abcdefghijklmnoprstuvw") for _ in range(rng.randint(2, 9))) for _ in range(4000)]

    def text(n: int) -> str:
        return " ".join(rng.choice(vocabulary) for _ in range(n))

    messages: list[dict[str, object]] = [{"role": "system", "content": text(4000)}]
    for i in range(n_messages):
        kind = i % 4
        if kind == 0:
            messages.append({"role": "user", "content": text(words_each)})
        elif kind == 1:
            arguments = json.dumps({"path": text(3), "limit": i})
            call = {"id": f"c{i}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
            messages.append({"role": "assistant", "content": text(10), "tool_calls": [call]})
        elif kind == 2:
            messages.append({"role": "tool", "tool_call_id": f"c{i - 1}", "content": text(words_each * 2)})
        else:
            messages.append({"role": "assistant", "content": text(words_each)})
    return messages


def measure(chat: ChatFormat, n_messages: int, words_each: int, turns: int) -> list[object]:
    """Median milliseconds of the parts of a turn."""
    backend = NullBackend(n_ctx=1 << 19, n_ubatch=512, n_vocab=1 << 18)
    engine = Engine(backend, RamCache(32, None), EngineOptions(exact=True))
    messages = history(n_messages, words_each)
    parts: dict[str, list[float]] = {"body": [], "prompt": [], "engine": [], "total": []}
    n_tokens = 0
    for turn in range(turns + 2):
        messages += [{"role": "user", "content": f"Question {turn}: " + "and then " * 20}]
        body = json.dumps({"messages": messages}).encode()
        began = time.perf_counter()
        given = msgspec.json.decode(body)["messages"]
        parsed = time.perf_counter()
        prompt = chat.prompt(given)
        rendered = time.perf_counter()
        answered(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=1))
        done = time.perf_counter()
        n_tokens = len(prompt)
        if turn >= 2:  # the first turns fill the caches
            for name, start, stop in (
                ("body", began, parsed),
                ("prompt", parsed, rendered),
                ("engine", rendered, done),
                ("total", began, done),
            ):
                parts[name].append((stop - start) * 1e3)
        messages += [{"role": "assistant", "content": "Answer " * 30}]
    return [n_tokens, len(messages), *(f"{statistics.median(times):.2f}" for times in parts.values())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--keep", action="store_true", help="write results/controller.md")
    arguments = parser.parse_args()
    vocabulary = VENDOR / "models/ggml-vocab-qwen35.gguf"
    template = VENDOR / "models/templates/Qwen3.5-4B.jinja"
    if not vocabulary.exists():
        raise SystemExit("run python vendor/llama.cpp/unpack.py first: the vocabulary comes from the pinned release")
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(vocabulary).encode(), params)
    chat = ChatFormat(Template(template.read_text(encoding="utf-8"), "", "<|im_end|>"), LlamaTokenizer(model))
    rows = [
        measure(chat, *shape, arguments.turns) for shape in ((8, 300), (40, 300), (76, 400), (100, 480), (300, 160))
    ]
    columns = ["tokens", "messages", "body ms", "render, tokenise ms", "engine ms", "total ms"]
    show("Controller time of a warm turn", columns, rows, keep="controller" if arguments.keep else "")


if __name__ == "__main__":
    main()
