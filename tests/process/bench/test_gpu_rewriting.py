"""A file written again, in its smallest form: pyctl with a given reply, no GPU, and no llama-server."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.gpu.given_reply import is_known, preloaded
from bench.gpu.rewriting import TYPES, conversation, numbered_anew
from bench.gpu.speculative_report import document
from pyctl.models import builtin_model

ROOT = Path(__file__).resolve().parents[3]


def test_a_reply_is_the_file_with_some_of_its_changes() -> None:
    prompt, _ = conversation(builtin_model(), 1500, 0)
    held = {tuple(prompt[i : i + 8]) for i in range(len(prompt) - 7)}
    new = []
    for n_edits in (0, 3, 6, 1000):
        again, reply = conversation(builtin_model(), 1500, n_edits)
        assert again == prompt, "changes are in the reply alone"
        new.append(sum(tuple(reply[i : i + 8]) not in held for i in range(len(reply) - 7)))
    assert 1500 < len(prompt) < 2000
    assert new[0] < 50, "what is said before and after the file"
    assert new[0] < min(new[1:])
    assert max(new) < 400, "most of it is a copy"


def test_tokens_are_numbered_anew_and_none_is_special() -> None:
    text = [5, 151_643, 5, 7]
    assert numbered_anew(text, 248_320) == [1000, 1001, 1000, 1002]
    assert numbered_anew(text, 300) == [0, 1, 0, 2]
    assert max(numbered_anew(list(range(500)), 300)) < 94


def test_a_head_knows_its_share() -> None:
    assert [sum(is_known(i, share) for i in range(4000)) / 4000 for share in (0.0, 0.8, 1.0)] == [
        0.0,
        pytest.approx(0.8, abs=0.03),
        1.0,
    ]


def test_the_library_for_llama_server_is_compiled_and_loads(tmp_path: Path) -> None:
    np.arange(9, dtype=np.int32).tofile(tmp_path / "tokens")
    command = preloaded(tmp_path, tmp_path / "tokens", 0.8)
    assert command[:2] == ["env", f"LD_PRELOAD={tmp_path / 'given_reply.so'}"]
    library = ctypes.CDLL(str(tmp_path / "given_reply.so"))
    for name in ("llama_process", "llama_batch_ext_set_pos", "llama_get_logits_ith"):
        assert getattr(library, name)
    if "LLAMA_SERVER" not in os.environ:  # a program that never calls llama.cpp runs with it all the same
        assert subprocess.run([*command, "true"], check=False).returncode == 0


@pytest.mark.parametrize("share", ["1", "0"])
def test_a_file_is_written_again(share: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    shape = "tiny-hybrid-nextn"
    command = [sys.executable, "-m", "bench.gpu.speculative", "--parts", "rewriting", "--servers", "pyctl"]
    command += ["--models", f"{shape}={model_path(shape)}", "--prompt", "500", "--head-share", share]
    # With --exact there are drafts in each step, whether they pay or not.
    command += ["--results", str(tmp_path), "--flags", "-t 1 --exact"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    records = json.loads((tmp_path / f"gpu-speculative-{shape}.json").read_text(encoding="utf-8"))["records"]
    alone, both = records
    assert [record["types"] for record in records] == [*TYPES["pyctl"]]
    assert both["n"] > alone["n"] > 0
    if share == "1":
        assert alone["accepted"] == alone["drafted"], "the reply is the given one"
    else:
        assert alone["accepted"] < alone["drafted"] / 20
        assert both["accepted"] > both["n"] / 4, "from the text"
    assert f"| pyctl | {both['types']} |" in done.stdout
    assert f"| pyctl | {both['types']} |" in document({"shape": shape, "machine": {}, "records": records})
