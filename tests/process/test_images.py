"""Images in requests to a real server, with an encoder of random weights."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyctl.measure.server_process import clean_environment
from tests.case import Case
from tests.client import CHAT
from tests.pictures import image_bytes
from tests.process.conftest import Server

PNG = image_bytes(320, 240, seed=1)
JPEG = image_bytes(160, 128, "jpeg", seed=2)
TEXT = "You are shown pictures, and say what is in them, at some length and with care. " * 4

Start = Callable[..., Server]


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shown(text: str, *images: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url(data)}} for data in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def asked(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    system = {"role": "system", "content": TEXT}
    return {
        "messages": [system, *messages],
        "max_tokens": 8,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        **fields,
    }


@pytest.fixture(scope="module")
def flags(tiny_mmproj: Path) -> list[str]:
    return ["--mmproj", str(tiny_mmproj), "--exact"]


@pytest.fixture(scope="module")
def server(start: Start, flags: list[str]) -> Server:
    return start("tiny-hybrid", *flags, "--alias", "tiny")


def test_a_second_question_about_an_image_does_not_see_it_again(server: Server) -> None:
    """A second question about an image evaluates no image; llama-server evaluates it each time (its
    issue 26994).
    """
    first = server.client.chat(**asked(shown("What is this?", PNG)))
    n_image = 10 * 8
    assert first.timings["prompt_n"] > n_image
    second = server.client.chat(**asked(shown("And what colour does it have?", PNG)))
    assert second.timings["prompt_n"] < n_image
    other = server.client.chat(**asked(shown("What is this?", JPEG, PNG), cache_prompt=False))
    again = server.client.chat(**asked(shown("What is this?", JPEG, PNG)))
    assert again.text == other.text
    cold = server.client.chat(
        **asked(shown("And what colour does it have?", PNG), cache_prompt=False)
    )
    assert cold.text == second.text


def test_a_broken_image_is_refused_before_a_stream_begins(server: Server) -> None:
    """Also an image with a valid header; later replies do not change."""
    broken = bytearray(JPEG)
    at = broken.index(b"\xff\xda")
    broken[at + 12 : -2] = b"\xff\xc4" * ((len(broken) - at - 14) // 2)
    before = server.client.chat(**asked(shown("What is this?", PNG))).text
    for data in (JPEG[:400], bytes(broken), b"\x89PNG\r\n\x1a\n" + b"\0" * 100):
        body = asked(shown("x", PNG, data), stream=True)
        message = Case(CHAT, body, 400, "messages[1].content[1]: the ").check(server.client)
        assert message.startswith("messages[1]")
    assert server.client.chat(**asked(shown("What is this?", PNG))).text == before
    assert "ERROR" not in server.log()


def test_a_chat_at_the_terminal(
    tiny_mmproj: Path, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """`/image` attaches a picture to the next question only, and `/save` keeps it as a part of that
    message.
    """
    (tmp_path / "a.png").write_bytes(PNG)
    saved = tmp_path / "chat.json"
    model = ["-m", str(model_path("tiny-hybrid")), "--mmproj", str(tiny_mmproj)]
    command = [
        sys.executable,
        "-m",
        "pyctl",
        "chat",
        *model,
        "-t",
        "1",
        "-c",
        "2048",
        "-n",
        "6",
        "--lines",
    ]
    lines = f"/image {tmp_path / 'a.png'}\nWhat is this?\nAnd?\n/save {saved}\n"
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=60, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert [
        len(each["content"]) if isinstance(each["content"], list) else 0 for each in messages
    ] == [2, 0, 0, 0]
