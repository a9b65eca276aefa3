"""Receipts of a real model: replies from all tiers, over a restart and a kill, are equal to the
bit.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.disk.file_format import RECEIPTS
from pyctl.measure.server_process import clean_environment
from pyctl.receipts.receipt_store import ReceiptStore
from tests.process.conftest import Server
from tests.real.conftest import CODE, NAMES
from tests.real.test_exactness import Conversations, talk
from tests.waiting import until


@pytest.mark.parametrize("flags", [("--exact",), ("--exact", "--spec-type", "cache")], ids=" ".join)
@pytest.mark.parametrize("name", NAMES)
def test_receipts_of_conversations_are_equal(
    start: Callable[..., Server], tmp_path: Path, name: str, flags: tuple[str, ...]
) -> None:
    """Replies of real weights from live sequences, RAM and disk, across a stop and a kill, have the
    logits of a cold run.
    """
    kept = (
        "--kv-cache-dir",
        str(tmp_path),
        "--disk-prefix-cache",
        "full",
        "--kv-cache-min-tokens",
        "64",
    )
    store = ReceiptStore(tmp_path / RECEIPTS)
    running: list[Server] = []

    def restart(how: signal.Signals | None) -> Server:
        if how is not None:
            until(lambda: len(store.ids()) == len(to.said))
            running[-1].process.send_signal(how)
            running[-1].process.wait(60)
        running.append(start(name, *flags, *kept))
        return running[-1]

    to = Conversations(restart)
    talk(to, *((CODE, CODE * 4) if name == "gemma3" else (CODE[:200], CODE)))
    assert running[-1].stop() == 0
    assert len(store.ids()) == len(to.said)
    sources = {store.read(number).cache.source for number in store.ids()}
    assert {"none", "live", "disk"} <= sources
    command = [sys.executable, "-m", "pyctl", "verify", "--all", "--kv-cache-dir", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=clean_environment()
    )
    print(f"{name} {' '.join(flags)}\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.endswith("  equal")] == []
    assert len(lines) == len(to.said)
    assert done.returncode == 0
