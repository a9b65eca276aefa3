"""The cost per token of a constraint (a JSON schema or a call) over a vocabulary of Qwen3.6's size.

python -m bench.grammar            # on the vocabulary that the build unpacks
python -m bench.grammar --keep     # also writes results/grammar.md

That vocabulary has 151,936 tokens; pairs of its tokens fill it up to 248,320. Each constraint reads its text in the
tokens of the vocabulary, and then follows a random walk of tokens that its mask allows. "check" tests one token, which
is the whole cost of most tokens of a reply; "mask" tests all of them, after the sampler chose a token that is refused.
Times are CPU time of one thread.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import parse, parser_of, show, tokenizer_of
from pyctl.chat.call_formats.families import HERMES, QWEN
from pyctl.chat.constraint import Constraint, json_constraint
from pyctl.chat.reply import THINK
from pyctl.chat.tools import Tools
from pyctl.llama.grammar import GrammarCompiler
from pyctl.llama.llama_tokenizer import LlamaTokenizer

VOCABULARY = Path(__file__).parents[1] / "vendor" / "llama.cpp" / "models" / "ggml-vocab-qwen35.gguf"
N_VOCAB = 248_320


class FilledUp(LlamaTokenizer):
    """The vocabulary of a model with made-up tokens behind its own, which only a grammar sees."""

    def all_pieces(self) -> list[bytes]:
        """Pairs of the more frequent tokens, as long as words of other languages are."""
        pieces = super().all_pieces()
        known, rng = set(pieces), random.Random(0)
        while len(pieces) < N_VOCAB:
            pair = pieces[rng.randrange(256, 50_000)] + pieces[rng.randrange(256, 50_000)].strip()
            if pair not in known and len(pair) < 24:
                known.add(pair)
                pieces.append(pair)
        return pieces


def text_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def pattern(regex: str) -> dict[str, Any]:
    return {"type": "string", "pattern": regex}


TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
EDIT = text_object(path=TEXT, old=TEXT, new=TEXT)
CODE = 'def main() -> None:\n    """Say hello."""\n    print("hello, wörld, 你好", os.getcwd())\n\n' * 6
EDITED = {"path": "/home/user/project/main.py", "old": CODE[:200], "new": CODE}
ADDRESS = {
    "type": "object",
    "properties": {"street": TEXT, "zip": pattern("^[0-9]{5}$"), "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["street"],
}
NESTED = text_object(
    user=text_object(name={**TEXT, "maxLength": 80}, tags={"type": "array", "items": TEXT, "maxItems": 8}, at=ADDRESS)
)
NESTED["properties"]["user"]["properties"]["at"]["properties"]["next"] = {"type": ["object", "null"]}
TOOLS = Tools.of(
    [{"type": "function", "function": {"name": f"tool_{i}", "parameters": EDIT}} for i in range(20)],
    parallel=True,
    forced=True,
)


def as_xml(values: dict[str, str]) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=tool_7>\n{inside}</function>\n</tool_call>"


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def constraints() -> dict[str, tuple[Constraint, str]]:
    """A constraint, and a text that it accepts."""
    schemas: dict[str, tuple[Any, Any]] = {
        "free strings": (EDIT, EDITED),
        "numbers": (
            text_object(xs={"type": "array", "items": {"type": "number"}}, n={**INTEGER, "maximum": 100_000}),
            {"xs": [1.25, -3e10, 0.5, 1234567] * 10, "n": 4211},
        ),
        "enums": (
            text_object(unit={"enum": ["celsius", "kelvin"]}, code={"enum": [f"country-{i:03}" for i in range(200)]}),
            {"unit": "kelvin", "code": "country-123"},
        ),
        "nested objects": (
            NESTED,
            {"user": {"name": "Ada", "tags": ["x", "math"], "at": {"street": "St James 12", "zip": "12345"}}},
        ),
        "patterns, formats": (
            text_object(
                when={**TEXT, "format": "date-time"},
                id=pattern(r"^[A-Z]{2}-\d{3,10}$"),
                mail=pattern(r"^[^@ ]+@[a-z.]+\.[a-z]{2,}$"),
                key={**TEXT, "format": "uuid"},
            ),
            {
                "when": "2026-01-02T03:04:05Z",
                "id": "AB-12345",
                "mail": "someone.else@example.org",
                "key": "123e4567-e89b-12d3-a456-426614174000",
            },
        ),
        "bounded lengths": (text_object(t={**TEXT, "minLength": 10, "maxLength": 2000}), {"t": "some long text " * 10}),
        "any object": ({"type": "object"}, {"a": [1, 2, {"b": "c d"}], "text": "some long text " * 10}),
    }
    found = {name: (json_constraint(schema), written(value)) for name, (schema, value) in schemas.items()}
    call = written({"name": "tool_7", "arguments": EDITED})
    found["20 tools, JSON"] = (HERMES.constraint(TOOLS, THINK, "content"), f"<tool_call>\n{call}\n</tool_call>")
    found["20 tools, XML"] = (
        QWEN.constraint(TOOLS, THINK, "reasoning"),
        f"{CODE}</think>\n\n{as_xml({key: str(value) for key, value in EDITED.items()})}",
    )
    return found


def timed(into: list[float], function: Callable[..., Any], *arguments: Any) -> Any:
    began = time.thread_time_ns()
    result = function(*arguments)
    into.append((time.thread_time_ns() - began) / 1e3)
    return result


def measured(
    compiler: GrammarCompiler, constraint: Constraint, tokens: Sequence[int], repeat: int
) -> tuple[float, list[float], list[float], list[float]]:
    """Milliseconds to compile; microseconds of each mask, check and reading of a token."""
    began = time.thread_time()
    compiler.matcher(constraint.grammar)
    compiling = (time.thread_time() - began) * 1e3
    masks: list[float] = []
    checks: list[float] = []
    reads: list[float] = []
    rng = np.random.default_rng(0)
    for _ in range(repeat):
        matcher = compiler.matcher(constraint.grammar)
        for token in tokens:
            if timed(checks, matcher.validate_tokens, [token]) != 1:
                raise RuntimeError("the text is not accepted")
            timed(masks, matcher.compute_bitmask)
            timed(reads, matcher.consume_token, token)
        matcher = compiler.matcher(constraint.grammar)
        for _ in range(200):
            if matcher.is_stopped():
                break
            mask = np.frombuffer(timed(masks, matcher.compute_bitmask), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, count=N_VOCAB, bitorder="little"))
            matcher.consume_token(int(rng.choice(allowed)))
    return compiling, masks, checks, reads


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    options = parse(parser, argv, repeat=1)
    tokenizer = tokenizer_of(VOCABULARY, FilledUp)
    compiler = GrammarCompiler(tokenizer)
    pieces = tokenizer.all_pieces()
    tokenizer.all_pieces = lambda: pieces  # type: ignore[method-assign]
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    compiler.matcher(json_constraint({"type": "null"}).grammar)
    seconds = time.thread_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    began = time.thread_time()
    LlamaTokenizer.all_pieces(tokenizer)
    reading = (time.thread_time() - began) * N_VOCAB / tokenizer.n_vocab
    rows: list[Sequence[object]] = []
    for name, (constraint, text) in constraints().items():
        compiling, masks, checks, reads = measured(compiler, constraint, tokenizer.tokenize(text), options.repeat)
        of_masks = (np.mean(masks), np.median(masks), np.percentile(masks, 99), max(masks))
        of_checks = f"{np.mean(checks):.1f}", f"{np.percentile(checks, 99):.0f}", f"{max(checks):.0f}"
        cells = [*(f"{us:.0f}" for us in of_masks), *of_checks, f"{np.mean(reads):.1f}"]
        rows.append((name, f"{compiling:.1f}", len(masks), *cells))
    columns = ["constraint", "compile, ms", "masks", "mask, us", "p50", "p99", "worst"]
    columns += ["check, us", "p99", "worst", "read, us"]
    title = (
        f"Binding a reply, {N_VOCAB:,} tokens; the vocabulary takes {reading:.1f} s to read and {seconds:.1f} s to"
        f" prepare once, and {grown:.0f} MiB"
    )
    show(title, columns, rows, keep="grammar" if options.keep else "")


if __name__ == "__main__":
    main()
