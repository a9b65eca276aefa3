"""The commands of servers that a replay starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.traces.targets import StartSettings, command_of

SETTINGS = StartSettings(scale=1 / 32, flags="-t 1", llama_server="/opt/llama-server")


def test_context_and_checkpoints_are_scaled(tmp_path: Path) -> None:
    command = command_of("llama-server", SETTINGS, [Path("model.gguf")], tmp_path)
    assert command[0] == "/opt/llama-server"
    assert command[command.index("-c") + 1] == "4506"
    assert command[command.index("--checkpoint-min-step") + 1] == "256"
    assert command[command.index("-m") + 1] == "model.gguf"
    assert command[command.index("-t") + 1] == "1"


def test_checkpoints_are_a_token_apart_at_the_smallest_scale(tmp_path: Path) -> None:
    settings = replace(SETTINGS, scale=1e-6)
    command = command_of("llama-server", settings, [Path("model.gguf")], tmp_path)
    assert command[command.index("--checkpoint-min-step") + 1] == "1"


def test_pyctl_has_a_cache_directory_of_its_own(tmp_path: Path) -> None:
    command = command_of("pyctl", SETTINGS, [Path("model.gguf")], tmp_path)
    assert "serve" in command
    assert command[command.index("--kv-cache-dir") + 1] == str(tmp_path / "kv")
    assert "--checkpoint-min-step" not in command


@pytest.mark.parametrize("server", ["pyctl", "llama-server"])
def test_one_of_two_models_is_loaded_at_a_time(server: str, tmp_path: Path) -> None:
    files = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for file in files:
        file.touch()
    for _ in range(2):  # links of a server before it are replaced
        command = command_of(server, SETTINGS, files, tmp_path)
    models = Path(command[command.index("--models-dir") + 1])
    assert sorted(link.resolve() for link in models.iterdir()) == files
    assert command[command.index("--models-max") + 1] == "1"
    assert "-m" not in command
