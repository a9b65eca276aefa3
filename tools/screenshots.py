"""The pictures of the page in docs/: a server with the built-in model, and a browser that talks to
it.

    python -m tools.screenshots                 # all pictures, into docs/: 2 minutes
    python -m tools.screenshots --only tools    # one
    python -m tools.screenshots --to DIRECTORY

It needs what the tests of the page need: the extra `page` and a chromium. The picture `tools` has a
call of @modelcontextprotocol/server-filesystem, which `npx` fetches.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from pyctl.measure.server_process import ServerProcess
from tests.client import Client
from tests.page.browser import Tab, browser_path
from tests.page.conftest import SERVE
from tests.waiting import until

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import Browser, Locator

DOCS = Path(__file__).resolve().parents[1] / "docs"

QUALITY = 80
"""The quality of WebP: text stays sharp, and a picture takes about 100 kB."""

START_SECONDS = 300.0
"""The maximum duration of a server's start, on a busy machine too."""

DESK = {"viewport": {"width": 1440, "height": 860}, "device_scale_factor": 1.5}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 1.5,
    "has_touch": True,
    "is_mobile": True,
}

HARBOUR = "You keep the book of a small harbour. " + " ".join(
    f"Berth {number} is for boats of up to {5 + number % 9} metres." for number in range(1, 25)
)

FACTS = "My name is Ada and the code of the north door is 4711."

QUESTIONS = ("What is my name?", "What is the code of the north door?")

EDITED = "My dog is called Rex and my train leaves at 18:42."

EDIT = {
    "path": "/home/ada/harbour/gates.py",
    "edits": [{"oldText": "north_gate = 4711", "newText": "north_gate = 9052"}],
}

Shots = Iterator[bytes]
"""Pictures, each as a PNG file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Take the pictures, and return 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SCENES), default=list(SCENES))
    parser.add_argument("--to", type=Path, default=DOCS, metavar="DIRECTORY")
    options = parser.parse_args(argv)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for name in options.only:
            scene = SCENES[name]
            for picture, png in zip(scene.pictures, scene.take(browser), strict=True):
                path = options.to / f"page-{picture}.webp"
                write_webp(png, path)
                print(f"{path.name}: {path.stat().st_size:,} bytes")
        browser.close()
    return 0


def write_webp(png: bytes, path: Path) -> None:
    """Write the picture ``png`` to ``path``, as WebP."""
    Image.open(BytesIO(png)).convert("RGB").save(path, "WEBP", quality=QUALITY, method=6)


@contextmanager
def _served_tab(
    browser: Browser, options: Mapping[str, Any], *flags: str, tools: bool = False
) -> Iterator[Tab]:
    """Yield the page of a server of its own, with a cache directory and ``flags``."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        cache = ("--kv-cache-dir", str(home / "kv"), "--kv-cache-min-tokens", "0")
        server = ServerProcess(
            (*SERVE, *cache, *flags),
            home / "log",
            timeout=START_SECONDS,
            environment={"PYCTL_KV_CACHE": "on"},
        )
        with server:
            if tools:  # it serves before the child has listed its tools
                until(lambda: Client.to_server(server.url).get_json("/tools"))
            tab = Tab(browser, server.url, options).open()
            yield tab
            tab.close()


# -- scenes
# ----------------------------------------------------------------------------------


def conversation(browser: Browser) -> Shots:
    """Take a conversation with the cache beside it, by day and by night."""
    with _served_tab(browser, DESK) as tab:
        _talk(tab)
        yield from _day_and_night(tab)


def phone(browser: Browser) -> Shots:
    """Take the same conversation on a phone."""
    with _served_tab(browser, PHONE) as tab:
        _talk(tab)
        yield from _day_and_night(tab)


def tree(browser: Browser) -> Shots:
    """Take the enlarged cache after an edited message: its prefixes as a map and as a tree."""
    with _served_tab(browser, DESK) as tab:
        _talk(tab)
        message = tab.page.locator("#messages .message.user").nth(1)
        message.hover()
        message.get_by_role("button", name="Edit message").click()
        message.get_by_role("textbox", name="Message").fill(EDITED)
        tab.act(message.get_by_role("button", name="Send in a new branch"))
        tab.say("When does my train leave?")
        tab.page.get_by_role("button", name="Enlarge").click()
        yield _picture(tab, tab.page.locator("#cache"))


def timeline(browser: Browser) -> Shots:
    """Take the timeline with a request of each kind."""
    with _served_tab(browser, DESK) as tab:
        _talk(tab)
        _send_agent_requests(tab.url)
        requests = tab.page.locator("#cache .timeline")
        tab.until(lambda: tab.page.locator("#cache .rewrite").count() >= 2)
        yield _picture(tab, requests)


def tool_call(browser: Browser) -> Shots:
    """Take a call that waits for the decision of the user."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["-y", "@modelcontextprotocol/server-filesystem", directory]
        servers = {"mcpServers": {"files": {"command": "npx", "args": arguments}}}
        flags = ("--mcp-servers-json", json.dumps(servers))
        with _served_tab(browser, DESK, *flags, tools=True) as tab:
            tab.say("The code of the north gate is 9052 now. Please change it.", _call_of_edit())
            yield _picture(tab, tab.page.locator("#messages"))


class Scene(NamedTuple):
    """The names of pictures, and the function that takes them."""

    pictures: tuple[str, ...]
    take: Callable[[Browser], Shots]


SCENES: Mapping[str, Scene] = {
    "conversation": Scene(("light", "dark"), conversation),
    "phone": Scene(("phone", "phone-dark"), phone),
    "tree": Scene(("tree",), tree),
    "timeline": Scene(("timeline",), timeline),
    "tools": Scene(("tools",), tool_call),
}


# -- parts of scenes
# ----------------------------------------------------------------------------------


def _talk(tab: Tab) -> None:
    """Have a conversation of three turns, whose replies are the model's own."""
    tab.configure(system=HARBOUR)
    tab.say(FACTS)
    for question in QUESTIONS:
        tab.say(question)


def _day_and_night(tab: Tab) -> Shots:
    yield _picture(tab)
    tab.page.emulate_media(color_scheme="dark")
    yield _picture(tab)


def _picture(tab: Tab, part: Locator | None = None) -> bytes:
    """Return a picture of the page, or of a ``part``, once the server's figures have come."""
    tab.page.wait_for_timeout(1500)  # the page asks for them each second
    tab.settle()
    png: bytes = tab.page.screenshot() if part is None else part.screenshot()
    return png


def _call_of_edit() -> dict[str, object]:
    """Return fields that make the reply one call of the tool that edits files."""
    schema = {
        "type": "object",
        "properties": {name: {"enum": [value]} for name, value in EDIT.items()},
        "required": list(EDIT),
        "additionalProperties": False,
    }
    function = {"name": "files_edit_file", "parameters": schema}
    return {
        "reasoning_budget_tokens": 0,
        "parallel_tool_calls": False,
        "callable_tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "files_edit_file"}},
    }


def _send_agent_requests(url: str) -> None:
    """Send the requests of an agent: its turns, a title, a sub-agent, and two that rewrite earlier
    messages.
    """
    reading = {"name": "read", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": reading}]
    search = {"type": "function", "function": {**reading, "name": "grep"}}
    system = _said("system", "You edit files. " * 60)
    task = _said("user", "Mend the north door. " * 40)
    followed = [_said("assistant", "I read the plan. " * 20), _said("user", "Go on. " * 30)]
    helper = [
        _said("system", "You search files. " * 40),
        _said("user", "Find the plan. " * 20),
    ]
    shortened = [task, _said("assistant", "(old result removed)"), followed[1]]
    client = Client.to_server(url.rstrip("/"))
    for messages, offered in (
        ([system, task], tools),
        ([_said("system", "Write a title."), task], []),
        ([system, task, *followed], tools),
        (helper, [*tools, search]),
        ([system, *shortened], tools),
        ([_said("system", "Today is Sunday. " + system["content"]), *shortened], tools),
    ):
        fields = {"tools": offered} if offered else {}
        client.post_json("/v1/chat/completions", {"messages": messages, "max_tokens": 12, **fields})


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


if __name__ == "__main__":
    sys.exit(main())
