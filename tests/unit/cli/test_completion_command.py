"""Completion by shells: what may stand at the end of a line, and the scripts that ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyctl.cli import COMMANDS
from pyctl.cli.arguments import FLAGS
from pyctl.cli.completion_command import candidates
from pyctl.settings.setting import CHAT


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["se"], ["serve", "service", "setup"]),
        (["serve", "--kv-un"], ["--kv-unified", "--kv-unified-per-slot"]),
        (["serve", "-fa", "o"], ["off", "on"]),
        (["serve", "--mmproj", ""], None),
        (["serve", "--metrics", ""], None),
        (["doctor", "--js"], ["--json", "--json-schema", "--json-schema-file"]),
        (["launch", "co"], ["codex", "copilot"]),
        (["cache", "p"], ["pin", "prune"]),
        (["cache", "verify", "--f"], ["--fix"]),
        (["setup", "--dir", ""], None),
        (["completion", ""], ["bash", "zsh"]),
    ],
)
def test_what_may_stand_at_the_end_of_a_line(words: list[str], found: list[str] | None) -> None:
    assert candidates(words) == found


def test_every_command_and_flag_is_known() -> None:
    assert candidates([""]) == sorted(COMMANDS)
    names = {
        name
        for section, flags in FLAGS.items()
        if section is not CHAT
        for flag in flags
        for name in flag.spellings()
    }
    assert names <= {*(candidates(["serve", "-"]) or ())}
    for command in COMMANDS:
        candidates([command, "-"])


BASH = """
eval "$({pyctl} completion bash)"
complete_line() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _pyctl; printf '%s\\n' "${{COMPREPLY[@]}}"; }}
complete_line pyctl serve -fa o
complete -p pyctl
"""

ZSH = """
compdef() {{ print -r -- "$@"; }}; compadd() {{ print -l -- "${{@[2,-1]}}"; }}
eval "$({pyctl} completion zsh)"
words=(pyctl serve -fa o); CURRENT=4; _pyctl
"""


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("zsh", ZSH)])
def test_a_shell_completes(shell: str, script: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    (program := tmp_path / "pyctl").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m pyctl "$@"\n'
    )
    program.chmod(0o700)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [shell, "-c", script.format(pyctl=program)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert {"off", "on"} <= set(done.stdout.split()), done.stderr
    assert "_pyctl pyctl" in done.stdout
