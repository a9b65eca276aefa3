"""Flags whose effect only a reply shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.process.conftest import Server
from tests.unit.chat.conftest import unpacked


def test_defaults_of_replies(start: Callable[..., Server], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": ["red", "green"]}))
    server = start(
        "tiny-hybrid",
        *("--chat-template-file", str(Path(unpacked("templates/Qwen3.5-4B.jinja"))), "--seed", "1"),
        *("--reasoning-budget", "4", "--reasoning-budget-message", " Enough."),
    )
    body = {"messages": [{"role": "user", "content": "Think."}], "max_tokens": 40}
    message = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
    assert message["reasoning_content"].endswith(" Enough.\n")
    server = start("tiny-hybrid", "-jf", str(schema))
    reply = httpx.post(f"{server.url}/completion", json={"prompt": "Color?", "n_predict": 40}, timeout=60).json()
    assert json.loads(reply["content"]) in ("red", "green")
