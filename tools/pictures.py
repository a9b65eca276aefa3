"""Pictures of the page for the documentation: a server on the built-in model, and a real browser in front of it.

    python -m tools.pictures [--to docs] [--only page-tree ...]      # needs '.[page]' and chromium

`page-light`, `page-dark` and two `page-phone` show a conversation of ten turns in three branches, `page-tree` what the
cache made of it, and `page-tools` a call of a tool.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess

HARBOUR = "You keep the book of a small harbour. " + " ".join(
    f"Berth {i} is for boats of up to {4 + i * 7 % 23} metres." for i in range(1, 25)
)
TRUNK = (
    "Hello! My name is Ada, and the code of the north gate is 4711.",
    "My cat is called Miro, and my sister lives in Bergen.",
    "What is the code of the north gate?",
    "And what is my cat called?",
)
BRANCHES = (
    (2, ("Where does my sister live?", "Actually, the code of the north gate is 9052.", "What is the code now?")),
    (1, ("My dog is called Rex, and my train leaves at 18:42.", "When does my train leave?", "What is my name?")),
)
"""Which of the user's messages is edited, from 0, and what is said then."""

WIDE = {"width": 1440, "height": 860}
PHONE = {"width": 390, "height": 844}


class Talk:
    """The page in a browser, and what is done in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        page.add_init_script("localStorage.titles = false")  # those of the built-in model say nothing
        page.goto(url)
        page.wait_for_selector("body[data-ready]")

    def begin(self, system: str) -> None:
        """A new conversation with a system prompt."""
        self.page.keyboard.press("Control+,")
        self.page.locator('#dialog [name="system"]').fill(system)
        self.page.get_by_role("button", name="Save").click()
        self.page.get_by_role("button", name="New chat").click()

    def say(self, text: str) -> None:
        """Send a message and wait for the reply."""
        self.page.fill("#text", text)
        with self.page.expect_response(self._is_reply) as asked:
            self.page.press("#text", "Enter")
        asked.value.finished()
        self._wait()

    def edit(self, index: int, text: str) -> None:
        """Say something else in place of the user's message ``index``, and wait for the reply."""
        message = self.page.locator(".message.user").nth(index)
        message.hover()
        message.get_by_role("button", name="Edit message").click()
        field = message.get_by_role("textbox")
        field.fill(text)
        with self.page.expect_response(self._is_reply) as asked:
            field.press("Control+Enter")
        asked.value.finished()
        self._wait()

    @staticmethod
    def _is_reply(response: Any) -> bool:
        return bool(response.url.endswith("/completions"))

    def _wait(self) -> None:
        self.page.wait_for_selector("#send:not(.stop)")
        self.page.wait_for_selector(".message.assistant:last-child .bar")


def ten_turns(talk: Talk) -> None:
    """A conversation of ten turns in three branches."""
    talk.begin(HARBOUR)
    for text in TRUNK:
        talk.say(text)
    for index, (first, *rest) in BRANCHES:
        talk.edit(index, first)
        for text in rest:
            talk.say(text)
    talk.page.mouse.move(0, 0)
    talk.page.wait_for_timeout(5500)  # what a reply lit up is out again, and what is read ahead is there


def write(path: Path, png: bytes) -> None:
    Image.open(io.BytesIO(png)).convert("RGB").save(path, "WEBP", quality=84, method=6)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


def stills(browser: Browser, url: str, want: Callable[[str], Path | None]) -> None:
    """The pictures that do not move."""
    context = browser.new_context(viewport=WIDE, device_scale_factor=1.5, color_scheme="light", reduced_motion="reduce")
    page = context.new_page()
    ten_turns(Talk(page, url))
    for name, scheme, size in (
        ("page-light", "light", WIDE), ("page-dark", "dark", WIDE), ("page-phone", "light", PHONE),
        ("page-phone-dark", "dark", PHONE),
    ):  # fmt: skip
        if path := want(name):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type, unused-ignore]
            page.set_viewport_size(size)  # type: ignore[arg-type, unused-ignore]
            page.wait_for_timeout(600)
            write(path, page.screenshot())
    if path := want("page-tree"):
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(WIDE)  # type: ignore[arg-type, unused-ignore]
        page.get_by_role("button", name="Enlarge").click()
        page.mouse.move(0, 0)
        high = page.locator("#cache").evaluate("(e) => e.scrollHeight")
        page.set_viewport_size({**WIDE, "height": high})  # type: ignore[arg-type, unused-ignore]
        page.wait_for_timeout(600)
        write(path, page.locator("#cache").screenshot())
    context.close()


EDIT = {
    "path": "/home/ada/harbour/gates.py",
    "edits": [{"oldText": "north_gate = 4711", "newText": "north_gate = 9052"}],
}
TOOL = {
    "tool": "files_edit_file",
    "permissions": {"write": True},
    "definition": {"type": "function", "function": {"name": "files_edit_file", "parameters": {"type": "object"}}},
}
NO_SERVER = json.dumps({"mcpServers": {"files": {"command": ""}}})
"""A server without a command is left out: the page asks for tools, and is given one."""


def tool_call(browser: Browser, url: str, path: Path) -> None:
    """A call that waits for an answer. The reply is given: the built-in model edits no files."""
    call = {"index": 0, "id": "a", "function": {"name": TOOL["tool"], "arguments": json.dumps(EDIT)}}
    ends: dict[str, Any] = {
        "prompt_n": 31,
        "cache_n": 2104,
        "predicted_n": 58,
        "prompt_ms": 90.0,
        "predicted_ms": 1115.0,
    }
    ends |= {"predicted_per_second": 52.0, "cache": {"source": "live", "restored": "", "saved": []}}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"delta": {"tool_calls": [call]}}]},
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "timings": ends},
    ]
    reply = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    size = {"width": 680, "height": 640}
    context = browser.new_context(viewport=size, device_scale_factor=1.5, color_scheme="light", reduced_motion="reduce")  # type: ignore[arg-type, unused-ignore]
    page = context.new_page()
    page.route("**/tools", lambda route: route.fulfill(body=json.dumps([TOOL]), content_type="application/json"))
    talk = Talk(page, url)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=reply, content_type="text/event-stream"))
    talk.say("The code of the north gate is 9052 now. Please change it.")
    page.wait_for_timeout(600)
    write(path, page.locator("#messages").screenshot())
    context.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("docs"), metavar="DIRECTORY")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="page-light, page-dark, page-phone, page-tree, ...")
    options = parser.parse_args(argv)

    def want(name: str) -> Path | None:
        return options.to / f"{name}.webp" if not options.only or name in options.only else None

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        flags = ("-c", "16384", "--temp", "0", "-cram", "64", "--disk-prefix-cache", "auto:2")
        serve = (*PYCTL_SERVE, *flags, "--kv-cache-min-tokens", "64", "--kv-cache-dir")
        log = Path(directory) / "log"
        with ServerProcess((*serve, f"{directory}/stills"), log) as server:
            stills(browser, server.url, want)
        if path := want("page-tools"):
            with ServerProcess((*serve, f"{directory}/tools", "--mcp-servers-json", NO_SERVER), log) as server:
                tool_call(browser, server.url, path)
        browser.close()


if __name__ == "__main__":
    main()
