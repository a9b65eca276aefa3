"""`pyctl service`: the unit that it prints."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pyctl.cli.service_command import run_service, unit_text
from pyctl.errors import ConfigError

FLAGS = ["-m", "a b%n$HOME\\.gguf", "-c", "4096", "--api-key", 'quo"te']


def test_flags_are_checked_before_anything_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--no-such-flag"], ["-c", "-5"], ["-m", "a\nb.gguf"]):
        with pytest.raises(ConfigError):
            run_service(flags, {})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "line"),
    [("a\\", "a\\/"), (" a ", " a /"), ("50%", "50%%/"), ("a\nExecStartPre=x", "")],
)
def test_the_name_of_the_directory_is_one_line(name: str, line: str) -> None:
    if not line:
        with pytest.raises(ConfigError, match="cannot be part of a unit"):
            unit_text(["pyctl"], Path("/") / name)
        return
    unit = unit_text(["pyctl"], Path("/") / name).splitlines()
    assert unit[unit.index("Restart=on-failure") - 1] == f"WorkingDirectory=/{line}"


def test_variables_that_the_service_lacks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_service(FLAGS, {"LLAMA_ARG_CTX_SIZE": "1"}) == 0
    assert "not set in the service: LLAMA_ARG_CTX_SIZE" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit_and_reads_the_flags_back(tmp_path: Path) -> None:
    """Blanks, quotes, percent and dollar signs reach the program as they were typed."""
    unit = tmp_path / "pyctl.service"
    words = ["/bin/echo", *FLAGS, "", "a;b", "it's", "#"]
    unit.write_text(unit_text(words, tmp_path))
    runtime = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    result = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        env=runtime,
        timeout=60,
    )
    assert result.returncode == 0
    assert result.stderr == ""
    # Within double quotes, systemd's rules are those of a shell.
    (line,) = (line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    read = shlex.split(line.removeprefix("ExecStart="))
    assert [word.replace("%%", "%").replace("$$", "$") for word in read] == words
