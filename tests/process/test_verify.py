"""Replies that came from the cache of a server are verified by another process, to the bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from pyctl.disk.file_format import RECEIPTS
from pyctl.receipts.receipt_store import ReceiptStore
from tests.process.conftest import Server, n_on_disk, pyctl
from tests.waiting import until

SYSTEM = {"role": "system", "content": "You keep the manual of the north gate. " * 25}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Talk:
    """A conversation with a server of the built-in model, which keeps receipts."""

    def __init__(self, start: Callable[..., Server], directory: Path, *flags: str) -> None:
        self.store = ReceiptStore(directory / RECEIPTS)
        self._directory = directory
        self._start = start
        self._flags = (
            "--exact",
            "--metrics",
            "--kv-cache-dir",
            str(directory),
            "--disk-prefix-cache",
            "full",
            "--kv-cache-min-tokens",
            "64",
            *flags,
        )
        self.server = start("", *self._flags)

    def ask(self, *texts: str, **fields: Any) -> dict[str, Any]:
        """Ask, with the turns before; return the timings of the reply."""
        messages = [SYSTEM]
        for text in texts[:-1]:
            messages += [user(text), {"role": "assistant", "content": "Noted."}]
        return self.server.chat([*messages, user(texts[-1])], **fields).timings

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the server once it has written, and start another one."""
        until(lambda: n_on_disk(self.server) > 0)
        self.server.process.send_signal(how)
        self.server.process.wait(60)
        self.server = self._start("", *self._flags)

    def stop(self) -> None:
        assert self.server.stop() == 0

    def verify(self, *arguments: str) -> tuple[int, list[str]]:
        """Run `pyctl verify`; return its exit code and lines."""
        done = pyctl("verify", *arguments, "--kv-cache-dir", str(self._directory))
        return done.returncode, done.stdout.splitlines()

    def metrics(self) -> dict[str, str]:
        lines = httpx.get(f"{self.server.url}/metrics").text.splitlines()
        return dict(line.split(" ") for line in lines if line.startswith("pyctl_receipts"))


@pytest.mark.parametrize("flags", [(), ("-np", "4")])
def test_replies_from_all_tiers_are_verified_after_restarts(
    start: Callable[..., Server], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Each reply has a receipt, whether its prompt came from a live sequence, the disk or nowhere,
    and all are equal to a cold run; neither a restart nor a kill loses a receipt.
    """
    talk = Talk(start, tmp_path, *flags)
    timings = [talk.ask("My cat is called Tom."), talk.ask("My cat is called Tom.", "Its name?")]
    timings.append(talk.ask("Something else: what is a gate?"))
    timings.append(talk.ask("My cat is called Tom.", "Its name?", temperature=0.9, seed=3))
    talk.restart()
    timings.append(talk.ask("My cat is called Tom.", "Its name?", "And why?"))
    until(lambda: len(talk.store.ids()) == len(timings))
    talk.restart(signal.SIGKILL)
    timings.append(talk.ask("My cat is called Tom.", "Its name?", "And why?", "Are you sure?"))
    talk.stop()
    assert talk.store.ids() == [timing["receipt"] for timing in timings]
    receipts = [talk.store.read(number) for number in talk.store.ids()]
    sources = [receipt.cache.source for receipt in receipts]
    assert sources[0] == "none"
    assert {"live", "disk"} <= set(sources)
    assert [receipt.cache.n_cached for receipt in receipts] == [
        timing["cache_n"] for timing in timings
    ]
    from_disk = [receipt.cache for receipt in receipts if receipt.cache.source == "disk"]
    assert all(cache.rows.endswith(".rows") for cache in from_disk)
    assert receipts[3].reply_record.sampling["seed"] == 3
    code, lines = talk.verify("--all")
    assert [line.endswith("  equal") for line in lines] == [True] * len(timings), lines
    assert code == 0


def test_an_altered_receipt_differs_and_the_metrics_show_it(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """`pyctl verify` fails at the position of the altered logits and keeps the other receipt equal;
    the running server's metrics count both.
    """
    talk = Talk(start, tmp_path)
    talk.ask("My cat is called Tom.")
    talk.ask("My cat is called Tom.", "Its name?")
    until(lambda: len(talk.store.ids()) == 2)
    receipt = talk.store.read(talk.store.ids()[1])
    digests = np.array(receipt.digests, "<u4")
    digests[2] ^= 1
    reply = msgspec.structs.replace(receipt.reply_record, logits_digests=digests.tobytes())
    talk.store.write(msgspec.structs.replace(receipt, reply_record=reply))
    code, (first, second) = talk.verify("--all")  # while the server runs
    assert code == 1
    assert first.endswith("  equal")
    position = len(receipt.prompt) + 2
    assert second.endswith(f"  differs at position {position}, token 3 of the reply")
    found = talk.metrics()
    assert found["pyctl_receipts"] == "2"
    assert found["pyctl_receipts_verified"] == "2"
    assert found["pyctl_receipts_differing"] == "1"
    talk.stop()


def test_the_cache_takes_receipts_for_no_files_of_others(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    talk = Talk(start, tmp_path)
    talk.ask("My cat is called Tom.")
    talk.stop()
    assert talk.store.ids()
    checked = pyctl("cache", "verify", "--kv-cache-dir", str(tmp_path))
    assert checked.returncode == 0
    assert RECEIPTS not in checked.stdout


def test_a_request_that_may_not_be_kept_has_no_receipt(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    talk = Talk(start, tmp_path)
    assert "receipt" not in talk.ask("A secret.", cache_prompt=False)
    assert "receipt" not in talk.ask("Another one.", prefix_cache={"scope": "off"})
    talk.stop()
    assert talk.store.ids() == []
    assert not talk.store.directory.exists()


def test_errors_name_the_receipt_and_the_directory(tmp_path: Path) -> None:
    none = pyctl("verify", "--all", "--kv-cache-dir", str(tmp_path))
    assert none.returncode == 2
    assert f"no receipts in {tmp_path / RECEIPTS}" in none.stderr
    nothing = pyctl("verify")
    assert nothing.returncode == 2
    assert "name receipts: their ids, last, or --all" in nothing.stderr
