"""Three real models behind one address answer as each does alone, also after kills."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.process.conftest import Server, disk_cache
from tests.real.conftest import CODE, NAMES, Reply, ask
from tests.waiting import until


def stored(server: Server, name: str) -> int:
    """Return bytes that the model ``name`` has on disk."""
    return int(server.client.get_json(f"/cache?model={name}")["disk"]["in_use"])


ROUNDS = ("What does the class do?", "Which method changes nothing?", "What is a limit?")


@pytest.mark.skipif(
    len(NAMES) < 3, reason="PYCTL_REAL is not set: one model has no others to leave for"
)
def test_models_behind_one_address_answer_as_each_alone(
    start: Callable[..., Server], model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Models that displace one another reply as each does alone, over kills of the server, and
    restore from their own caches.
    """
    asked = [[{"role": "user", "content": f"{CODE}\n{question}"}] for question in ROUNDS]
    alone: dict[str, list[Reply]] = {}
    for name in NAMES:
        server = start(name, "--exact", "-np", "1")
        alone[name] = [ask(server, messages, cache_prompt=False) for messages in asked]
        server.stop()
    preset = tmp_path / "models.ini"
    sections = "".join(f"[{name}]\nmodel = {model_path(name)}\n" for name in NAMES)
    preset.write_text(
        "version = 1\n[*]\nexact = true\nc = 4096\nub = 128\nt = 1\nnp = 1\n" + sections
    )
    flags = ("--models-preset", str(preset), "--models-max", "2", "--models-patience", "0")
    kept = (*disk_cache(tmp_path / "kv"), "--kv-cache-min-tokens", "64")
    cases = [(name, i) for i in range(len(asked)) for name in NAMES]
    n_cached = 0
    for _ in range(3):
        server = start("", *flags, *kept)

        def one(case: tuple[str, int], server: Server = server) -> Reply:
            return ask(server, asked[case[1]], model=case[0])

        with ThreadPoolExecutor(4) as pool:
            for (name, i), reply in zip(cases, pool.map(one, cases), strict=True):
                assert reply.tokens == alone[name][i].tokens, (name, i)
                n_cached += reply.n_cached
            until(partial(stored, server, cases[0][0]))
            for case in cases[:2]:
                pool.submit(one, case)  # the kill breaks most of these off
            server.kill()
    assert n_cached > 0
