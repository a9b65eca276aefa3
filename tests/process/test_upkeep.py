"""`pyctl cache` on a directory that a server has filled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.conftest import Server
from tests.process.test_cli import pyctl
from tests.process.test_restart import SYSTEM, ask, text_of, user


@pytest.fixture
def filled(start: Callable[..., Server], tmp_path: Path) -> Path:
    server = start("tiny-hybrid", "--kv-cache-dir", str(tmp_path), "--disk-prefix-cache", "full")
    messages = [SYSTEM, user(1)]
    for turn in range(3):
        messages += [{"role": "assistant", "content": text_of(ask(server, messages))}, user(("next", turn))]
    assert server.stop() == 0
    return tmp_path


def cache(directory: Path, *arguments: str) -> tuple[int, str, str]:
    result = pyctl("cache", *arguments, "--kv-cache-dir", str(directory))
    return result.returncode, result.stdout, result.stderr


def names(directory: Path) -> list[str]:
    return [line.split()[0] for line in cache(directory, "ls")[1].splitlines()[2:-2]]


def test_prune_to_a_size_spares_what_is_pinned(filled: Path) -> None:
    first = names(filled)[0]
    cache(filled, "pin", first)
    code, out, _ = cache(filled, "prune", "--kv-cache-budget", "0")
    assert code == 0
    assert "freed" in out
    assert names(filled) == [first]


def test_verify_finds_and_fixes_damage(filled: Path) -> None:
    assert re.fullmatch(r"tiny-hybrid.*\.gguf: 3 snapshots, [0-9.]+ MiB", cache(filled, "ls")[1].splitlines()[0])
    assert cache(filled, "verify")[0] == 0
    victim = min(filled.rglob("*.state"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    code, out, _ = cache(filled, "verify")
    assert code == 1
    assert f"broken: {victim.parent.name}/{victim.name}" in out
    assert cache(filled, "verify", "--fix")[0] == 0
    assert cache(filled, "verify")[0] == 0
    assert not victim.exists()
    assert len(names(filled)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cache", "ls", "--kv-cache-dir", "/nowhere/at/all"], "is not a directory"),
        (["cache", "ls", "--kv-cache-dir", "/"], "no prefix cache in /"),
        (["cache", "dance"], "no such command"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], message: str) -> None:
    result = pyctl(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
