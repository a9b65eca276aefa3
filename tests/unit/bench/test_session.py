"""The environment of a program in a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.clients.programs import CLIENTS, PROGRAMS
from bench.clients.session import environment_of


def test_a_program_has_no_settings_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/ada/.config")
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    environment = environment_of(PROGRAMS["claude"], tmp_path)
    assert environment["HOME"] == str(tmp_path)
    assert "XDG_CONFIG_HOME" not in environment
    assert "LLAMA_API_KEY" not in environment


def test_the_programs_of_make_clients_come_first(tmp_path: Path) -> None:
    path = environment_of(PROGRAMS["codex"], tmp_path)["PATH"]
    assert path.split(os.pathsep)[0] == str(CLIENTS / "node_modules" / ".bin")
