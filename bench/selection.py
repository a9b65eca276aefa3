"""Recall with --kv-select: questions one at a time, and lists of them.

    python -m bench.selection [--keep]

Conversations are those of the training's generator, with eight held-out facts among other talk. A single
question is part of the prompt and attends to all rows; its reply selects rows. In a list all eight questions and
answers select rows; the wording between the answers is given. An answer is right if all of its tokens are those of the
fact. *Recency* attends to as many of the last tokens instead of selected ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from bench.common import parse, parser_of, show
from pyctl.cache.snapshot import Block, Rows, State
from pyctl.chat.template import Template
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.pool import PoolSettings
from pyctl.engine.selection import CHUNK, SelectSettings
from pyctl.llama import Loaded, load
from pyctl.models import builtin_model
from pyctl.prompt import as_tokens
from tools.training.needles import needles

MOST = 48
"""Tokens of an answer."""


@dataclass(frozen=True)
class Told:
    """A conversation that tells facts, as text; the user's turns that ask for them, and the right answers.

    ``header`` is what a reply follows, ``end`` what follows a reply.
    """

    text: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    header: str
    end: str

    @classmethod
    def of(cls, template: Template, seed: int, tokens: int) -> Told:
        """About so many tokens with eight facts."""
        messages, found = needles(Random(f"{seed} selection bench {tokens}"), tokens, 8)
        plain = [{"role": message.role, "content": message.text} for message in messages]
        first = found[0].index - 1
        told = [template.render(plain[: first + n], add_generation_prompt=False) for n in range(3)]
        asked = template.render(plain[: first + 1])
        if not (told[2].startswith(told[1]) and told[1].startswith(told[0]) and asked.startswith(told[1])):
            raise RuntimeError("this template does not write one message after the other")
        end = told[2][told[2].rindex(plain[first + 1]["content"]) + len(plain[first + 1]["content"]) :]
        turn = told[1][len(told[0]) :]
        question = plain[first]["content"]
        questions = [plain[each.index - 1]["content"] for each in found]
        return cls(
            told[0],
            tuple(turn.replace(question, each) for each in questions),
            tuple(plain[each.index]["content"] for each in found),
            asked[len(told[1]) :],
            end,
        )


Prefix = tuple[int, Block, State]
"""How many tokens of a conversation are evaluated, and what the model has of them."""


class Examination:
    """The built-in model, whose replies attend to sinks, tail and ``n_chosen`` chunks, or to everything if that is 0;
    with ``recency`` to as many of the last tokens instead. ``prefixes`` has what was evaluated with the same types."""

    def __init__(
        self, n_chosen: int, n_ctx: int, prefixes: dict[str, Prefix], *, recency: bool = False, kv: str = "f16"
    ) -> None:
        self._prefixes = prefixes
        select = SelectSettings(n_chosen * CHUNK)
        if recency:  # one chunk there must be: one that lies beside the sinks
            select = SelectSettings(CHUNK, n_tail=select.n_tail + (n_chosen - 1) * CHUNK)
        model = ModelSettings(path=str(builtin_model()), n_ctx=n_ctx, n_threads=1, type_k=kv, type_v=kv)
        self._loaded: Loaded = load(model, pool=PoolSettings(n_ctx, select))
        self._backend, self._tokenizer = self._loaded.backend, self._loaded.tokenizer
        self._backend.pin(0, ((CHUNK, 2 * CHUNK),) if recency else ())
        self.template = Template(self._loaded.info.chat_template, self._loaded.info.bos_token)
        self._n = 0

    def close(self) -> None:
        self._backend.unload()

    def answers(self, told: Told) -> tuple[list[bool], list[bool]]:
        """Whether each question is answered right: asked alone, and in a list of all."""
        backend = self._backend
        backend.memory.clear(0)
        self._n = 0
        begin, _, state = self._begin(told.text)
        alone = []
        for turn, answer in zip(told.turns, told.answers, strict=True):
            self._back(begin, state)
            self._read(turn + told.header)
            alone.append(self._reply() == answer)
        self._back(begin, state)
        self._read(told.turns[0] + told.header)
        listed = []
        for turn, answer in zip((*told.turns[1:], ""), told.answers, strict=True):
            listed.append(self._reply() == answer)
            self._write(self._tokens(told.end + turn + told.header) if turn else ())
        return alone, listed

    def _begin(self, text: str) -> Prefix:
        """Hold ``text``, which is evaluated once for all examinations: prompts attend to everything."""
        if text in self._prefixes:
            self._n, rows, state = self._prefixes[text]
            self._backend.memory.restore(0, 0, [(Rows(rows), 0, self._n)])
            self._backend.memory.restore(0, self._n, (), state)
        else:
            self._read(text)
            rows, state = (
                self._backend.memory.save_rows(0, 0, self._n).block,
                self._backend.memory.save_state(0, self._n),
            )
        self._backend.memory.synchronize()
        return self._prefixes.setdefault(text, (self._n, rows, state))

    def _tokens(self, text: str) -> Sequence[int]:
        return self._tokenizer.tokenize(text, add_special=False, parse_special=True)

    def _back(self, n: int, state: State) -> None:
        self._backend.memory.rewind(0, n)
        self._backend.memory.restore(0, n, (), state)
        self._n = n

    def _read(self, text: str) -> None:
        """Evaluate a part of a prompt."""
        tokens, step = as_tokens(self._tokens(text)), self._backend.facts.n_ubatch
        for start in range(0, tokens.size, step):
            part = tokens[start : start + step]
            self._backend.evaluate(0, part, self._n)
            self._n += int(part.size)

    def _write(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens one by one, as those of a reply."""
        for token in tokens:
            self._backend.decode([SequenceTokens(0, (token,), self._n)])
            self._n += 1

    def _reply(self) -> str:
        return "".join(self._pieces())

    def _pieces(self) -> Iterator[str]:
        for _ in range(MOST):
            token = int(np.argmax(self._backend.logits(0)))
            if self._backend.vocabulary.is_end(token):
                return
            yield self._backend.vocabulary.piece(token).decode("utf-8", "replace")
            self._write([token])


@dataclass(frozen=True)
class Score:
    """Right answers of ``n``: alone, and in lists, of which so many are whole."""

    n: int
    alone: int
    listed: int
    whole: int


def score(
    n_chosen: int,
    seeds: Sequence[int],
    tokens: int,
    prefixes: dict[str, Prefix],
    *,
    recency: bool = False,
    kv: str = "f16",
) -> Score:
    """What is found in conversations of so many tokens."""
    examination = Examination(n_chosen, tokens + 4096, prefixes, recency=recency, kv=kv)
    try:
        found = [examination.answers(Told.of(examination.template, seed, tokens)) for seed in seeds]
    finally:
        examination.close()
    alone, listed = (sum(map(sum, answers)) for answers in zip(*found, strict=True))
    return Score(8 * len(seeds), alone, listed, sum(all(answers) for _, answers in found))


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of each conversation")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--types", nargs="+", default=["f16"], help="types of K and V")
    args = parse(parser, argv, tokens=1024, conversations=1, chunks=[2])
    seeds = range(args.conversations)
    rows: list[list[object]] = []
    for kv in args.types:
        prefixes: dict[str, Prefix] = {}
        for n, name in ((0, "everything"), *((n, name) for n in args.chunks for name in ("recency", "chosen"))):
            found = score(n, seeds, args.tokens, prefixes, recency=name == "recency", kv=kv)
            alone, listed = f"{found.alone} of {found.n}", f"{found.listed} of {found.n}"
            rows.append([name, n * CHUNK or "all", kv, alone, listed, f"{found.whole} of {len(seeds)}"])
    columns = ["attends to", "tokens besides 64 first, 256 last", "K and V", "asked alone", "in lists", "whole lists"]
    title = f"Facts found by replies that do not attend to all of {args.tokens:,} tokens: right to the letter"
    show(title, columns, rows, keep="selection" if args.keep else "")


if __name__ == "__main__":
    main()
