"""The block of `pyctl bench --share` has figures and nothing that names a person."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from pyctl.measure.shared_block import (
    block_lines,
    commit_of,
    model_facts,
    public_flags,
    shared_records,
)
from tools import cards


def test_a_model_of_two_files_has_one_hash(tmp_path: Path) -> None:
    parts = [tmp_path / "a-00001-of-00002.gguf", tmp_path / "a-00002-of-00002.gguf"]
    parts[0].write_bytes(b"one")
    parts[1].write_bytes(b"two")
    assert model_facts(parts) == {
        "file": parts[0].name,
        "bytes": 6,
        "sha256": hashlib.sha256(b"onetwo").hexdigest(),
    }


def test_a_model_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"gone\.gguf"):
        model_facts([tmp_path / "gone.gguf"])


def test_flags_lose_their_directories() -> None:
    flags = ["/home/ada/x.gguf", "-c", "8192", "--mmproj", "eyes/mmproj.gguf"]
    assert public_flags(flags) == ["x.gguf", "-c", "8192", "--mmproj", "mmproj.gguf"]


def test_records_lose_texts_of_errors() -> None:
    records = [
        {"kind": "prefill", "server": "pyctl", "depth": 2048, "rate": 12.5, "note": "/home/ada"},
        {"kind": "failed", "server": "pyctl", "why": "/home/ada/x.gguf is gone"},
        {"kind": "skipped", "what": "depth 32768", "why": "no time"},
    ]
    assert shared_records(records) == [
        {"kind": "prefill", "server": "pyctl", "depth": 2048, "rate": 12.5}
    ]


def test_a_checkout_has_a_commit_and_a_directory_without_git_has_none(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run((*git, "init", "-q"), cwd=tmp_path, check=True)
    (tmp_path / "file").touch()
    subprocess.run((*git, "add", "."), cwd=tmp_path, check=True)
    subprocess.run((*git, "commit", "-q", "-m", "begin"), cwd=tmp_path, check=True)
    head = subprocess.run(
        (*git, "rev-parse", "HEAD"), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert head.stdout.startswith(commit_of(tmp_path))
    (tmp_path / "file").write_text("changed")
    assert commit_of(tmp_path).endswith("-dirty")


def test_the_block_is_what_the_table_of_cards_takes(tmp_path: Path) -> None:
    """The lines between the fences are a file of bench/cards, and become a row."""
    report = {
        "pyctl": "0.3.0",
        "commit": "abcdef01",
        "began": "2026-12-01",
        "cpu": "a CPU",
        "cards": ["NVIDIA GeForce RTX 3090"],
        "driver": "580.10",
        "model": {"file": "x.gguf", "bytes": 1, "sha256": "00"},
        "flags": ["-m", "x.gguf", "-c", "8192"],
        "records": [
            {"kind": "prefill", "server": "pyctl", "depth": 2048, "rate": 700.4},
            {"kind": "decode", "server": "pyctl", "depth": 2048, "rate": 41.6},
        ],
    }
    lines = block_lines(report)
    assert (lines[0], lines[-1]) == ("```json", "```")
    path = tmp_path / "3090.json"
    path.write_text("\n".join(lines[1:-1]), encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8")) == report
    assert cards.row(path) == [
        "NVIDIA GeForce RTX 3090",
        "`x.gguf -c 8192`",
        "580.10",
        "0.3.0 (abcdef01), 2026-12-01",
        "2,048",
        "700",
        "42",
        "",
        "",
    ]
