"""`--help`: the flags that matter, one section, or everything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from pyctl.cli.arguments import parse_chat, parse_serve
from tests.unit.cli.given import SERVE_FLAGS


def test_help_lists_every_flag_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help all` shows each group, spelling and variable, with defaults, in lines of 80 columns
    at most.
    """
    with pytest.raises(SystemExit) as caught:
        parse_serve(["-h", "all"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for group in (
        *(
            "model:",
            "context:",
            "model from the network:",
            "cache:",
            "disk cache:",
            "sampling:",
            "chat format:",
        ),
        *("server:", "log:"),
    ):
        assert f"\n{group}\n" in text
    for flag in SERVE_FLAGS:
        assert all(name in text for name in flag.spellings())
        assert flag.env in text
    assert "(default: 2048)" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("parse", [parse_serve, parse_chat])
def test_help_begins_with_what_matters(
    capsys: pytest.CaptureFixture[str], parse: Callable[[list[str], dict[str, str]], object]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 80
    assert lines[2] == "examples:"
    for example in lines[3:5]:
        parse(shlex.split(example)[2:], {})
    flags = [line for line in lines if re.match(r"  -", line)]
    assert 18 <= len(flags) <= 22
    assert any("--cache-ram" in line for line in flags)


@pytest.mark.parametrize(
    ("topic", "there", "missing"),
    [
        (
            "cache",
            ["cache:", "disk cache:", "--kv-cache-dir", "PYCTL_EXACT"],
            ["--port", "--ctx-size"],
        ),
        ("Disk", ["disk cache:", "--kv-cache-dir"], ["--cache-ram"]),
        ("cors", ["server:", "--cors-origins"], ["--port", "model:"]),
        ("--cache-ram", ["cache:", "--cache-ram"], ["--exact"]),
        ("drafts", ["speculative decoding:", "--spec-type"], ["--port"]),
    ],
)
def test_help_on_a_topic(
    capsys: pytest.CaptureFixture[str], topic: str, there: list[str], missing: list[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_serve([f"--help={topic}"], {})
    text = capsys.readouterr().out
    assert [each for each in there if each not in text] == []
    assert [each for each in missing if each in text] == []
