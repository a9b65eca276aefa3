"""Pictures that are attached in the page: shown, sent as the model can read them, and
remembered.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyctl.files.image_file import ImageFile
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tests.page.browser import Tab
from tests.page.conftest import OpenTab
from tests.pictures import image_bytes

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def seeing(
    browser: Browser,
    model_path: Callable[[str], Path],
    tiny_mmproj: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    """Yield a server with an encoder."""
    flags = (
        "-m",
        str(model_path("tiny-hybrid")),
        "--mmproj",
        str(tiny_mmproj),
        *shlex.split("-c 2048 -t 1 -n 6"),
    )
    with ServerProcess((*PYCTL_SERVE, *flags), tmp_path_factory.mktemp("images") / "log") as server:
        yield server


def attach(tab: Tab, *files: dict[str, Any]) -> None:
    with tab.page.expect_file_chooser() as choosing:
        tab.page.get_by_role("button", name="Attach").click()
    choosing.value.set_files(list(files))


def of_kind(kind: str, width: int = 320, height: int = 256) -> dict[str, Any]:
    return {
        "name": f"a.{kind}",
        "mimeType": f"image/{kind}",
        "buffer": image_bytes(width, height, kind),
    }


def sent(tab: Tab, text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the messages of the request, and the timings of the reply."""
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        timings = tab.say(text)
    return json.loads(asked.value.post_data or "")["messages"], timings


def test_pictures_go_along_and_are_seen_once(open_tab: OpenTab, seeing: ServerProcess) -> None:
    """A picture is sent unchanged, shown after a reload, and sent again with the next turn, which
    restores its rows in place of evaluating them.
    """
    tab = open_tab(seeing.url)
    png = of_kind("png")
    attach(tab, png, of_kind("webp", 640, 480))
    tab.page.get_by_role("button", name="Remove a.webp").click()
    (message,), first = sent(tab, "What is this?")
    parts = {part["type"]: part for part in message["content"]}
    assert (
        base64.b64decode(parts["image_url"]["image_url"]["url"].partition(",")[2]) == png["buffer"]
    )
    assert parts["text"]["text"].endswith("What is this?")
    assert first["prompt_n"] > 80
    picture = tab.messages.first.locator("img.picture")
    tab.until(
        lambda: picture.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [320, 256]
    )
    tab.reload()
    tab.until(lambda: tab.messages.first.locator("img.picture").count() == 1)
    messages, second = sent(tab, "And now?")
    assert messages[0] == message
    assert second["prompt_n"] < 80, "the picture is not evaluated again"
    assert second["cache_n"] > 80


SLOW = """() => {
  const read = createImageBitmap;
  window.createImageBitmap = async (file) => (await new Promise((go) => (window.proceed = go)), read(file));
}"""


def test_who_sends_before_a_picture_has_been_read_sends_it_along(
    open_tab: OpenTab, seeing: ServerProcess
) -> None:
    """Once, also where sending is asked for twice, and one attached meanwhile, but not without one
    that is none.
    """
    tab = open_tab(seeing.url)
    tab.page.evaluate(SLOW)
    note = {"name": "note.txt", "mimeType": "text/plain", "buffer": b"A note."}
    attach(tab, note, of_kind("png"))
    tab.page.get_by_role("button", name="Remove note.txt").click()
    attach(tab, note)
    for _ in range(2):
        tab.begin("Look at this.")
    tab.settle()
    assert not tab.messages.count()
    assert tab.page.locator("#text").input_value() == "Look at this."
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.page.evaluate("proceed()")
    (message,) = json.loads(asked.value.post_data or "")["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert "A note." in message["content"][1]["text"]
    tab.until_idle()
    assert tab.messages.count() == 2

    attach(tab, {"name": "b.png", "mimeType": "image/png", "buffer": b"no pixels"})
    tab.begin("And this?")
    tab.page.evaluate("proceed()")
    tab.until(lambda: "b.png" in tab.noticed())
    tab.settle()
    assert tab.messages.count() == 2
    assert tab.page.locator("#text").input_value() == "And this?"


@pytest.mark.parametrize("kind", ["webp", "gif", "bmp", "jpeg"])
def test_other_kinds_are_sent_as_the_server_reads_them(
    open_tab: OpenTab, seeing: ServerProcess, kind: str
) -> None:
    tab = open_tab(seeing.url)
    attach(tab, of_kind(kind))
    messages, timings = sent(tab, f"What is this {kind}?")
    url = next(
        part["image_url"]["url"] for part in messages[-1]["content"] if part["type"] == "image_url"
    )
    file = ImageFile.parse(base64.b64decode(url.partition(",")[2]))
    assert file.kind == ("jpeg" if kind == "jpeg" else "png")
    assert file.width == 320
    assert file.height == 256
    assert timings["cache_n"] + timings["prompt_n"] > 80


def test_what_is_no_picture_is_refused_in_words(open_tab: OpenTab, seeing: ServerProcess) -> None:
    tab = open_tab(seeing.url)
    attach(tab, {"name": "a.png", "mimeType": "image/png", "buffer": b"no pixels"})
    tab.until(lambda: "a.png" in tab.noticed())
    assert not tab.page.locator("#files .chip").count()
