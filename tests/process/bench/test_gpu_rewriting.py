"""A file written again, in its smallest form: pyctl with a given reply, no GPU, and no
llama-server.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu.given_reply import is_known, preloaded, read, write
from bench.gpu.rewriting import TYPES, texts_of
from bench.gpu.speculative_report import document
from pyctl.model_files import builtin_model

ROOT = Path(__file__).resolve().parents[3]


def test_conversations_have_no_token_in_common_and_none_that_is_special() -> None:
    texts = [
        {*prompt, *reply}
        for each in texts_of(248_320, builtin_model(), 300).values()
        for prompt, reply in each
    ]
    assert len(texts) == 24
    assert min(map(min, texts)) == 1000
    assert sum(map(len, texts)) == len(set().union(*texts))
    ((prompt, reply),) = texts_of(300, builtin_model(), 300)["a file"]
    assert len(reply) == 300
    assert max(prompt) == 93


def test_texts_of_some_kinds_alone() -> None:
    assert [*texts_of(248_320, builtin_model(), 300, ["JSON calls"])] == ["JSON calls"]


def test_a_head_knows_its_share() -> None:
    assert [sum(is_known(i, share) for i in range(4000)) / 4000 for share in (0.0, 0.8, 1.0)] == [
        0.0,
        pytest.approx(0.8, abs=0.03),
        1.0,
    ]


def test_the_library_for_llama_server_is_compiled_and_loads(tmp_path: Path) -> None:
    write(tmp_path / "tokens", [range(9), range(20, 30)])
    assert read(tmp_path / "tokens") == [[*range(9)], [*range(20, 30)]]
    command = preloaded(tmp_path, tmp_path / "tokens", 0.8)
    assert command[:2] == ["env", f"LD_PRELOAD={tmp_path / 'given_reply.so'}"]
    library = ctypes.CDLL(str(tmp_path / "given_reply.so"))
    for name in ("llama_process", "llama_batch_ext_set_pos", "llama_get_logits_ith"):
        assert getattr(library, name)
    if (
        "LLAMA_SERVER" not in os.environ
    ):  # a program that never calls llama.cpp runs with it all the same
        assert subprocess.run([*command, "true"], check=False).returncode == 0


@pytest.mark.parametrize("share", ["1", "0"])
def test_a_file_is_written_again(
    share: str, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """A head that is right for the given share of positions has nearly all of its drafts accepted,
    or nearly none: the benchmark controls acceptance without a trained model.
    """
    shape = "tiny-hybrid-nextn"
    command = [
        sys.executable,
        "-m",
        "bench.gpu.speculative",
        "--parts",
        "rewriting",
        "--servers",
        "pyctl",
    ]
    command += [
        "--models",
        f"{shape}={model_path(shape)}",
        "--prompt",
        "500",
        "--head-share",
        share,
    ]
    # With --exact there are drafts in each step, whether they pay or not.
    command += ["--results", str(tmp_path), "--flags", "-t 1 --exact"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    records = json.loads((tmp_path / f"gpu-speculative-{shape}.json").read_text(encoding="utf-8"))[
        "records"
    ]
    both, head = records
    assert [record["types"] for record in records] == [*TYPES["pyctl"]]
    assert both["n"] == head["n"] == 500
    assert both["drafted"] > 0 < head["drafted"]
    if share == "1":
        assert head["accepted"] >= head["drafted"] - 2, "the reply is the given one"
    else:
        assert head["accepted"] < head["drafted"] / 20
    assert "| a file | 1 | pyctl | draft-mtp |" in done.stdout
    assert "| a file | 1 | pyctl | draft-mtp |" in document(
        {"shape": shape, "machine": {}, "records": records}
    )
