"""Sampling and conversations with tools by the metadata of a GGUF file, on a running server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gguf_copy import copy_with
from tests.process.conftest import Server, pyctl

RECOMMENDED = {
    "general.sampling.temp": 0.25,
    "general.sampling.top_k": 20,
    "general.sampling.top_p": 0.5,
    "general.sampling.sequence": "top_k;top_p;temperature",
    "general.sampling.min_p": "much",
}

TOOL_USE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
TOOL_USE += "{% for t in tools %}TOOL {{ t.function.name }}\n{% endfor %}"
TOOL_USE += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = TOOL_USE.replace("{% for t in tools %}TOOL {{ t.function.name }}\n{% endfor %}", "")

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that recommends parameters, and has a template for tools."""
    templates = {"tokenizer.chat_template": PLAIN, "tokenizer.chat_template.tool_use": TOOL_USE}
    target = tmp_path_factory.mktemp("models") / "both.gguf"
    return copy_with(model_path("tiny-dense"), target, {**RECOMMENDED, **templates})


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], model: Path) -> Server:
    return start("", "-m", str(model), "--top-k", "7", "--no-kv-cache")


def test_parameters_of_the_file_are_defaults_below_flags_and_requests(server: Server) -> None:
    """A value that is not a number is ignored, with a line of the log."""
    params = server.client.get_json("/props")["default_generation_settings"]["params"]
    shown = {name: params[name] for name in ("temperature", "top_k", "top_p", "min_p", "samplers")}
    samplers = ["top_k", "top_p", "temperature"]
    assert shown == {
        "temperature": 0.25,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": pytest.approx(0.05),
        "samplers": samplers,
    }
    body = {"prompt": "hi", "n_predict": 1, "top_p": 0.75}
    used = server.client.post_json("/completion", body)["generation_settings"]
    assert used["temperature"] == 0.25
    assert used["top_k"] == 7
    assert used["top_p"] == 0.75
    assert "general.sampling.min_p of the file is ignored: 'much' is not a number" in server.log()
    (slot, *_) = server.client.get_json("/slots")
    assert slot["params"]["temperature"] == 0.25


def test_a_section_of_a_preset_wins(
    start: Callable[..., Server], model: Path, tmp_path: Path
) -> None:
    presets = tmp_path / "models.ini"
    presets.write_text(f"[one]\nmodel = {model}\ntemp = 0.5\n", encoding="utf-8")
    running = start("", "--models-preset", str(presets), "--no-kv-cache")
    running.client.chat(**ASKED, model="one")
    props = running.client.get_json("/props?model=one")
    params = props["default_generation_settings"]["params"]
    assert params["temperature"] == 0.5
    assert params["top_k"] == 20
    values = {row["flag"]: (row["value"], row["reason"]) for row in props["resolved_settings"]}
    assert values["--split-mode"] == ("layer", "default")


def test_requests_with_tools_are_written_by_the_template_for_tools(server: Server) -> None:
    """Both templates are shown, and each prompt is written by one of them."""
    props = server.client.get_json("/props")
    assert props["chat_template"] == PLAIN
    assert props["chat_template_tool_use"] == TOOL_USE
    assert props["chat_template_caps"]["supports_tools"]

    def prompt(**more: Any) -> str:
        body = {**ASKED, **more}
        return str(server.client.post_json("/apply-template", body)["prompt"])

    assert "TOOL look_up" in prompt(tools=TOOLS)
    assert "TOOL" not in prompt()
    with_tools = server.client.chat(**ASKED, tools=TOOLS).body["usage"]
    without = server.client.chat(**ASKED).body["usage"]
    assert with_tools["prompt_tokens"] > without["prompt_tokens"]


def test_a_file_with_a_template_for_tools_alone(
    start: Callable[..., Server], model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """A template for tools alone writes all conversations, and `pyctl doctor` has no warning."""
    target = tmp_path / "tools.gguf"
    more = {"tokenizer.chat_template.tool_use": TOOL_USE}
    less = ("tokenizer.chat_template",)
    copy_with(model_path("tiny-dense"), target, more, less)
    running = start("", "-m", str(target), "--no-kv-cache")
    props = running.client.get_json("/props")
    assert props["chat_template"] == TOOL_USE
    assert props["chat_template_tool_use"] == TOOL_USE
    assert "no chat template" not in running.log()
    assert "no chat template" not in pyctl("doctor", "-m", str(target)).stdout


def test_a_broken_template_for_tools_is_one_line(
    start: Callable[..., Server], model: Path, tmp_path: Path
) -> None:
    broken = {"tokenizer.chat_template.tool_use": "{% for %}"}
    running = start(
        "", "-m", str(copy_with(model, tmp_path / "broken.gguf", broken)), "--no-kv-cache"
    )
    assert "the model's template for tools is not used: broken chat template" in running.log()
    assert "chat_template_tool_use" not in running.client.get_json("/props")
