"""`pyctl launch`: the server that it uses, and mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyctl.cli.launch_command import run_launch
from pyctl.cli.programs import Endpoint
from pyctl.errors import ConfigError


def launched(server: Endpoint | None, *argv: str) -> int:
    """Run the command where ``server`` answers, whatever the address."""
    return run_launch(argv, {}, lambda url, key: server)


def test_a_dry_run_prints_lines_for_a_shell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Endpoint("http://127.0.0.1:8099", "none", "qwen", 54321, "/m.gguf")
    assert launched(server, "qwen", "--dry-run", "--", "-p", "two words") == 0
    out = capsys.readouterr().out
    assert "export OPENAI_BASE_URL=http://127.0.0.1:8099/v1\n" in out
    assert out.endswith(" --model qwen -p 'two words'\n")
    (path,) = re.findall(r"export QWEN_CODE_SYSTEM_SETTINGS_PATH=(.*)", out)
    assert not Path(path).exists()


def test_a_running_server_serves_its_own_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Endpoint("http://127.0.0.1:8080", "none", "qwen", 4096, "/models/a.gguf")
    with pytest.raises(
        ConfigError, match=r"http://127.0.0.1:8080 serves /models/a.gguf; leave -m out"
    ):
        launched(found, "codex", "--dry-run", "-m", "/models/b.gguf")
    for chosen, idle in (
        (["--port", "8080"], "-c"),
        (["--url", found.url, "--port", "8080"], "--port, -c"),
    ):
        argv = ["codex", "--dry-run", "-m", "/models/a.gguf", *chosen, "-c", "100"]
        assert launched(found, *argv) == 0
        assert f"runs already; without effect: {idle}\n" in capsys.readouterr().err
    assert launched(found, "codex", "--dry-run", "--port", "8080") == 0
    assert "without effect" not in capsys.readouterr().err


def test_without_a_server_a_dry_run_says_which_one_would_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launched(None, "opencode", "-m", "/models/a.gguf", "--dry-run", "-c", "100") == 0
    out = capsys.readouterr().out
    assert "this starts: pyctl serve -m /models/a.gguf -c 100\n" in out
    assert '"pyctl/a.gguf"' in out
    with pytest.raises(ConfigError, match="neither pyctl nor llama-server answers at http://box:1"):
        launched(None, "opencode", "--url", "box:1/v1", "--dry-run")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["emacs"], "unknown program: 'emacs'; the programs are claude, codex"),
        (["claude"], "claude is not installed: npm install -g @anthropic-ai/claude-code"),
        (["claude", "--no-such-flag"], "unknown flag --no-such-flag"),
        (["claude", "-p", "hi"], "unknown flag -p"),
        (["claude", "--dry-run", "--host", "/tmp/a.sock"], "programs need an http address"),
    ],
)
def test_mistakes(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_launch(argv, {"PATH": "/nowhere"})


@pytest.mark.parametrize(("program", "installer"), [("claude", "npm"), ("aider", "pipx")])
def test_a_missing_program_is_installed_by_a_program_that_may_be_missing(
    tmp_path: Path, program: str, installer: str
) -> None:
    hint = f" (before that: sudo apt install {installer})"
    with pytest.raises(ConfigError, match=f"^{program} is not installed: .*{re.escape(hint)}$"):
        run_launch([program], {"PATH": str(tmp_path)})
    (tmp_path / installer).touch(0o700)
    with pytest.raises(
        ConfigError, match=f"^{program} is not installed: {installer} install [^(]+$"
    ):
        run_launch([program], {"PATH": str(tmp_path)})
