from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from pyctl.chat.template import Template
from pyctl.model_files import builtin_model
from tests.model.tools.conftest import Load, Loaded
from tools.generator import TINY_DENSE, byte_vocab, cached_model, read_vocab

USER = {"role": "user", "content": "Hi"}


@cache
def metadata(key: str) -> Any:
    return GGUFReader(builtin_model()).fields[key].contents()


@pytest.fixture(scope="module")
def builtin(loaded: Load) -> Loaded:
    return loaded(builtin_model())


def test_the_builtin_model_is_small_and_hybrid_and_has_a_head() -> None:
    assert builtin_model().stat().st_size <= 9_000_000
    assert metadata("general.architecture") == "qwen35"
    assert metadata("qwen35.full_attention_interval") == 4
    assert metadata("general.license") == "MIT"
    assert metadata("qwen35.nextn_predict_layers") == 1
    assert metadata("qwen35.block_count") == 9


def test_its_tokens_give_back_every_text(builtin: Loaded) -> None:
    for text in (
        "The code of the north door is 4821.",
        "Grüße, 世界 \U0001f600",
        "a\tb\r\n\n  c",
        "{'x': [1.5e-7]}",
    ):
        assert builtin.detokenize(builtin.tokenize(text)).decode() == text


@pytest.mark.parametrize(
    "mark", ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_response>", "<think>"]
)
def test_its_marks_are_one_token_each(builtin: Loaded, mark: str) -> None:
    assert len(builtin.tokenize(mark)) == 1
    assert len(builtin.tokenize(mark, parse_special=False)) > 1 or mark in (
        "<tool_call>",
        "</tool_response>",
        "<think>",
    )


def rendered(*messages: dict[str, Any], **options: Any) -> str:
    template = Template(metadata("tokenizer.chat_template"), "", "<|im_end|>")
    return template.render(messages, **options)


def test_its_template_does_not_think_unless_asked() -> None:
    plain = rendered(USER)
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(USER, enable_thinking=True) == plain + "<think>\n"


def test_its_tools_are_rendered_as_in_its_training() -> None:
    """The template writes tools, calls and results exactly as in the training data; another form
    would be text that the model never learned.
    """
    tool = {"type": "function", "function": {"name": "open_door", "parameters": {"type": "object"}}}
    call = {"function": {"name": "open_door", "arguments": {"door": "old gate", "code": "4711"}}}
    text = rendered(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Open the old gate."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"open": true}'},
        tools=[tool],
    )
    said = (
        "system\n# Tools\n\nYou may call these "
        f"functions:\n\n<tools>\n{json.dumps(tool)}\n</tools>\n\n"
        "Write a call like "
        "this:\n\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n"
        "</function>\n</tool_call>\n\nBe brief.",
        "user\nOpen the old gate.",
        "assistant\n<tool_call>\n<function=open_door>\n<parameter=door>\nold gate\n</parameter>\n"
        "<parameter=code>\n4711\n</parameter>\n</function>\n</tool_call>",
        'user\n<tool_response>\n{"open": true}\n</tool_response>',
    )
    assert (
        text
        == "".join(f"<|im_start|>{message}<|im_end|>\n" for message in said)
        + "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}', {}, ""], ids=str)
def test_more_messages_only_append_to_its_prompt(arguments: object) -> None:
    call = {"function": {"name": "get_weather", "arguments": arguments}}
    asked = {"role": "assistant", "content": "Wait.", "tool_calls": [call, call]}
    result = {"role": "tool", "content": [{"type": "text", "text": "rain"}]}
    messages = [USER, asked, result, result, {"role": "assistant", "content": "Rain."}, USER]
    texts = [
        rendered(*messages[:n], add_generation_prompt=False) for n in range(1, len(messages) + 1)
    ]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)


def test_another_seed_is_another_file(tmp_path: Path) -> None:
    paths = {cached_model(TINY_DENSE, tmp_path), cached_model(TINY_DENSE, tmp_path, seed=1)}
    assert len(paths) == 2


def test_a_model_is_made_once(tmp_path: Path) -> None:
    path = cached_model(TINY_DENSE, tmp_path)
    before = path.stat()
    assert cached_model(TINY_DENSE, tmp_path) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_threads_at_once_see_one_whole_file(tmp_path: Path) -> None:
    def read(_: int) -> tuple[Path, int]:
        path = cached_model(TINY_DENSE, tmp_path)
        return path, len(read_vocab(path))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(read, range(16)))) == 1
    (path,) = tmp_path.iterdir()
    assert read_vocab(path) == byte_vocab()


def test_processes_at_once_see_one_whole_file(tmp_path: Path) -> None:
    code = (
        "import sys; from tools.generator import *; print(len(cached_model(TINY_DENSE, "
        "sys.argv[1]).read_bytes()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    (path,) = tmp_path.iterdir()
    assert outputs == {f"{path.stat().st_size}\n"}
