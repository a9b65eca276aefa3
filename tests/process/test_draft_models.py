"""Draft models and heads in files of their own, behind real servers: a return or a restart changes no draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.conftest import Server
from tests.process.test_restart import SYSTEM, ask, text_of, user

Start = Callable[..., Server]
MODEL = "tiny-hybrid-nextn"
FILES = {
    "tiny-draft": "draft-simple",
    "tiny-hybrid-draft": "draft-simple",
    "tiny-hybrid-head": "draft-mtp",
    "tiny-hybrid-eagle3": "draft-eagle3",
    "tiny-hybrid-dflash": "draft-dflash",
    "tiny-hybrid-dflash2": "draft-dflash",
    "tiny-hybrid-dspark": "draft-dspark",
    "tiny-hybrid-dflash-window": "draft-dflash",
}


def drafted(reply: dict[str, Any]) -> tuple[str, int, int]:
    """The reply, and the numbers of drafted and accepted tokens."""
    timings = reply["timings"]
    return text_of(reply), timings["draft_n"], timings["draft_n_accepted"]


@pytest.mark.parametrize("name", FILES)
def test_after_a_return_and_a_restart_the_drafts_are_those_of_a_cold_run(
    start: Start, model_path: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    flags = ["--exact", "--kv-cache-dir", str(tmp_path), "--disk-prefix-cache", "full", "-md", str(model_path(name))]
    messages, accepted = [SYSTEM], 0
    server = start(MODEL, *flags)
    props = httpx.get(f"{server.url}/props").json()["default_generation_settings"]["params"]
    assert props["speculative.types"] == FILES[name]
    for turn in range(4):
        messages.append(user(turn))
        # The reply before this one was verified with drafts, and parts of these were wrong.
        reply = drafted(ask(server, messages, max_tokens=40))
        assert drafted(ask(server, messages, max_tokens=40, cache_prompt=False)) == reply
        ask(server, [user("something else")])
        again = ask(server, messages, max_tokens=40)
        assert again["timings"]["cache_n"] > 0
        assert drafted(again) == reply
        if turn == 1:
            assert server.stop() == 0
            server = start(MODEL, *flags)
            again = ask(server, messages, max_tokens=40)
            assert again["timings"]["source"] == "disk"
            assert drafted(again) == reply
        accepted += reply[2]
        messages.append({"role": "assistant", "content": reply[0]})
    assert accepted > 10


def test_a_directory_is_shared_by_servers_with_other_draft_models(
    start: Start, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = ["--exact", "--kv-cache-dir", str(tmp_path), "--disk-prefix-cache", "full"]
    messages = [SYSTEM, user(1)]
    texts = set()
    names = ("tiny-draft", "tiny-hybrid-draft", "", "tiny-hybrid-eagle3", "tiny-hybrid-dspark", "tiny-draft")
    for i, name in enumerate(names):
        server = start(MODEL, *flags, *(["-md", str(model_path(name))] if name else []))
        reply = ask(server, messages, max_tokens=40)
        texts.add(text_of(reply))
        assert (reply["timings"].get("draft_n", 0) > 0) == bool(name)
        assert (reply["timings"]["source"] == "disk") == (i > 0)
        assert server.stop() == 0
    assert len(texts) <= 2, "one of one-by-one decoding, one of verify batches"
