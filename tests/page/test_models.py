"""Several models behind one address: the menu, and the model that a conversation keeps."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tests.page.browser import Tab
from tests.page.conftest import OpenTab


@pytest.fixture(scope="module")
def two_models(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Yield a server of two models, of which one is loaded at a time."""
    place = tmp_path_factory.mktemp("two")
    (place / "models").mkdir()
    for name in ("tiny-hybrid", "tiny-dense"):
        (place / "models" / f"{name}.gguf").symlink_to(model_path(name))
    flags = (
        "--models-dir",
        str(place / "models"),
        *shlex.split("--models-max 1 --models-patience 0 -c 4096"),
    )
    with ServerProcess((*PYCTL_SERVE, *flags, "-t", "1"), place / "log") as server:
        yield server


def statuses(tab: Tab) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in tab.server("v1/models")["data"]}


def test_each_conversation_keeps_its_model(two_models: ServerProcess, open_tab: OpenTab) -> None:
    """Opening the page loads no model; each conversation sends its own model's name, and going back
    to it finds its cache.
    """
    tab = open_tab(two_models.url)
    menu = tab.page.get_by_label("Model", exact=True)
    short = {"max_tokens": 3}
    assert menu.locator("option").all_inner_texts() == [
        "tiny-dense (not loaded)",
        "tiny-hybrid (not loaded)",
    ]
    assert set(statuses(tab).values()) == {"unloaded"}, "looking at the page loads nothing"
    assert "is loaded" in tab.page.evaluate(
        "getComputedStyle(document.querySelector('#cache'), '::before').content"
    )

    menu.select_option("tiny-hybrid")
    tab.say("The first conversation" + ", about many things" * 50, short)  # long enough to be kept
    tab.until(lambda: statuses(tab)["tiny-hybrid"] == "loaded")
    tab.until(lambda: tab.page.locator("#model").inner_text() == "tiny-hybrid")
    assert menu.input_value() == "tiny-hybrid"

    tab.page.get_by_role("button", name="New chat").click()
    menu.select_option("tiny-dense")
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.say("The second conversation", short)
    assert json.loads(asked.value.post_data or "")["model"] == "tiny-dense"
    assert statuses(tab) == {"tiny-dense": "loaded", "tiny-hybrid": "unloaded"}

    tab.page.get_by_role("button", name="The first conversation").first.click()
    tab.until(lambda: menu.input_value() == "tiny-hybrid")
    assert tab.say("And on", short)["cache_n"] > 0
    assert statuses(tab) == {"tiny-dense": "unloaded", "tiny-hybrid": "loaded"}
    tab.until(lambda: "loads in" in (menu.locator("option").first.inner_text()))


def test_a_server_with_one_model_has_no_menu(tab: Tab) -> None:
    assert tab.page.locator("#models").is_hidden()
