"""Builds of llama.cpp side by side: tokens per second, and whether they compute the same bits.

    python -m bench.builds -m MODEL DIR DIR...  # places of libllama.so; ratios are to the first
    python -m bench.builds -m MODEL DIR DIR... --gpu

Each round is a process of each build, in alternation: other programs on the machine slow all of
them alike. It evaluates a prompt, a reply, and four replies at once, each token the likeliest one.
On the CPU that is one thread, and seconds are the process's own. ``bits`` compares all logits of
the replies with the first build.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import parse, parser_of, show, shown
from bench.gpu.machine import vram_mib
from pyctl.engine.backend import SequenceTokens
from pyctl.llama.library.bindings import api
from pyctl.llama.library.extension import library_file
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.model_files import builtin_model
from pyctl.processes.module_command import module_command
from pyctl.prompt import as_tokens

N_REPLIES = 4


def measure(model: str, n_prompt: int, n_reply: int, *, gpu: bool) -> dict[str, Any]:
    """Return the findings about the build of this process: rates in tokens per second, memory in
    MiB.
    """
    n_ctx = n_prompt + N_REPLIES * (64 + n_reply)
    n_threads = -1 if gpu else 1
    backend = load(
        ModelSettings(path=model, n_ctx=n_ctx, n_seqs=N_REPLIES, n_threads=n_threads)
    ).backend
    clock = time.perf_counter if gpu else time.process_time
    digest = hashlib.sha256()
    vocabulary = as_tokens(np.arange(max(n_prompt, 64)) % backend.tokenizer.n_vocab)

    def prompt(seq: int, n: int) -> float:
        began = clock()
        for start in range(0, n, backend.facts.n_ubatch):
            backend.evaluate(seq, vocabulary[start : min(start + backend.facts.n_ubatch, n)], start)
        return n / (clock() - began)

    def replies(seqs: Sequence[int], n_before: int) -> float:
        seconds = 0.0
        tokens = list(seqs)
        for n in range(n_before, n_before + n_reply):
            began = clock()
            backend.decode(
                [SequenceTokens(seq, (token,), n) for seq, token in zip(seqs, tokens, strict=True)]
            )
            logits = [backend.logits(i) for i in range(len(seqs))]
            seconds += clock() - began
            digest.update(b"".join(row.tobytes() for row in logits))
            tokens = [int(row.argmax()) for row in logits]
        return len(seqs) * n_reply / seconds

    prompt(0, 64)
    backend.memory.clear(0)
    rates = [prompt(0, n_prompt), replies([0], n_prompt)]
    for seq in range(N_REPLIES):
        backend.memory.clear(seq)
        prompt(seq, 64)
    rates.append(replies(range(N_REPLIES), 64))
    kind = r"ARCHS = (\S+)" if gpu else r"(\w*(?:AVX|AMX)\w*) = 1"
    text = api.llama_print_system_info().decode()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    vram = (vram_mib() or 0.0) if gpu else 0.0
    return {
        "features": " ".join(re.findall(kind, text)),
        "bits": digest.hexdigest(),
        "rates": rates,
        "mib": [rss, vram],
    }


def row_of(
    build: Path, runs: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the row of ``build``: medians, and medians of the ratios to ``first``'s run of the
    same round.
    """
    is_same = {run["bits"] for run in (*runs, *first)} == {first[0]["bits"]}
    row = [build.name, runs[0]["features"], "same" if is_same else "other"]
    for kind in range(3):
        own, others = ([run["rates"][kind] for run in each] for each in (runs, first))
        ratio = statistics.median(mine / theirs for mine, theirs in zip(own, others, strict=True))
        row += [shown(statistics.median(own)), f"{ratio:.3f}"]
    return row + [shown(max(run["mib"][kind] for run in runs)) for kind in (0, 1)]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per build with its bits and speeds. A process can load a single build, so each
    measurement is a child with --json; rounds run the builds forwards and backwards in turn, so
    that a drift of the machine does not favour one of them.
    """
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", default=str(builtin_model()))
    parser.add_argument(
        "builds", nargs="*", type=Path, metavar="DIR", default=[Path(library_file(""))]
    )
    parser.add_argument(
        "--gpu", action="store_true", help="with the first card, and seconds of a clock"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the findings about this process's build as JSON"
    )
    parser.add_argument("--rounds", type=int, default=8)
    options = parse(parser, argv, rounds=1)
    n_prompt, n_reply = (64, 4) if options.quick else (4096, 128) if options.gpu else (256, 24)
    if options.json:
        print(json.dumps(measure(options.model, n_prompt, n_reply, gpu=options.gpu)))
        return
    command = [*module_command("bench.builds"), "--json", "-m", options.model]
    command += [*["--gpu"] * options.gpu, *["--quick"] * options.quick]
    runs: dict[Path, list[dict[str, Any]]] = {build.absolute(): [] for build in options.builds}
    for turn in range(options.rounds):
        for build in list(runs)[:: 1 if turn % 2 else -1]:
            environment = {
                "CUDA_VISIBLE_DEVICES": "0" if options.gpu else "",
                "LLAMA_CPP_LIB_PATH": str(build),
            }
            environment = {**os.environ, **environment, "MTMD_CPP_LIB": str(build)}
            runs[build].append(json.loads(subprocess.check_output(command, env=environment)))
    columns = [
        "build",
        "features",
        "bits",
        "prompt",
        "ratio",
        "reply",
        "ratio",
        "4 replies",
        "ratio",
        "RSS",
        "VRAM",
    ]
    rows = [row_of(build, found, next(iter(runs.values()))) for build, found in runs.items()]
    title = f"Builds of llama.cpp: tokens per {'' if options.gpu else 'CPU '}second, MiB"
    keep = f"builds-{'gpu' if options.gpu else 'cpu'}" if options.keep else ""
    show(title, columns, rows, keep=keep, weights=Path(options.model).name)


if __name__ == "__main__":
    main()
