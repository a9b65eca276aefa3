"""What clients said stays with whoever runs the server: on the disk, in answers to others, on the operator's screen."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.e2e.conftest import Server

Start = Callable[..., Server]


def ask(server: Server, text: str, n: int = 4) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": n, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def test_all_files_and_directories_are_for_their_owner_alone(start: Start, tmp_path: Path) -> None:
    cache, slots, log = tmp_path / "new" / "cache", tmp_path / "slots", tmp_path / "log"
    umask = os.umask(0)
    try:
        flags = ("--kv-cache-dir", str(cache), "--disk-prefix-cache", "full", "--kv-cache-min-tokens", "0")
        server = start("tiny-hybrid", *flags, "--slot-save-path", str(slots), "--log-file", str(log))
        ask(server, "What I tell you is nobody else's business. " * 40)
        ask(server, "Neither is this. " * 60)
        saved = httpx.post(f"{server.url}/slots/0?action=save", json={"filename": "a"}, timeout=60)
        assert saved.status_code == 200, saved.text
        while_running = modes(cache)
        assert server.stop() == 0
    finally:
        os.umask(umask)
    found = modes(tmp_path)
    names = {path.name for path in [*while_running, *found]}
    assert {"index.sqlite3", "index.sqlite3-wal", "prompts", "replies", "a", "log", "new"} <= names, names
    odd = {path: mode for path, mode in [*while_running.items(), *found.items()] if mode not in PRIVATE_MODES}
    assert not odd


PRIVATE_MODES = ("drwx------", "-rw-------")


def modes(top: Path) -> dict[Path, str]:
    return {path: stat.filemode(path.stat().st_mode) for path in sorted(top.rglob("*"))}
