"""Tokens per CPU second of builds of llama.cpp, in alternation: other programs on the machine slow all of them alike.

    python -m bench.builds MODEL DIR DIR...    # directories of libllama.so; ratios are to the first

With one thread a prompt of 256 tokens is evaluated, then 24 tokens one by one. Each round is a process of each build.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

from bench.common import show, shown
from pyctl.llama.devices import start_backends
from pyctl.llama.library import api
from pyctl.module_command import module_command


def rates(model: str) -> tuple[str, list[float]]:
    """The features of the CPU that this process's build uses, and its two rates."""
    start_backends()
    params = api.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    context = api.llama_init_from_model(loaded, params)

    def rate(size: int, n_batches: int) -> float:
        tokens = (api.llama_token * size)(*range(100, 100 + size))
        began = time.process_time()
        for _ in range(n_batches):
            assert api.llama_decode(context, api.llama_batch_get_one(tokens, size)) == 0
        return size * n_batches / (time.process_time() - began)

    rate(64, 1)
    features = [word[:-4] for word in api.llama_print_system_info().decode().split(" | ") if "AVX" in word]
    return " ".join(features).removeprefix("CPU : "), [rate(256, 1), rate(1, 24)]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("builds", nargs="*", type=Path, metavar="DIR")
parser.add_argument("--rounds", type=int, default=8)

if __name__ == "__main__":
    options = parser.parse_args()
    command = [*module_command("bench.builds"), options.model]
    found: dict[Path, list[tuple[str, list[float]]]] = {build.absolute(): [] for build in options.builds}
    for turn in range(options.rounds if found else 0):
        for build in list(found)[:: 1 if turn % 2 else -1]:
            environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(build), "MTMD_CPP_LIB": str(build)}
            found[build].append(tuple(json.loads(subprocess.check_output(command, env=environment))))
    rows = []
    for build, runs in found.items():
        row = [build.name, runs[0][0]]
        for kind in (0, 1):
            of_first, own = ([numbers[kind] for _, numbers in each] for each in (next(iter(found.values())), runs))
            ratio = statistics.median(mine / first for mine, first in zip(own, of_first, strict=True))
            row += [shown(statistics.median(own)), f"{ratio:.3f}"]
        rows.append(row)
    if found:
        show("Tokens per CPU second", ["build", "features", "prefill", "ratio", "decode", "ratio"], rows)
    else:
        print(json.dumps(rates(options.model)))
