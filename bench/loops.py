"""The rule of `LoopDetector`: false positives on files of this machine, and detection of loops.

    python -m bench.loops [--vocab ggml-vocab-qwen35.gguf] [--keep]

A file counts as the reply of a model that repeats nothing from its prompt. The loops are blocks of
these files, repeated after a beginning of another file, exactly or with a number that counts up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_paths

import numpy as np

from bench.agent_edits import VOCABULARY
from bench.common import parse, parser_of, show, tokenizer_of
from pyctl.engine.loop_detector import (
    MAX_PERIOD,
    MIN_REPEATS,
    MIN_TOKENS,
    LoopDetector,
    ReplyLoop,
)
from pyctl.llama.library.llama_tokenizer import LlamaTokenizer
from pyctl.prompt import Tokens, as_tokens

ROOT = Path(__file__).resolve().parents[1]

N_FILES = 150
"""Files of each kind, evenly spread over all of them in the order of their names."""

N_TOKENS = 8192
"""Tokens of a file, from its beginning."""

MAX_BYTES = 2**19
"""Larger files are data that no model writes."""

RULES = ((100, 3), (200, 4), (MIN_TOKENS, MIN_REPEATS), (800, 8))
"""Least tokens and repetitions of the rules to compare."""

NO_PROMPT = as_tokens([])


@dataclass(frozen=True)
class Corpus:
    """Files of one kind below some directories."""

    name: str
    directories: tuple[Path, ...]
    patterns: tuple[str, ...]

    def files(self) -> Sequence[Path]:
        """Return `N_FILES` of the files, or all if there are fewer."""
        found = sorted(
            path
            for directory in self.directories
            for pattern in self.patterns
            for path in directory.rglob(pattern)
            if path.is_file() and 0 < path.stat().st_size <= MAX_BYTES
        )
        step = max(len(found) // N_FILES, 1)
        return found[::step][:N_FILES]


PATHS = get_paths()

CORPORA = (
    Corpus("Python source", (Path(PATHS["stdlib"]),), ("*.py",)),
    Corpus("Python packages", (Path(PATHS["purelib"]),), ("*.py",)),
    Corpus(
        "C and C++ source", (ROOT / "csrc", ROOT / "vendor", Path("/usr/include")), ("*.h", "*.cpp")
    ),
    Corpus(
        "licences",
        (Path("/usr/share/common-licenses"), Path(PATHS["purelib"])),
        ("GPL*", "LICENSE*", "Apache*"),
    ),
    Corpus("Markdown with tables", (ROOT / "docs", ROOT / "bench" / "results"), ("*.md",)),
    Corpus("JSON", (Path(PATHS["purelib"]), Path("/usr/share"), ROOT / "docs"), ("*.json",)),
    Corpus(
        "scripts and styles", (Path(PATHS["purelib"]), ROOT / "pyctl"), ("*.js", "*.css", "*.html")
    ),
    Corpus(
        "CSV and text", (Path(PATHS["purelib"]), Path("/usr/share")), ("*.csv", "*.tsv", "*.txt")
    ),
)


class RunRecorder(LoopDetector):
    """A detector that also records the longest run of each period."""

    def __init__(self) -> None:
        super().__init__(NO_PROMPT)
        self.longest = np.zeros(MAX_PERIOD, np.int32)

    def observe(self, token: int) -> ReplyLoop | None:
        """Record a token; return the loop if it makes one."""
        loop = super().observe(token)
        np.maximum(self.longest, self._runs, out=self.longest)
        return loop

    def has_loop(self, n_tokens: int, n_repeats: int) -> bool:
        """Return whether a rule of these thresholds would have found a loop."""
        distances = np.arange(MAX_PERIOD, 0, -1)
        return bool((self.longest >= np.maximum(n_tokens, n_repeats * distances)).any())


def record(tokens: Tokens) -> RunRecorder:
    """Return the runs of a reply with these ``tokens``."""
    recorder = RunRecorder()
    for token in tokens.tolist():
        recorder.observe(token)
    return recorder


def false_positives(
    corpus: Corpus, texts: Sequence[tuple[Path, Tokens]]
) -> tuple[list[object], list[list[object]]]:
    """Return the row of a corpus, and a row for each file that the rule in use takes for a loop."""
    recorders = [(path, record(tokens)) for path, tokens in texts]
    counts = [sum(each.has_loop(*rule) for _, each in recorders) for rule in RULES]
    n_tokens = sum(tokens.size for _, tokens in texts)
    worst = [
        [corpus.name, path.name, int(each.longest.max()), MAX_PERIOD - int(each.longest.argmax())]
        for path, each in recorders
        if each.has_loop(MIN_TOKENS, MIN_REPEATS)
    ]
    return [corpus.name, len(texts), n_tokens, *counts], worst


PERIODS = (1, 2, 5, 12, 40, 100, 250, 512)

N_LOOPS = 40
"""Loops of each period."""


def detections(texts: Sequence[Tokens]) -> Iterator[list[object]]:
    """Yield a row for each period: detected loops, and tokens after the first block until then."""
    random = np.random.default_rng(0)
    for period in PERIODS:
        delays: list[int] = []
        for _ in range(N_LOOPS):
            before, source = (texts[i] for i in random.integers(0, len(texts), 2))
            start = int(random.integers(0, source.size - period))
            block = source[start : start + period]
            n_repeats = 4096 // period + 1
            detector = LoopDetector(NO_PROMPT)
            for token in before[:512].tolist():
                detector.observe(token)
            delay = _delay(detector, np.tile(block, n_repeats))
            if delay is not None:
                delays.append(delay - period)
        median = int(np.median(delays)) if delays else "-"
        yield [period, N_LOOPS, len(delays), median, max(delays, default="-")]


def _delay(detector: LoopDetector, loop: Tokens) -> int | None:
    """Return after how many tokens of ``loop`` it is detected; None if it is not."""
    for n, token in enumerate(loop.tolist(), 1):
        if detector.observe(token) is not None:
            return n
    return None


def token_cost(tokens: Tokens) -> float:
    """Return the microseconds of a token."""
    detector = LoopDetector(NO_PROMPT)
    began = time.perf_counter()
    for token in tokens.tolist():
        detector.observe(token)
    return (time.perf_counter() - began) / tokens.size * 1e6


def read(corpus: Corpus, vocab: LlamaTokenizer) -> list[tuple[Path, Tokens]]:
    """Return the tokens of each file of ``corpus`` that has any."""
    texts = []
    for path in corpus.files():
        text = path.read_text(encoding="utf-8", errors="replace")[: 8 * N_TOKENS]
        tokens = as_tokens(vocab.tokenize(text))[:N_TOKENS]
        if tokens.size:
            texts.append((path, tokens))
    return texts


def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--vocab", default=str(VOCABULARY), help="a vocabulary or a model")
    options = parse(parser, None)
    vocab = tokenizer_of(options.vocab)
    rows: list[list[object]] = []
    worst: list[list[object]] = []
    long_texts: list[Tokens] = []
    for corpus in CORPORA:
        texts = read(corpus, vocab)
        row, found = false_positives(corpus, texts)
        rows.append(row)
        worst += found
        long_texts += [tokens for _, tokens in texts if tokens.size > 1024]
    keep = "loops" if options.keep else ""
    names = [f"{n} tokens, {k} times" for n, k in RULES]
    cost = token_cost(long_texts[0])
    show(
        "Loops of replies: files that a rule takes for a loop",
        ["files of this machine", "files", "tokens", *names],
        rows,
        keep=keep,
        notes=[
            f"The rule in use: at least {MIN_TOKENS} periodic tokens and {MIN_REPEATS} repetitions "
            f"of a block of at most {MAX_PERIOD} tokens. It takes {cost:.1f} microseconds a token."
        ],
        weights="none",
    )
    columns = ["files of this machine", "file", "longest run", "period"]
    show("Files that the rule in use takes for a loop", columns, worst, keep=keep, is_first=False)
    show(
        "Generated loops of up to 4,096 tokens that the rule in use detects",
        ["period", "loops", "detected", "median tokens after the first block", "maximum"],
        [*detections(long_texts)],
        keep=keep,
        is_first=False,
    )


if __name__ == "__main__":
    main()
