"""The time outside of the model: of a warm turn, and of each sampled token.

    python -m bench.controller                  # the vocabulary and template of the pinned release, if unpacked
    python -m bench.controller --outputs        # sampled tokens, in a vocabulary of Qwen3.6's size
    python -m bench.controller --against DIR    # and another checkout's, in alternation

Of a warm turn: body, rendering, tokenising, lookup, plan, bookkeeping. The backend evaluates nothing and its rows are
empty, so only the controller takes time. Each turn adds one user message to a cached history; the table shows the
median over turns by history length.

Of sampled tokens: a tiny model evaluates steps of drafts that are all right. Times are medians of what passes between
the end of one evaluation and the next one, by the number of outputs; the sampler's chain is llama.cpp's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llama_cpp import llama_cpp as api

from bench.common import answered, finished, parse, parser_of, show, tell
from bench.compare import add_comparison, compare
from pyctl.cache.ports import MemoryShape
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Rows, State
from pyctl.chat.chat_format import ChatFormat, ChatRequest
from pyctl.chat.template import Template
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.draft.draft_settings import LONGEST, DraftSettings
from pyctl.engine.draft.source import NO_MATCH, DraftJob, Match
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.request import Request
from pyctl.engine.sampling import Sampling
from pyctl.llama import LlamaBackend, LlamaTokenizer, load
from pyctl.llama.grammar import Candidates
from pyctl.llama.library import redirect_log
from pyctl.llama.sampler import LlamaSampler
from pyctl.models import builtin_model
from pyctl.prompt import Prompt, Tokens
from tests.fake import FakeBackend
from tools.generator import TINY_DENSE, write_model

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

    def evaluate(self, seq: int, tokens: Tokens, start: int, *, output: bool = True, picture: object = None) -> None:
        self.outputs = [b"\1" * 16]

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        return Rows(EMPTY)

    @cached_property
    def shape(self) -> MemoryShape:
        """Made once, as in a real memory."""
        return super().shape

    def save_state(self, seq: int, n: int) -> State:
        return State.of(EMPTY)

    def restore(self, seq: int, first: int, spans: object, state: State | None = None) -> None:
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


def measure(chat: ChatFormat, n_messages: int, words_each: int, turns: int) -> dict[str, Any]:
    """Median milliseconds of the parts of a turn; on the processor's clock, too, which a busy machine hardly moves."""
    backend = NullBackend(n_ctx=1 << 19, n_ubatch=512, n_vocab=1 << 18, can_hold=False)
    engine = Engine(backend, RamCache(32, None), EngineSettings(exact=True))
    messages = history(n_messages, words_each)
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    n_tokens = 0
    for turn in range(turns + 2):
        messages += [{"role": "user", "content": f"Question {turn}: " + "and then " * 20}]
        body = json.dumps({"messages": messages}).encode()
        began, worked = time.perf_counter(), time.thread_time()
        given = msgspec.json.decode(body)["messages"]
        parsed = time.perf_counter()
        prompt = chat.prepare(ChatRequest(given)).prompt
        rendered = time.perf_counter()
        answered(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=1))
        done, worked = time.perf_counter(), time.thread_time() - worked
        n_tokens = len(prompt)
        if turn >= 2:  # the first turns fill the caches
            seconds = (parsed - began, rendered - parsed, done - rendered, done - began, worked)
            for name, spent in zip(PARTS, seconds, strict=True):
                parts[name].append(spent * 1e3)
        messages += [{"role": "assistant", "content": "Answer " * 30}]
    return {"tokens": n_tokens, "messages": len(messages), **{n: statistics.median(t) for n, t in parts.items()}}


N_VOCAB = 248_320
OUTPUTS = (1, 4, 32, 1 + LONGEST)
SAMPLINGS = {"default": Sampling(seed=1), "greedy": Sampling(temperature=0.0)}
OUTPUT_PARTS = ("µs per output", "of these sampler", "of these chain")
PROMPT, CERTAIN = 16, 30.0


class Copying:
    """A source that drafts the tokens of ``reply`` that make steps of ``n_outputs``."""

    name = "copying"

    def __init__(self, reply: Tokens, n_outputs: int) -> None:
        self.reply, self.n_drafts = reply, n_outputs - 1

    def begin(self, key: int, prompt: Tokens) -> None:
        pass

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        first = job.seq.n + len(job.sure)
        drafts = tuple(self.reply[first : first + self.n_drafts].tolist())
        return NO_MATCH if draft else Match(LONGEST, lambda n: drafts[:n])

    def learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        if n_accepted < n_drafted:
            raise RuntimeError("a draft was wrong")

    def end(self, key: int) -> None:
        pass


class Watch:
    """Seconds since the last evaluation, of all and of the calls of two functions, by evaluation."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self.spent = [0.0, 0.0, 0.0]
        self.began = 0.0

    def within(self, function: Callable[..., Any], part: int) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            self.spent[part] += time.perf_counter() - began
            return result

        return timed

    def around(self, decode: Callable[..., None], reply: Tokens) -> Callable[..., None]:
        """``decode`` that lets the tokens of ``reply`` follow each other."""

        def evaluated(backend: LlamaBackend, items: Sequence[SequenceTokens]) -> None:
            self.spent[0] = time.perf_counter() - self.began
            self.steps.append(self.spent)
            decode(backend, items)
            (item,) = items
            for i in range(1 + item.n_drafts):
                logits = api.llama_get_logits_ith(backend._ctx, item.n_sure - 1 + i)
                logits[int(reply[item.position + item.n_sure + i])] = CERTAIN
            self.spent, self.began = [0.0, 0.0, 0.0], time.perf_counter()

        return evaluated


def measure_outputs(backend: LlamaBackend, name: str, n_outputs: int, steps: int) -> dict[str, Any]:
    """Median microseconds for each output of a step, and of its parts."""
    n_vocab = backend.tokenizer.n_vocab
    reply = np.random.default_rng(0).integers(1000, n_vocab, PROMPT + 2 + (steps + 3) * n_outputs).astype(np.int32)
    engine = Engine(backend, RamCache(2, None), EngineSettings(), None, Speculation([Copying(reply, n_outputs)]))
    n = reply.size - PROMPT - n_outputs
    handle = RequestHandle(Request(Prompt.of(reply[:PROMPT]), SAMPLINGS[name], max_tokens=n))
    watch, patched = Watch(), [(LlamaBackend, "decode"), (LlamaSampler, "sample"), (Candidates, "choose")]
    kept: list[Callable[..., Any]] = [getattr(*each) for each in patched]
    LlamaBackend.decode = watch.around(kept[0], reply)  # type: ignore[method-assign]
    LlamaSampler.sample = watch.within(kept[1], 1)  # type: ignore[method-assign]
    Candidates.choose = watch.within(kept[2], 2)  # type: ignore[method-assign]
    try:
        engine.submit(handle)
        while engine.step():
            pass
    finally:
        for (owner, what), function in zip(patched, kept, strict=True):
            setattr(owner, what, function)
    finished(handle.drain())
    whole = watch.steps[2:-1]  # the first one follows the prompt, the last one is shorter
    parts = [statistics.median(step[i] for step in whole) / n_outputs * 1e6 for i in range(3)]
    return {"sampling": name, "outputs": n_outputs, **dict(zip(OUTPUT_PARTS, parts, strict=True))}


def measured_outputs(steps: int, n_vocab: int) -> list[dict[str, Any]]:
    """The records of each sampling and number of outputs, most outputs in ``steps`` steps."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_model(path, replace(TINY_DENSE, num_layers=1, vocab_size=n_vocab))
        settings = ModelSettings(path=str(path), n_ctx=2**14, n_ubatch=256, n_batch=256, n_threads=1)
        backend = load(settings, drafts=DraftSettings(draft_types=("cache",))).backend
        records = [
            measure_outputs(backend, name, n, max(steps, steps * 32 // n)) for name in SAMPLINGS for n in OUTPUTS
        ]
        backend.unload()
    return records


def chat_format(vocabulary: Path) -> ChatFormat:
    """The chat format of ``vocabulary``, with the template that the pinned release keeps beside its own one."""
    redirect_log()
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(vocabulary).encode(), params)
    if not model:
        raise SystemExit(f"{vocabulary} does not load")
    template = vocabulary.parent / TEMPLATE
    source = template.read_text("utf-8") if template.exists() else api.llama_model_chat_template(model, None).decode()
    return ChatFormat(Template(source, "", "<|im_end|>"), LlamaTokenizer(model))


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", type=Path, default=VOCABULARY, help="source of vocabulary and template")
    parser.add_argument("--messages", type=int, nargs="+", default=list(SHAPES), choices=SHAPES, help="history length")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--outputs", action="store_true", help="measure sampled tokens instead of turns")
    add_comparison(parser)
    arguments = parse(parser, argv, model=builtin_model(), messages=[8], turns=1, rounds=1)
    if arguments.outputs:
        return main_outputs(arguments)
    if not arguments.model.exists():
        raise SystemExit("run python vendor/llama.cpp/unpack.py first: the vocabulary comes from the pinned release")
    if arguments.against is not None:
        given = ["-m", str(arguments.model), "--turns", str(arguments.turns)]
        given += ["--messages", *map(str, arguments.messages)]
        return compare("bench.controller", given, arguments.against, arguments.rounds)
    chat = chat_format(arguments.model)
    records = [measure(chat, n, SHAPES[n], arguments.turns) for n in arguments.messages]
    if arguments.json:
        return tell(records)
    rows = [[value if isinstance(value, int) else f"{value:.2f}" for value in record.values()] for record in records]
    columns = ["tokens", "messages", *PARTS]
    show("Controller time of a warm turn", columns, rows, keep="controller" if arguments.keep else "")
    return None


def main_outputs(arguments: argparse.Namespace) -> None:
    """Measure sampled tokens."""
    if arguments.against is not None:
        return compare("bench.controller", ["--outputs"], arguments.against, arguments.rounds)
    records = measured_outputs(2, 2**14) if arguments.quick else measured_outputs(12, N_VOCAB)
    if arguments.json:
        return tell(records)
    rows = [[value if isinstance(value, (int, str)) else f"{value:.1f}" for value in each.values()] for each in records]
    columns = ["sampling", "outputs", *OUTPUT_PARTS]
    title = "Time of a sampled token outside of the model"
    return show(title, columns, rows, keep="controller-outputs" if arguments.keep else "")


if __name__ == "__main__":
    main()
