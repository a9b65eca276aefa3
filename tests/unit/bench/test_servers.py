"""The servers of a replay: their commands, and options that do not fit together."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.traces.servers import command_of, main


@pytest.fixture
def options() -> argparse.Namespace:
    """Return the options at a scale of 1 to 32."""
    return argparse.Namespace(
        max_context=131_072, scale=1 / 32, flags="-t 1", llama_server="/opt/llama-server"
    )


def test_context_and_checkpoints_are_scaled(options: argparse.Namespace, tmp_path: Path) -> None:
    command = command_of("llama-server", options, [Path("model.gguf")], tmp_path)
    assert command[0] == "/opt/llama-server"
    assert command[command.index("-c") + 1] == "4506"
    assert command[command.index("--checkpoint-min-step") + 1] == "256"
    assert command[command.index("-m") + 1] == "model.gguf"
    assert command[command.index("-t") + 1] == "1"


def test_pyctl_has_a_cache_directory_of_its_own(
    options: argparse.Namespace, tmp_path: Path
) -> None:
    command = command_of("pyctl", options, [Path("model.gguf")], tmp_path)
    assert "serve" in command
    assert command[command.index("--kv-cache-dir") + 1] == str(tmp_path / "kv")
    assert "--checkpoint-min-step" not in command


@pytest.mark.parametrize("server", ["pyctl", "llama-server"])
def test_one_of_two_models_is_loaded_at_a_time(
    server: str, options: argparse.Namespace, tmp_path: Path
) -> None:
    files = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for file in files:
        file.touch()
    for _ in range(2):  # links of a server before it are replaced
        command = command_of(server, options, files, tmp_path)
    models = Path(command[command.index("--models-dir") + 1])
    assert sorted(link.resolve() for link in models.iterdir()) == files
    assert command[command.index("--models-max") + 1] == "1"
    assert "-m" not in command


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "no server: give --start or --url"),
        (["--start", "llama-server"], "--start llama-server needs --llama-server FILE"),
        (["--url", "http://127.0.0.1:9", "--restart"], "--restart needs servers of --start"),
        (["--url", "http://127.0.0.1:9", "--switch"], "--switch needs the name"),
        (["--start", "pyctl", "--only", "7", "999"], "no session 999 is recorded"),
    ],
)
def test_options_that_do_not_fit_end_with_a_reason(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert problem in f"{ended.value} {capsys.readouterr().err}"
