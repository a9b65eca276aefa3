"""`pyctl doctor` on the machine of the test, and `pyctl bench` on the built-in model, as small as
it gets.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from pyctl.doctor.examine import CHECKS
from pyctl.measure.server_process import clean_environment
from pyctl.model_files import builtin_model
from tests.waiting import until

SMALL = shlex.split("--depths 300 600 --quick -t 1 -c 4096 -np 1 --spec-type ngram-simple")
"""Drafts that no head makes save a start."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pyctl", *arguments]


def environment(home: Path) -> dict[str, str]:
    return {**clean_environment(), "XDG_CACHE_HOME": str(home), "PYCTL_KV_CACHE": "on"}


def test_doctor_makes_every_check_and_sees_a_model_that_is_cut_off(tmp_path: Path) -> None:
    """Doctor reports a result for every check, fails with exit code 1, and distinguishes a model
    that is cut off from a file of another kind.
    """
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(builtin_model().read_bytes()[:5_000_000])
    arguments = command("doctor", "--json", "-m", str(cut), "-c", "4096")
    done = subprocess.run(
        arguments, capture_output=True, text=True, env=environment(tmp_path), timeout=60
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    made = {*found["fine"], *found["absent"], *(finding["check"] for finding in found["findings"])}
    assert made == {check.name for check in CHECKS}
    assert "disk space" not in found["absent"]
    (model,) = (finding for finding in found["findings"] if finding["check"] == "model")
    assert model["level"] == "wrong"
    assert model["text"] == "cut.gguf is cut off: 5,000,000 bytes of 8,922,624"
    cut.write_bytes(b"<!DOCTYPE html>" * 100)
    done = subprocess.run(
        arguments, capture_output=True, text=True, env=environment(tmp_path), timeout=60
    )
    (model,) = (finding for finding in json.loads(done.stdout)["findings"])
    assert model["text"] == f"{cut} is not a GGUF file"
    assert done.stderr == ""


def test_doctor_lists_automatic_values_with_their_reasons(tmp_path: Path) -> None:
    arguments = command("doctor", "-m", str(builtin_model()), "-c", "4096", "-ub", "64")
    outputs = [
        subprocess.run(
            [*arguments, *more],
            capture_output=True,
            text=True,
            env=environment(tmp_path),
            timeout=60,
        ).stdout
        for more in ((), ("--json",))
    ]
    values = {row["flag"]: row for row in json.loads(outputs[1])["settings"]}
    assert values["--ctx-size"] == {"flag": "--ctx-size", "value": "4096", "reason": "given"}
    assert values["--ubatch-size"]["value"] == "64"
    assert "\n--ctx-size           4096: given\n" in outputs[0]
    assert max(map(len, outputs[0].splitlines())) <= 80


def test_bench_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The benchmark restores from each tier with equal logits, and leaves no file, neither in the
    given cache directory nor elsewhere.
    """
    user = tmp_path / "kv"
    home = tmp_path / "home"
    arguments = command("bench", *SMALL, "--json", "--kv-cache-dir", str(user), "--port", "1")
    done = subprocess.run(
        arguments, capture_output=True, text=True, env=environment(home), timeout=240
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)["records"]
    sources = {
        record["way"]: record["source"] for record in records if record["kind"] == "first token"
    }
    assert sources["cold"] == "none"
    assert sources["from RAM"] in (
        "ram",
        "live",
    )  # live where a pause was long enough to make the next turn ready
    assert sources["from disk, restarted"] == "disk"
    exact = [record for record in records if record["kind"] == "exact"]
    assert len(exact) == 3
    assert all(record["cached"] > 0 and record["difference"] == 0 for record in exact)
    assert {each.name for each in tmp_path.rglob("*")} <= {"pyctl"}


def test_memory_before_a_prompt_is_no_figure(tmp_path: Path) -> None:
    """And a file to send names the card, and no directory of the user's."""
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho NVIDIA GeForce RTX 3090, 16, 16, 4, 4, 500\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    arguments = command("bench", *SMALL, "--budget", "0.001", "--json")
    home = environment(tmp_path / "home") | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=home, timeout=240)
    found = json.loads(done.stdout)
    kinds = {record["kind"] for record in found["records"]}
    assert done.returncode == 0
    assert "skipped" in kinds
    assert "memory" not in kinds
    assert found["cards"] == ["NVIDIA GeForce RTX 3090"]
    assert found["flags"][:2] == ["-m", "builtin.gguf"]


def test_a_bench_whose_server_does_not_start_says_why(tmp_path: Path) -> None:
    arguments = command("bench", "--quick", "-c", "2000000000")
    done = subprocess.run(
        arguments, capture_output=True, text=True, env=environment(tmp_path), timeout=60
    )
    assert done.returncode == 1
    assert "\nfailed                  pyctl: " in done.stdout
    assert "Traceback" not in done.stderr
    assert {each.name for each in tmp_path.rglob("*")} <= {"pyctl"}


def test_an_interrupt_ends_the_servers_and_removes_the_files(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("bench", *SMALL), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    until(
        lambda: "is ready" in (process.stderr or sys.stdin).readline() or process.poll() is not None
    )
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert any(tmp_path.iterdir())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    process.stderr.close()
    assert {each.name for each in tmp_path.rglob("*")} <= {"pyctl"}
    assert not os.path.exists(f"/proc/{child}")
