"""The gain of drafts from `cache` in addition to a head when agents rewrite files that they have
read, without a model.

    python -m bench.agent_edits [--vocab ggml-vocab-qwen35.gguf] [--keep]

bench/recorded holds files of this project before and after a change (as difflib's ndiff). In each
conversation a tool reads the file, and the agent changes it in one of the usual ways; the reply is
replayed token by token against the proposed drafts. A step evaluates one token and the drafts.
Without --vocab the tokens are Qwen3.5's, if a build has unpacked llama.cpp here, or else of the
built-in model. The first table has a head that predicts `HEAD_SHARE` of all tokens: tokens a step,
and speed as a multiple of that with only the head, with the step times of two models on an H200
(bench/draft_length.py). The second is of the reply that `bench.gpu.rewriting` measures.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bench.common import SIMULATED, parse, parser_of, show, tokenizer_of
from bench.draft_length import MACHINES, REWRITING, Machine
from bench.gpu.given_reply import is_known
from pyctl.cache.sequence import LiveSequence
from pyctl.engine.draft.cache_drafts import CacheDrafts
from pyctl.engine.draft.ngram_settings import LONGEST
from pyctl.engine.draft.source import DraftJob, DraftSource
from pyctl.engine.draft.speculation import Speculation
from pyctl.llama.library.llama_tokenizer import LlamaTokenizer
from pyctl.model_files import builtin_model
from pyctl.prompt import Tokens, as_tokens

RECORDED = Path(__file__).parent / "recorded"

VOCABULARY = RECORDED.parents[1] / "vendor" / "llama.cpp" / "models" / "ggml-vocab-qwen35.gguf"

N_FILE = 8192
N_EDITS = 12
"""Tokens of the file, and changes in it."""

HEAD_SHARE = 0.8
"""Places where a head has the right next token, in the first table."""


@dataclass(frozen=True)
class Edit:
    """A file at ``path`` ``before`` and ``after`` a change, and its purpose."""

    path: str
    task: str
    before: str
    after: str

    def hunks(self, context: int) -> Iterator[tuple[str, str]]:
        """Yield the old and the new text of each change, with lines around."""
        old = self.before.splitlines(True)
        new = self.after.splitlines(True)
        for group in difflib.SequenceMatcher(None, old, new).get_grouped_opcodes(context):
            yield "".join(old[group[0][1] : group[-1][2]]), "".join(new[group[0][3] : group[-1][4]])


def recorded() -> list[Edit]:
    """Return all edits of the folder."""
    edits = []
    for file in sorted(RECORDED.glob("*.ndiff")):
        head, *lines = file.read_text(encoding="utf-8").splitlines(True)
        path, _, task = head.strip().partition(": ")
        edits.append(
            Edit(path, task, *("".join(difflib.restore(lines, which)) for which in (1, 2)))
        )
    return edits


Conversation = tuple[str, str]
"""All before the reply, and the reply."""

SYSTEM = (
    "You are a coding agent. You read files with the tool read_file and change them. Keep changes "
    "small, keep the "
    "style of the file, and say in a sentence what you did.\n"
)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def asked(edit: Edit, read: str) -> str:
    """Return the conversation up to the reply; ``read`` is the tool's result."""
    call = json.dumps({"name": "read_file", "arguments": {"path": edit.path}})
    return (
        turn("system", SYSTEM)
        + turn("user", f"{edit.task}. Begin with `{edit.path}`.")
        + turn("assistant", f"I will look at the file first.\n\n<tool_call>\n{call}\n</tool_call>")
        + turn("user", f"<tool_response>\n{read}</tool_response>")
        + "<|im_start|>assistant\n"
    )


def numbered(text: str) -> str:
    return "".join(f"{number:6}\t{line}" for number, line in enumerate(text.splitlines(True), 1))


def fenced(edit: Edit) -> str:
    language = {"py": "python", "cpp": "cpp", "md": "markdown"}[edit.path.rpartition(".")[2]]
    text = (
        f"Here is the whole file with the change.\n\n```{language}\n{edit.after}```\n\nNothing "
        "else had to change."
    )
    return f"{text}<|im_end|>"


def conversation(file: Path, n_file: int, n_edits: int) -> tuple[list[int], list[int]]:
    """Return prompt and reply in the tokens of the model or vocabulary at ``file``."""
    tokenize = tokenizer_of(file).tokenize
    pieces: list[tuple[str, str]] = []
    n = 0
    for edit in recorded():
        old = edit.before.splitlines(True)
        new = edit.after.splitlines(True)
        for _, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new).get_opcodes():
            if n < n_file:
                pieces.append(("".join(old[i:i_end]), "".join(new[j:j_end])))
                n += len(tokenize(pieces[-1][0]))
    changed = [i for i, (before, after) in enumerate(pieces) if before != after]
    kept = {changed[i * len(changed) // n_edits] for i in range(min(n_edits, len(changed)))}
    after = "".join(new if i in kept else old for i, (old, new) in enumerate(pieces))
    edit = Edit(
        "engine/stream.py", "Make the changes we spoke of", "".join(old for old, _ in pieces), after
    )
    return list(tokenize(asked(edit, edit.before))), list(tokenize(fenced(edit)))


def whole_file(edit: Edit) -> Conversation:
    return asked(edit, edit.before), fenced(edit)


def whole_file_numbered(edit: Edit) -> Conversation:
    return asked(edit, numbered(edit.before)), fenced(edit)


def search_and_replace(edit: Edit) -> Conversation:
    blocks = [
        f"{edit.path}\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n"
        for old, new in edit.hunks(2)
    ]
    return asked(edit, edit.before), "I change these places:\n\n" + "\n".join(blocks) + "<|im_end|>"


def json_call(edit: Edit) -> Conversation:
    call = json.dumps(
        {"name": "write_file", "arguments": {"path": edit.path, "content": edit.after}},
        ensure_ascii=False,
    )
    return asked(
        edit, edit.before
    ), f"I write the file anew.\n\n<tool_call>\n{call}\n</tool_call><|im_end|>"


def json_edits(edit: Edit) -> Conversation:
    calls = [
        json.dumps(
            {"name": "edit", "arguments": {"path": edit.path, "old": old, "new": new}},
            ensure_ascii=False,
        )
        for old, new in edit.hunks(2)
    ]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return asked(edit, edit.before), f"I change these places.\n\n{text}<|im_end|>"


def unified_diff(edit: Edit) -> Conversation:
    old = edit.before.splitlines(True)
    new = edit.after.splitlines(True)
    lines = difflib.unified_diff(old, new, f"a/{edit.path}", f"b/{edit.path}")
    return asked(
        edit, edit.before
    ), f"This patch does it:\n\n```diff\n{''.join(lines)}```<|im_end|>"


def read_elsewhere(edit: Edit) -> Conversation:
    """Return the conversation of an edit whose file was read in another conversation only, which
    the cache remembers.
    """
    return asked(edit, "The file is as in the conversation before.\n"), fenced(edit)


FORMS: dict[str, Callable[[Edit], Conversation]] = {
    "whole file": whole_file,
    "whole file, read with line numbers": whole_file_numbered,
    "search and replace blocks": search_and_replace,
    "JSON call, whole file": json_call,
    "JSON calls, old and new text": json_edits,
    "unified diff": unified_diff,
    "whole file, read in another conversation": read_elsewhere,
}


@dataclass
class Count:
    """Counts of the tokens and the steps of replies."""

    n_tokens: int = 0
    n_steps: int = 0


class Head:
    """A head that drafts the reply, or another token if it is wrong."""

    name = "draft-mtp"
    n_max = 3

    def __init__(self, machine: Machine) -> None:
        self.text: list[int] = []
        self.ms = 0.0
        self._machine = machine

    def propose(self, jobs: Sequence[DraftJob], n: int = 0) -> list[tuple[int, ...]]:
        self.ms += n * self._machine.draft_ms
        firsts = [job.seq.n + len(job.sure) for job in jobs]
        return [tuple(self._token(place) for place in range(first, first + n)) for first in firsts]

    def _token(self, place: int) -> int:
        token = self.text[place] if place < len(self.text) else 0
        return token if is_known(place, HEAD_SHARE) else token + 1


class Beside:
    """A server of one request at a time that drafts from a head, and from ``cache`` if it is given
    one.
    """

    def __init__(self, machine: Machine, cache: CacheDrafts | None) -> None:
        self.machine = machine
        self.cache = cache
        self.head = Head(machine)
        self.count = Count()
        self.ms = 0.0
        lengths = machine.controller()
        head = self.head
        sources: list[DraftSource] = [cache] if cache is not None else []
        self._speculation = Speculation(sources, cast(Any, head), lengths=lengths)
        self._speculation.seconds = lambda: head.ms / 1e3
        self._width = self._place = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.count.n_tokens / self.ms * 1e3

    def reply(self, key: int, prompt: Tokens, reply: Tokens) -> None:
        """Serve a request whose model replies ``reply``; right tokens after a mark are sure in the
        next step.
        """
        seq = LiveSequence(0, prompt.size + reply.size)
        tokens = tuple(reply.tolist())
        n = 1
        seq.reset(prompt)
        self.head.text = [*prompt.tolist(), *tokens]
        n_free = self.machine.n_free
        sure = tokens[:1]
        with self._speculation.following(key, prompt):
            while n < len(tokens):
                if self.cache is not None:
                    self.cache.flush()
                self.head.ms = 0.0
                maximum = min(len(tokens) - n, LONGEST if len(sure) == 1 else n_free)
                (draft,) = self._speculation.propose([DraftJob(key, seq, sure, maximum)])
                pairs = zip(draft.tokens, tokens[n:], strict=False)
                right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(draft.tokens))
                self._step(key, len(sure) + len(draft.tokens), right)
                said = (*sure, *tokens[n : n + right + 1])
                n = n + right + 1
                n_held = (
                    len(said) - 1
                    if right == len(draft.tokens) or len(draft.tokens) <= n_free
                    else 0
                )
                for token in said[:n_held]:
                    seq.append_one(token)
                sure = said[n_held:]

    def _step(self, key: int, width: int, n_right: int) -> None:
        machine = self.machine
        self._place = self._place + 1 if width == self._width else 0
        self._width = width
        ms = machine.ms(width) + (machine.graph_ms[self._place] if self._place < 2 else 0.0)
        self._speculation.record({key: n_right}, width, ms)
        self.ms += ms + self.head.ms
        self.count.n_tokens += 1 + n_right
        self.count.n_steps += 1


def rewriting(machine: Machine, prompt: Tokens, reply: Tokens) -> list[object]:
    """Return tokens a second with the head alone and with both, and tokens a step, of a server that
    has drafted before.
    """
    cells: list[object] = [machine.name]
    for cache in (None, CacheDrafts()):
        server = Beside(machine, cache)
        if cache is not None:
            cache.remember(prompt)
        server.reply(0, prompt[: prompt.size // 4], prompt[prompt.size // 4 :][:24])
        server.count = Count()
        server.ms = 0.0
        server.reply(1, prompt, reply)
        cells.append(f"{server.rate:.0f}")
    return [*cells, f"{server.count.n_tokens / server.count.n_steps:.1f}"]


def beside_head(
    form: Callable[[Edit], Conversation], edits: Sequence[Edit], vocab: LlamaTokenizer
) -> list[str]:
    """Return for each machine tokens a step with the head alone and with both, and the ratio of the
    speeds.
    """
    cells = []
    for machine in MACHINES[:2]:
        servers = [Beside(machine, cache) for cache in (None, CacheDrafts())]
        for server in servers:
            for key, edit in enumerate(edits):
                texts = form(edit)
                if server.cache is not None:
                    before = asked(edit, edit.before) if form is read_elsewhere else texts[0]
                    for text in dict.fromkeys((before, texts[0])):
                        server.cache.remember(as_tokens(vocab.tokenize(text)))
                prompt, reply = (as_tokens(vocab.tokenize(text)) for text in texts)
                server.reply(key, prompt, reply)
        cells += [
            f"{server.count.n_tokens / max(server.count.n_steps, 1):.2f}" for server in servers
        ]
        cells.append(f"{servers[0].ms / servers[1].ms:.2f}")
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    """Print two tables of tokens per step and speed, with a head alone and with the cache's drafts:
    one for each way to edit, one for a whole file written again. Without --vocab the vocabulary is
    `VOCABULARY` if that file is there, and else the built-in model's.
    """
    parser = parser_of(__doc__)
    parser.add_argument("--vocab", metavar="FILE", help="a GGUF file with the vocabulary to use")
    parser.add_argument("--edits", type=int, metavar="N", help="number of edits; default: all")
    options = parse(parser, argv, edits=1)
    file = Path(options.vocab or (VOCABULARY if VOCABULARY.is_file() else builtin_model()))
    vocab = tokenizer_of(file)
    edits = recorded()[: options.edits]
    columns = [
        "way to edit",
        *(f"{m.name}: {what}" for m in MACHINES[:2] for what in ("head", "and cache", "speed")),
    ]
    rows: list[list[object]] = [
        [title, *beside_head(form, edits, vocab)] for title, form in FORMS.items()
    ]
    title = (
        f"{len(edits)} edits with a head that is right in {HEAD_SHARE:.0%} of all places: "
        "tokens a step, speed"
    )
    show(title, columns, rows, keep="agent-edits-head" if options.keep else "", weights=SIMULATED)
    n_file, n_edits = (N_FILE, N_EDITS) if options.edits is None else (512, options.edits)
    prompt, reply = map(as_tokens, conversation(file, n_file, n_edits))
    rows = [rewriting(machine, prompt, reply) for machine in REWRITING]
    columns = ["machine", "the head: tokens/s", "the head and the text", "tokens a step"]
    title = f"A file of {n_file} tokens written again with {n_edits} edits, simulated"
    show(title, columns, rows, keep="agent-edits-file" if options.keep else "", weights=SIMULATED)


if __name__ == "__main__":
    main()
