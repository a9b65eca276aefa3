"""The part ``rewriting`` of `bench.gpu.speculative`: a reply that writes a file again with a dozen edits.

Files of bench/recorded follow each other in the prompt, with every change but a dozen left out of the reply. Models
have random weights, so both servers are given the reply (`bench.gpu.given_reply`): n-grams and the cache propose what
they find in the text, and are right where it is so. The tokens are those of Qwen3.5 (vendor/llama.cpp/models, once a
build has unpacked it), of the built-in model for tiny shapes, numbered anew so that none is special.
"""

from __future__ import annotations

from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.agent_edits import N_EDITS, N_FILE, VOCABULARY, conversation
from bench.gpu.given_reply import preloaded
from bench.gpu.report import OURS, PEER
from bench.gpu.servers import Completion, Server, llama_server, pyctl
from pyctl.models import builtin_model
from pyctl.module_command import module_command
from tools.generator import SHAPES

__all__ = ["rewriting"]

HEAD = "draft-mtp"
TYPES = {OURS: (HEAD, f"{HEAD},cache"), PEER: (HEAD, f"ngram-mod,{HEAD}", f"ngram-map-k,{HEAD}")}
"""Ways of drafting, by server; llama-server asks n-grams before the head."""

N_HEAD = 512
"""Tokens of the reply with the head alone, whose speed is the same all along."""

N_WARM = 24

_PROGRAM = module_command("bench.gpu.given_reply")

_FIRST, _PRINTED = 1000, 94
"""Tokens of a generated vocabulary: from so many on they are words, and the first ones are printed characters."""


class Run(Protocol):
    """What is needed of `bench.gpu.speculative.Run`."""

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


def numbered_anew(tokens: list[int], n_vocab: int) -> list[int]:
    """The same text in a generated vocabulary; different tokens may become one where it is small."""
    first, n = (_FIRST, n_vocab - _FIRST) if n_vocab > 2 * _FIRST else (0, _PRINTED)
    numbers = {token: first + i % n for i, token in enumerate(dict.fromkeys(tokens))}
    return [numbers[token] for token in tokens]


def rewriting(run: Run) -> None:
    """All ways of drafting of both servers, one after the other."""
    options = run.options
    n_vocab = SHAPES[run.shape].vocab_size
    file = VOCABULARY if n_vocab > 2 * _FIRST else builtin_model()
    if not file.is_file():  # a build unpacks it; the text has four times as many tokens of the built-in model
        run.findings.add(part="rewriting", kind="skipped", case=f"rewriting: no {file}", server=OURS)
        return
    prompt, reply = conversation(file, min(N_FILE, max(options.prompt)), N_EDITS)
    tokens = numbered_anew([*prompt, *reply], n_vocab)
    given = run.work / f"{run.shape}-given.bin"
    np.asarray(tokens, np.int32).tofile(given)
    for name in run.names:
        for types in TYPES[name]:
            if not run.has_time:
                run.findings.add(part="rewriting", kind="skipped", case=f"rewriting, {types}", server=name)
                continue
            n = min(len(reply), N_HEAD) if types == HEAD else len(reply)
            try:
                written = _written(_server(run, name, types, given, len(tokens)), tokens[: len(prompt)], n)
                run.findings.add(part="rewriting", kind="rewriting", server=name, types=types, **_found(written))
            except (OSError, HTTPException, ValueError) as error:
                why = str(error)[-600:]
                run.findings.add(part="rewriting", kind="failed", case=f"rewriting, {types}", server=name, why=why)


def _server(run: Run, name: str, types: str, file: Path, n_tokens: int) -> Server:
    flags = ["-m", str(run.model), "-c", str(n_tokens + 1024), "-ub", "512", "--parallel", "1", "-ngl", "99"]
    flags += ["-fa", "on", "--spec-type", types, "--spec-draft-n-max", "3", *run.options.flags]
    log, share = run.work / f"{run.shape}-rewriting-{name}-{types}.log", run.options.head_share
    if name == OURS:
        program = (*_PROGRAM, str(file), f"{share:g}")
        return pyctl(flags, None, log, program)
    begun = preloaded(run.work, file, share)
    server = llama_server(str(run.llama_server), flags, log)
    server.command = [*begun, *server.command]
    return server


def _written(server: Server, prompt: list[int], n: int) -> Completion:
    """The measured reply; what comes before loads kernels and evaluates the prompt."""
    with server:
        server.complete(prompt[: len(prompt) // 4], N_WARM)
        server.complete(prompt, N_WARM)
        return server.complete(prompt, n)


def _found(written: Completion) -> dict[str, Any]:
    (began, first), (ended, _) = written.arrivals[0], written.arrivals[-1]
    steps = max(written.n_predicted - written.n_accepted, 1)
    return {
        "n": written.n_predicted, "rate": (written.n_predicted - first) / max(ended - began, 1e-9),
        "steps": steps, "drafted": written.n_drafted, "accepted": written.n_accepted,
    }  # fmt: skip
