"""A server whose canary checks the cache every second that it is idle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from tests.process.conftest import Server, n_on_disk
from tests.waiting import until

Start = Callable[..., Server]

SYSTEM = {"role": "system", "content": "You keep the manual of the north gate. " * 30}

FLAGS = ("--exact", "--metrics", "--disk-prefix-cache", "full")


def metrics(server: Server) -> dict[str, float]:
    """Return the metrics of the canary, without its name and the ends of others."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if line.startswith("pyctl_canary_")]
    return {name.removeprefix("pyctl_canary_"): float(value) for name, _, value in pairs}


def talk(server: Server) -> None:
    """Ask until something is on disk."""
    messages = [SYSTEM, {"role": "user", "content": "What is in chapter one?"}]
    server.client.chat(messages=messages, max_tokens=4)
    until(lambda: n_on_disk(server) > 0)


def test_idle_servers_verify_their_cache_in_all_places(start: Start, tmp_path: Path) -> None:
    directory = ("--kv-cache-dir", str(tmp_path / "kv"))
    server = start("tiny-hybrid", *FLAGS, *directory, "--canary-interval", "1")
    talk(server)
    places = [f'verified_total{{place="{place}"}}' for place in ("device", "ram", "disk")]
    until(lambda: all(metrics(server)[place] > 0 for place in places))
    assert not any(metrics(server)[place.replace("verified", "differing")] for place in places)
    shown = httpx.get(f"{server.url}/cache").json()["canary"]
    assert set(shown["verified"]) == {"device", "ram", "disk"}
    assert shown["differing"] == {}
    assert shown["reports"] == []
    assert shown["seconds"] > 0
    talk(server)
    assert server.stop() == 0
    assert "Traceback" not in server.log()
    assert "equal to the bit" in server.log()


def test_a_damaged_file_is_quarantined_and_reported(start: Start, tmp_path: Path) -> None:
    """A flipped bit in a file is found after a restart without a request that needs it: the file is
    moved into quarantine, and the report names it.
    """
    directory = ("--kv-cache-dir", str(tmp_path / "kv"))
    first = start("tiny-hybrid", *FLAGS, *directory, "--canary-interval", "0")
    talk(first)
    assert metrics(first)["seconds_total"] == 0
    assert first.stop() == 0
    path = max((tmp_path / "kv").rglob("*.rows"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    second = start("tiny-hybrid", *FLAGS, *directory, "--canary-interval", "1")
    until(lambda: metrics(second)['differing_total{place="disk"}'] == 1)
    until(lambda: not path.exists())
    (report,) = httpx.get(f"{second.url}/cache").json()["canary"]["reports"]
    assert report["file"] == path.name
    (kept,) = (path.parent / "quarantine").rglob("*.rows")
    assert kept.name == path.name
    assert "quarantined" in second.log()
    assert second.stop() == 0
