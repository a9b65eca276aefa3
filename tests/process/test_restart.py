"""A conversation continues from the disk cache after the server was stopped or killed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

import httpx
import pytest

from tests.client import random_message
from tests.process.conftest import Server, disk_cache, lengths_on_disk, n_on_disk
from tests.waiting import until

KILL_ROUNDS = int(os.environ.get("PYCTL_KILL_ROUNDS", "8"))
"""Kills of the server; 200 make a stress test of it."""

HEADER = 1 + len("assistant\n")
"""Tokens of the generation header: one marker, and a token per byte."""

SYSTEM = {"role": "system", "content": "You keep the manual of the north gate. " * 25}


user = partial(random_message, n=200)


def check_directory(directory: Path, budget_mib: int = 64) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert not [path for path in files if ".tmp" in path.name], files
    assert sum(path.stat().st_size for path in files) <= (budget_mib + 1) * 2**20


@pytest.mark.parametrize(
    ("policy", "more"), [("auto", ()), ("600", ()), ("auto", ("--no-extension",))]
)
def test_stop_start_and_go_on(
    start: Callable[..., Server], tmp_path: Path, policy: str, more: tuple[str, ...]
) -> None:
    """Every turn after a restart is restored from disk, nearly whole with the automatic policy, and
    has the reply of a cold prompt; the directory stays within its budget.
    """
    flags = ["--exact", *disk_cache(tmp_path, policy), "--kv-cache-budget", "64", *more]
    messages: list[dict[str, str]] = [SYSTEM]
    server = start("tiny-hybrid", *flags)
    cacheable = restored = known = 0
    for turn in range(4):
        messages.append(user(turn))
        reply = server.chat(messages)
        timings = reply.timings
        assert reply.text == server.chat(messages, cache_prompt=False).text
        n_prompt = timings["cache_n"] + timings["prompt_n"]
        if turn:
            # Everything up to the generation header of the turn before was a prompt already.
            cacheable += known
            restored += timings["cache_n"]
            assert reply.source == "disk"
        known = n_prompt - HEADER
        messages.append({"role": "assistant", "content": reply.text})
        assert server.stop() == 0
        check_directory(tmp_path)
        server = start("tiny-hybrid", *flags)
    server.stop()
    if policy != "600":
        assert restored >= 0.98 * cacheable, f"{restored} of {cacheable} tokens came back"
    else:
        assert restored >= 3 * 500


@pytest.mark.parametrize(
    ("where", "n"),
    [(["-ctk", "f32", "-ctv", "f32", "-fa", "off"], 700), (["--kv-pool", "4096"], 1900)],
)
def test_more_rows_than_ram_has_room_for_survive_a_kill(
    start: Callable[..., Server], tmp_path: Path, where: list[str], n: int
) -> None:
    """The rows are more than 2 MiB, RAM has room for one, and beside it half of one may wait."""
    flags = [*disk_cache(tmp_path), "--cache-ram", "1", "--exact", *where]
    small = (
        "from pyctl.cache import prefix_cache; "
        "from pyctl.cache.device_limits import DeviceLimits; "
        "tier = prefix_cache.DeviceTier; "
        "prefix_cache.DeviceTier = lambda memory, cache, _: tier(memory, cache, LIMITS); "
        "LIMITS = DeviceLimits(2**18, 2**19)"
    )
    messages = [SYSTEM, user(1, n=n), {"role": "assistant", "content": "Yes."}, user(2, n=n)]
    server = start("tiny-hybrid", *flags, before=small)
    text = server.chat(messages).text
    until(lambda: max(lengths_on_disk(server), default=0) > 800 + 2 * n)
    server.kill()
    server = start("tiny-hybrid", *flags, before=small)
    reply = server.chat(messages)
    assert reply.text == text
    assert reply.source == "disk"
    assert reply.timings["cache_n"] > 800 + 2 * n
    assert len(list(tmp_path.rglob("*.rows"))) > 8
    # Killed while it is being written, nothing of it can be found, and the next start removes what
    # there is.
    messages += [{"role": "assistant", "content": text}, user(3, n=600)]
    n_states = len(list(tmp_path.rglob("*.state")))
    text = server.chat(messages).text
    until(
        lambda: list(tmp_path.rglob("*.tmp")) or len(list(tmp_path.rglob("*.state"))) != n_states,
        every=0.001,
    )
    server.kill()
    server = start("tiny-hybrid", *flags, before=small)
    reply = server.chat(messages)
    assert reply.text == text
    assert reply.source == "disk"
    assert server.stop() == 0
    check_directory(tmp_path)


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-hybrid"])
def test_a_long_prompt_survives_a_kill(
    start: Callable[..., Server], tmp_path: Path, model: str
) -> None:
    """Killed while it evaluates a prompt, the server resumes it at the snapshot that was on disk;
    the reply is a cold prompt's. `bench.kill` measures what is evaluated again.
    """
    flags = [*disk_cache(tmp_path, "auto"), "--exact", "-ub", "64", "--kv-cache-interim", "0.02"]
    prompt = [user(7, n=7000)]
    server = start(model, *flags)
    chat = Thread(target=partial(chat_until_killed, server, prompt))
    chat.start()
    until(lambda: lengths_on_disk(server), every=0.001)
    n_stored = max(lengths_on_disk(server))
    server.kill()
    chat.join(60)
    server = start(model, *flags)
    reply = server.chat(prompt)
    assert reply.source == "disk"
    assert reply.timings["cache_n"] >= n_stored
    assert reply.text == server.chat(prompt, cache_prompt=False).text
    assert server.stop() == 0
    check_directory(tmp_path)


def chat_until_killed(server: Server, messages: list[dict[str, str]]) -> None:
    """Ask for a reply that the kill of the server cuts off."""
    with suppress(httpx.TransportError):
        server.chat(messages)


@pytest.mark.timeout(300 + 10 * KILL_ROUNDS)
def test_kill_at_random_moments(start: Callable[..., Server], tmp_path: Path) -> None:
    """Never a wrong reply, never a failed start, no temporary files left, the directory within its
    budget.
    """
    flags = ["--exact", *disk_cache(tmp_path), "--kv-cache-budget", "64"]
    rng = random.Random(4)
    conversations = [[SYSTEM, user((i, 0), n=300)] for i in range(3)]
    expected: dict[str, str] = {}
    from_disk = 0
    for round_ in range(KILL_ROUNDS):
        server = start("tiny-hybrid", *flags)
        deadline = time.monotonic() + rng.uniform(0.05, 0.6)
        turn = 0
        while not turn or time.monotonic() < deadline:
            conversation = rng.choice(conversations)
            reply = server.chat(conversation)
            from_disk += reply.source == "disk"
            key = str(conversation)
            if key not in expected:
                expected[key] = server.chat(conversation, cache_prompt=False).text
            assert reply.text == expected[key], f"round {round_}"
            if len(conversation) < 12:
                conversation += [
                    {"role": "assistant", "content": reply.text},
                    user((round_, turn), n=120),
                ]
            turn += 1
        if round_ % 2:  # in the others it may be too early for anything to be there
            until(lambda: n_on_disk(server))  # noqa: B023
        server.kill()
    assert from_disk
    server = start("tiny-hybrid", *flags)
    assert server.stop() == 0
    check_directory(tmp_path)


def test_the_time_saved_outlives_the_server(start: Callable[..., Server], tmp_path: Path) -> None:
    """All clients' requests count, in the last line of the log and in GET /cache of the next
    server.
    """
    server = start("tiny-hybrid", "--kv-cache-dir", str(tmp_path), "--no-warm-next")
    messages = [SYSTEM, user(1)]
    for _ in range(3):
        server.chat(messages)
    saved = server.client.get_json("/cache")["saved"]
    assert server.stop() == 0
    last = server.log().splitlines()[-1]
    assert f"{saved['total']['tokens']:,} tokens restored in 2 requests: about " in last
    assert last.endswith(" saved")
    again = start("tiny-hybrid", "--kv-cache-dir", str(tmp_path))
    kept = again.client.get_json("/cache")["saved"]
    assert kept["total"] == saved["total"]
    assert kept["total"]["requests"] == 2
