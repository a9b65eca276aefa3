"""Draft models and heads in files of their own, behind real servers that share a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.process.conftest import Server
from tests.process.test_restart import SYSTEM, ask, text_of, user

Start = Callable[..., Server]
MODEL = "tiny-hybrid-nextn"


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
