"""The part ``rewriting`` of `bench.gpu.speculative`: own texts and changed files, with and without
`cache`.

Prompts are documents of this project, and files of bench/recorded; replies are other documents, and
the changed files in the ways of `bench.agent_edits`. Models have random weights, so both servers
are given the replies (`bench.gpu.given_reply`): n-grams and the cache propose what they find in the
text, and are right if that fits. No conversation is sent twice, since the cache remembers a reply
that it was given. The tokens are Qwen3.5's (vendor/llama.cpp/models, once a build has unpacked it),
of the built-in model for tiny shapes, numbered anew so that none is special, and each conversation
has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

from bench.agent_edits import (
    VOCABULARY,
    Conversation,
    json_edits,
    recorded,
    search_and_replace,
    whole_file,
)
from bench.common import tokenizer_of
from bench.gpu.given_reply import preloaded, write
from bench.gpu.machine import vram_mib
from bench.gpu.report import OURS, PEER
from bench.gpu.servers import Server, llama_server, pyctl, window_rate
from pyctl.measure.process_stats import resident_mib
from pyctl.model_files import builtin_model
from pyctl.processes.module_command import module_command
from tools.generator import SHAPES

__all__ = ["KINDS", "rewriting"]

HEAD = "draft-mtp"
TYPES = {OURS: (f"{HEAD},cache", HEAD), PEER: (f"ngram-map-k,{HEAD}",)}
"""Ways of drafting, by server; llama-server tries n-grams before the head. More flags may follow
each.
"""

PLAIN = "plain text"
AT_ONCE = (1, 4)
"""Replies: so many conversations are asked at once, after `N_ALONE` of them in turn."""

N_ALONE = 2
N_KIND = N_ALONE + AT_ONCE[-1]
MAX = {PLAIN: 300}
LONGEST = 600
"""Tokens of a reply."""

N_WARM = 2
"""Tokens after each prompt before anything counts: the cache must not have a reply."""

CONTEXT = 65_536

DOCS = Path(__file__).parents[2] / "docs"

_PROGRAM = module_command("bench.gpu.given_reply")

_FIRST = 1000
_PRINTED = 94
"""Tokens of a generated vocabulary: from so many on they are words, and the first ones are printed
characters.
"""

Text = tuple[list[int], list[int]]
"""Tokens of a prompt and of the reply."""


class Run(Protocol):
    """The members of `bench.gpu.speculative.Run` that these cases use."""

    shape: str
    model: Path
    llama_server: str | None
    options: Any
    findings: Any
    work: Path

    @property
    def names(self) -> list[str]: ...

    @property
    def has_time(self) -> bool: ...


def plain() -> Iterator[Conversation]:
    """Yield documents, each of which is the reply to the one before."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(DOCS.glob("*.md"))]
    yield from pairwise(text for text in texts if len(text) > 4 * LONGEST)


def edits(form: Callable[..., Conversation]) -> Iterator[Conversation]:
    """Yield recorded edits, each made in this way."""
    return map(form, recorded())


KINDS: dict[str, Callable[[], Iterator[Conversation]]] = {
    PLAIN: plain,
    "a file": lambda: edits(whole_file),
    "search and replace": lambda: edits(search_and_replace),
    "JSON calls": lambda: edits(json_edits),
}


def texts_of(
    n_vocab: int, file: Path, longest: int, kinds: Collection[str] = tuple(KINDS)
) -> dict[str, list[Text]]:
    """Return conversations of each of ``kinds`` in a generated vocabulary; one only, whose tokens
    may become the same, if that is small. Replies have up to ``longest`` tokens.
    """
    tokenize = tokenizer_of(file).tokenize
    is_small = n_vocab < 2 * _FIRST
    first, n_numbers, n_kind = (0, _PRINTED, 1) if is_small else (_FIRST, n_vocab - _FIRST, N_KIND)
    found: dict[str, list[Text]] = {}
    for kind, conversations in KINDS.items():
        if kind not in kinds:
            continue
        for before, after in islice(
            conversations() if kind == "a file" or not is_small else (), n_kind
        ):
            prompt = tokenize(before)
            reply = tokenize(after)[: min(MAX.get(kind, LONGEST), longest)]
            numbers = {
                token: first + i % n_numbers
                for i, token in enumerate(dict.fromkeys([*prompt, *reply]))
            }
            first += 0 if is_small else len(numbers)
            found.setdefault(kind, []).append(
                ([numbers[t] for t in prompt], [numbers[t] for t in reply])
            )
    return found


def rewriting(run: Run) -> None:
    """Measure all ways of drafting of both servers, one after the other."""
    n_vocab = SHAPES[run.shape].vocab_size
    file = VOCABULARY if n_vocab > 2 * _FIRST else builtin_model()
    if (
        not file.is_file()
    ):  # a build unpacks it; the text has four times as many tokens of the built-in model
        run.findings.add(
            part="rewriting", kind="skipped", case=f"rewriting: no {file}", server=OURS
        )
        return
    texts = texts_of(n_vocab, file, max(run.options.prompt), run.options.texts)
    given = run.work / f"{run.shape}-given.bin"
    write(given, [[*prompt, *reply] for each in texts.values() for prompt, reply in each])
    for name in run.names:
        asked = run.options.types if name == OURS else []
        for types in asked or TYPES[name]:
            if not run.has_time:
                run.findings.add(
                    part="rewriting", kind="skipped", case=f"rewriting, {types}", server=name
                )
                continue
            try:
                _measure(run, name, types, _server(run, name, types, given), texts)
            except (OSError, HTTPException, ValueError) as error:
                why = str(error)[-600:]
                run.findings.add(
                    part="rewriting",
                    kind="failed",
                    case=f"rewriting, {types}",
                    server=name,
                    why=why,
                )


def _server(run: Run, name: str, types: str, file: Path) -> Server:
    """Return a server with a context of a coding agent."""
    flags = [
        "-m",
        str(run.model),
        "-c",
        str(CONTEXT),
        "--parallel",
        str(AT_ONCE[-1]),
        "-ngl",
        "99",
        "-fa",
        "on",
    ]
    types, *more = types.split()
    flags += ["--spec-type", types, *more, "--spec-draft-n-max", "2" if name == OURS else "3"]
    log = run.work / f"{run.shape}-rewriting-{name}-{types}.log"
    share = run.options.head_share
    flags += run.options.flags
    if name == OURS:
        program = (*_PROGRAM, str(file), f"{share:g}")
        return pyctl(flags, None, log, program)
    begun = preloaded(run.work, file, share)
    server = llama_server(str(run.llama_server), flags, log)
    server.command = [*begun, *server.command]
    return server


def _measure(run: Run, name: str, types: str, server: Server, kinds: dict[str, list[Text]]) -> None:
    """Ask for replies in turn and at once, each after a prompt that was evaluated before."""
    found: list[dict[str, Any]] = []
    with server:
        for kind, texts in kinds.items():
            for prompt, reply in texts:
                server.complete(prompt, min(N_WARM, len(reply)))
            for n in AT_ONCE:
                asked = texts[:N_ALONE] if n == 1 else texts[N_ALONE : N_ALONE + n]
                if asked:
                    found.append({"text": kind, "n_seqs": n, **_asked(server, asked, n)})
        resident = resident_mib(server.pid)
        before = vram_mib()
    after = vram_mib()
    vram = None if before is None or after is None else before - after
    for each in found:
        run.findings.add(
            part="rewriting",
            kind="rewriting",
            server=name,
            types=types,
            **each,
            vram_mib=vram,
            resident_mib=resident,
        )


def _asked(server: Server, texts: Sequence[Text], n_seqs: int) -> dict[str, Any]:
    """Return the figures of the replies to all ``texts``, ``n_seqs`` at a time; the time starts
    with the first token of each, or of all. ``rate_of_all`` is the speed while all are written: of
    several, one that copies ends earlier, and the others are decoded in smaller batches then.
    """
    with ThreadPoolExecutor(n_seqs) as pool:
        replies = list(pool.map(lambda text: server.complete(text[0], len(text[1])), texts))
    spans = [(reply.arrivals[0], reply.arrivals[-1]) for reply in replies]
    if n_seqs == 1:
        seconds = sum(last[0] - first[0] for first, last in spans)
    else:
        seconds = max(last[0] for _, last in spans) - min(first[0] for first, _ in spans)
    n = sum(reply.n_predicted for reply in replies)
    n_accepted = sum(reply.n_accepted for reply in replies)
    n_first = sum(first[1] for first, _ in spans)
    return {
        "n": n,
        "rate": (n - n_first) / max(seconds, 1e-9),
        "rate_of_all": window_rate(replies) if n_seqs > 1 else None,
        "steps": max(n - n_accepted, 1),
        "drafted": sum(reply.n_drafted for reply in replies),
        "accepted": n_accepted,
    }
