"""`pyctl service`: the unit file, and the calls of systemctl."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from pyctl.cli.service_command import run_service, unit_path, unit_text
from pyctl.errors import ConfigError

FLAGS = ["-m", "a b%n$HOME\\.gguf", "-c", "4096", "--api-key", 'quo"te']

FAKE = """#!/bin/sh
echo "$*" >> "$0.calls"
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A home without systemd."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


def test_flags_are_checked_before_anything_is_written(environ: dict[str, str]) -> None:
    for flags in (["--no-such-flag"], ["-c", "-5"], ["-m", "a\nb.gguf"]):
        with pytest.raises(ConfigError):
            run_service(["install", *flags], environ)
    assert not unit_path(environ).exists()
    with pytest.raises(ConfigError, match="systemctl --user"):
        run_service(["start"], environ)


@pytest.mark.parametrize(
    ("name", "line"), [("a\\", "a\\/"), (" a ", " a /"), ("50%", "50%%/"), ("a\nExecStartPre=x", "")]
)
def test_the_name_of_the_directory_is_one_line(
    name: str, line: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    if not line:
        with pytest.raises(ConfigError, match="cannot stand in a unit"):
            run_service(["install"], environ)
        assert not unit_path(environ).exists()
        return
    assert run_service(["install"], environ) == 0
    unit = unit_path(environ).read_text().splitlines()
    assert unit[unit.index("Restart=on-failure") - 1] == f"WorkingDirectory={tmp_path}/{line}"


def test_without_systemd_the_commands_are_printed(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_service(["install", "--print", *FLAGS], environ) == 0
    printed = capsys.readouterr().out
    assert not unit_path(environ).exists()
    assert run_service(["install", *FLAGS], environ | {"LLAMA_ARG_CTX_SIZE": "1"}) == 0
    out, err = capsys.readouterr()
    assert unit_path(environ).read_text() == printed
    assert stat.S_IMODE(unit_path(environ).stat().st_mode) == 0o600
    assert "systemctl --user daemon-reload\n" in out
    assert "systemctl --user enable pyctl.service\n" in out
    assert "not set in the service: LLAMA_ARG_CTX_SIZE" in err


def test_systemd_is_told(environ: dict[str, str]) -> None:
    fake = Path(os.environ["PATH"]) / "systemctl"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    assert run_service(["install"], environ) == 0
    calls = [line.removeprefix("--user ") for line in Path(f"{fake}.calls").read_text().splitlines()]
    assert calls == ["show-environment", "daemon-reload", "enable pyctl.service", "restart pyctl.service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit_and_reads_the_flags_back(tmp_path: Path) -> None:
    unit = tmp_path / "pyctl.service"
    words = ["/bin/echo", *FLAGS, "", "a;b", "it's", "#"]
    unit.write_text(unit_text(words, tmp_path))
    runtime = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    result = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)], capture_output=True, text=True, env=runtime, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    # Within double quotes, systemd's rules are those of a shell.
    (line,) = (line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    read = shlex.split(line.removeprefix("ExecStart="))
    assert [word.replace("%%", "%").replace("$$", "$") for word in read] == words
