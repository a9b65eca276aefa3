"""The time of a warm turn outside of the model.

    python -m bench.controller                  # vocabulary and template of the pinned release
    python -m bench.controller --against DIR    # and another checkout's, in alternation

Body, rendering, tokenising, lookup, plan, bookkeeping. The backend evaluates nothing and its rows
are empty, so only the controller takes time. Each turn adds one user message to a cached history;
the table shows the median over turns by history length.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.common import SIMULATED, answered, parse, parser_of, show, tell, tokenizer_of
from bench.compare import add_comparison, compare
from pyctl.cache.ports import MemoryShape
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Rows, State
from pyctl.chat import CHATML
from pyctl.chat.chat_format import ChatFormat, ChatRequest
from pyctl.chat.template import Template
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.request import Request
from pyctl.engine.sampling import Sampling
from pyctl.llama.library.library_log import redirect_log
from pyctl.model_files import builtin_model
from pyctl.prompt import Tokens
from tests.fake import FakeBackend

VENDOR = Path(__file__).resolve().parent.parent / "vendor/llama.cpp"
VOCABULARY = VENDOR / "models/ggml-vocab-qwen35.gguf"
TEMPLATE = "templates/Qwen3.5-4B.jinja"
"""Beside the vocabulary."""
EMPTY = np.zeros(64, np.uint8)

PARTS = ("body ms", "render, tokenise ms", "engine ms", "total ms", "total CPU ms")
SHAPES = {8: 300, 40: 300, 76: 400, 100: 480, 300: 160}
"""Messages of a history, and words in each."""


class NullBackend(FakeBackend):
    """Evaluates nothing: positions are kept, bytes are not."""

    def evaluate(
        self, seq: int, tokens: Tokens, start: int, *, output: bool = True, picture: object = None
    ) -> None:
        self.outputs = [b"\1" * 16]

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        return Rows(EMPTY)

    @cached_property
    def shape(self) -> MemoryShape:
        """Made once, as in a real memory."""
        return super().shape

    def save_state(self, seq: int, n: int) -> State:
        return State.from_parts(EMPTY)

    def restore(self, seq: int, first: int, spans: object, state: State | None = None) -> None:
        pass

    def rewind(self, seq: int, n: int) -> None:
        pass


def history(n_messages: int, words_each: int) -> list[dict[str, object]]:
    """Return a conversation with tool calls and results, as an agent's client sends it."""
    rng = random.Random(7)
    vocabulary = [
        "".join(rng.choice("abcdefghijklmnoprstuvw") for _ in range(rng.randint(2, 9)))
        for _ in range(4000)
    ]

    def text(n: int) -> str:
        return " ".join(rng.choice(vocabulary) for _ in range(n))

    messages: list[dict[str, object]] = [{"role": "system", "content": text(4000)}]
    for i in range(n_messages):
        kind = i % 4
        if kind == 0:
            messages.append({"role": "user", "content": text(words_each)})
        elif kind == 1:
            arguments = json.dumps({"path": text(3), "limit": i})
            call = {
                "id": f"c{i}",
                "type": "function",
                "function": {"name": "read_file", "arguments": arguments},
            }
            messages.append({"role": "assistant", "content": text(10), "tool_calls": [call]})
        elif kind == 2:
            messages.append(
                {"role": "tool", "tool_call_id": f"c{i - 1}", "content": text(words_each * 2)}
            )
        else:
            messages.append({"role": "assistant", "content": text(words_each)})
    return messages


def measure(chat: ChatFormat, n_messages: int, words_each: int, turns: int) -> dict[str, Any]:
    """Return median milliseconds of the parts of a turn; also on the processor's clock, which a
    busy machine hardly moves.
    """
    backend = NullBackend(n_ctx=1 << 19, n_ubatch=512, n_vocab=1 << 18, can_hold=False)
    engine = Engine(backend, RamCache(32, None), EngineSettings(exact=True))
    messages = history(n_messages, words_each)
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    n_tokens = 0
    for turn in range(turns + 2):
        messages += [{"role": "user", "content": f"Question {turn}: " + "and then " * 20}]
        body = json.dumps({"messages": messages}).encode()
        began = time.perf_counter()
        worked = time.thread_time()
        given = msgspec.json.decode(body)["messages"]
        parsed = time.perf_counter()
        prompt = chat.prepare(ChatRequest(given)).prompt
        rendered = time.perf_counter()
        answered(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=1))
        done = time.perf_counter()
        worked = time.thread_time() - worked
        n_tokens = len(prompt)
        if turn >= 2:  # the first turns fill the caches
            seconds = (parsed - began, rendered - parsed, done - rendered, done - began, worked)
            for name, spent in zip(PARTS, seconds, strict=True):
                parts[name].append(spent * 1e3)
        messages += [{"role": "assistant", "content": "Answer " * 30}]
    return {
        "tokens": n_tokens,
        "messages": len(messages),
        **{n: statistics.median(t) for n, t in parts.items()},
    }


def chat_format(vocabulary: Path) -> ChatFormat:
    """Return the chat format of ``vocabulary``, with the template that the pinned release keeps
    next to its own.
    """
    redirect_log()
    template = vocabulary.parent / TEMPLATE
    source = template.read_text("utf-8") if template.exists() else CHATML
    return ChatFormat(Template(source, "", "<|im_end|>"), tokenizer_of(vocabulary))


def main(argv: Sequence[str] | None = None) -> None:
    """Print milliseconds of each part of a warm turn, a row per length of history. With --against,
    compare with another commit instead.
    """
    parser = parser_of(__doc__)
    parser.add_argument(
        "-m", "--model", type=Path, default=VOCABULARY, help="source of vocabulary and template"
    )
    parser.add_argument(
        "--messages",
        type=int,
        nargs="+",
        default=list(SHAPES),
        choices=SHAPES,
        help="history length",
    )
    parser.add_argument("--turns", type=int, default=15)
    add_comparison(parser)
    arguments = parse(parser, argv, model=builtin_model(), messages=[8], turns=1, rounds=1)
    if arguments.against is not None:
        given = ["-m", str(arguments.model), "--turns", str(arguments.turns)]
        given += ["--messages", *map(str, arguments.messages)]
        return compare("bench.controller", given, arguments.against, arguments.rounds)
    chat = chat_format(arguments.model)
    records = [measure(chat, n, SHAPES[n], arguments.turns) for n in arguments.messages]
    if arguments.json:
        return tell(records)
    rows = [
        [value if isinstance(value, int) else f"{value:.2f}" for value in record.values()]
        for record in records
    ]
    columns = ["tokens", "messages", *PARTS]
    show(
        "Controller time of a warm turn",
        columns,
        rows,
        keep="controller" if arguments.keep else "",
        weights=SIMULATED,
    )
    return None


if __name__ == "__main__":
    main()
