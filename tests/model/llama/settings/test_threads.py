"""The number of threads that evaluate, and how long they spin while other processes need the
cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as api

from pyctl.llama.loader import load
from pyctl.llama.settings import resolved
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import context_params
from pyctl.llama.settings.resolved import Resolved
from pyctl.model_files import builtin_model

MIB = 2**20


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(resolved, "physical_cores", lambda: 16)
    return 16


@pytest.mark.parametrize(
    ("given", "n_layer_bytes", "expected"),
    [
        pytest.param({}, MIB - 1, (1, 16), id="tiny layers"),
        pytest.param({}, 6 * MIB, (6, 16), id="small layers"),
        pytest.param({}, 400 * MIB, (16, 16), id="large layers"),
        pytest.param({}, None, (16, 16), id="unknown layers"),
        pytest.param({"n_threads": 3}, 1, (3, 3), id="the user knows"),
        pytest.param({"n_threads_batch": 5}, 1, (1, 5), id="of prompts"),
    ],
)
def test_threads_are_as_many_as_the_layers_are_worth(
    cores: int, given: dict[str, int], n_layer_bytes: int | None, expected: tuple[int, int]
) -> None:
    settings = replace(Resolved.from_settings(ModelSettings(**given)), n_layer_bytes=n_layer_bytes)
    made = context_params(settings, 512)
    assert (made.n_threads, made.n_threads_batch) == expected


def test_the_built_in_model_decodes_with_one_thread(cores: int) -> None:
    backend = load(ModelSettings(path=str(builtin_model()), n_ctx=512)).backend
    try:
        assert api.llama_n_threads(backend.ctx) == 1
        assert api.llama_n_threads_batch(backend.ctx) == cores
    finally:
        backend.unload()


def openmp_says(code: str, **environ: str) -> str:
    """Return the spinning time of threads that libgomp prints when it is loaded."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    command = [sys.executable, "-c", code]
    environ = {**kept, "OMP_DISPLAY_ENV": "verbose", **environ}
    text = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stderr
    if "OPENMP DISPLAY ENVIRONMENT" not in text:
        pytest.skip("this llama.cpp was built without OpenMP")
    return text.partition("GOMP_SPINCOUNT = '")[2].partition("'")[0]


def test_threads_spin_briefly_unless_somebody_says_otherwise() -> None:
    load_it = "import pyctl.llama"
    assert openmp_says(load_it) == "2000"
    assert openmp_says(load_it, GOMP_SPINCOUNT="77") == "77"
    polled = (
        "import sys; from pyctl.cli import main; main(['serve', '--poll', '10', '--list-devices'])"
    )
    assert openmp_says(polled) == "400"
    assert openmp_says(polled.replace("'--poll', '10'", "'--cpu-moe'")) == "300000"
    assert openmp_says(load_it, OMP_WAIT_POLICY="passive") == "0"


REST = """
import os, sys, threading
from pyctl.cli.arguments import parse_serve
from pyctl.cli.assemble import assemble
from pyctl.engine.request import Request
from pyctl.prompt import Prompt, as_tokens
from tests.waiting import until

def n_other():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

n_before = n_other()
service = assemble(parse_serve(sys.argv[1:], {}))
until(lambda: n_other() == n_before)
for _ in range(2):
    for _ in service.worker.submit(Request(Prompt(as_tokens([65, 66, 67])), max_tokens=4)):
        pass
    until(lambda: n_other() == n_before)
service.worker.close()
"""


@pytest.mark.parametrize(
    ("name", "flags"),
    [("tiny-hybrid", ()), ("tiny-hybrid-nextn", ("--exact", "--spec-type", "draft-mtp"))],
)
def test_no_thread_of_openmp_stays_when_nothing_is_evaluated(
    model_path: Callable[[str], Path], name: str, flags: tuple[str, ...]
) -> None:
    """An idle server has as many threads as before its model was loaded."""
    # libgomp keeps threads for each thread that evaluated; with more than cores, none of them spins
    # at a barrier.
    command = [
        sys.executable,
        "-c",
        REST,
        "-m",
        str(model_path(name)),
        "-c",
        "512",
        "-t",
        "2",
        *flags,
    ]
    subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}, check=True)
