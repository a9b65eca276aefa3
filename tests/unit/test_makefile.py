"""The packages that `make` and CI install: they are used, and their versions are those on the
pages.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import demo

ROOT = Path(__file__).resolve().parents[2]


def commands_for(target: str, *variables: str) -> str:
    """Return the commands that `make` would run for ``target`` in a fresh checkout."""
    command = ["make", "--dry-run", "--always-make", "--directory", str(ROOT), target, *variables]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_what_it_imports() -> None:
    """Each package that tools/demo.py imports is among those of its extra, which `make demo`
    installs.
    """
    assert re.findall(r"in '([\w,]+)'\.split", commands_for("demo")) == ["demo"]
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    tree = ast.parse((ROOT / "tools" / "demo.py").read_text(encoding="utf-8"))
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    tops = (
        {name.partition(".")[0] for name in names}
        - set(sys.stdlib_module_names)
        - {"pyctl", "tools"}
    )
    assert tops <= {re.split(r"[<>=]", each)[0] for each in required}


def run_link(home: Path, path: str, *flags: str) -> list[str]:
    """Return the lines that tools/link.py prints for the command of a checkout in ``home``."""
    command = home / "checkout" / ".venv" / "bin" / "pyctl"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text("#!/bin/sh\necho works\n")
    command.chmod(0o700)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "link.py"), *flags, ".venv/bin/pyctl"],
        cwd=home / "checkout",
        env={"HOME": str(home), "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_demo_leaves_a_command_and_prints_the_next_ones(tmp_path: Path) -> None:
    commands = commands_for("demo").splitlines()
    assert commands.index(".venv/bin/python tools/demo.py") + 1 == commands.index(
        ".venv/bin/python tools/link.py .venv/bin/pyctl"
    )
    place = tmp_path / ".local" / "bin" / "pyctl"
    for _ in range(2):  # the second time it is there
        lines = run_link(tmp_path, f"/usr/bin:{place.parent}")
        assert [line.split("#")[0].split() for line in lines] == [
            ["Next:"],
            ["pyctl", "serve", "--open"],
            ["pyctl", "launch", "claude", "-m", "FILE"],
        ]
    assert subprocess.run([place], capture_output=True, check=True).stdout == b"works\n"


def test_make_serve_links_the_command_and_starts_the_server_with_given_flags() -> None:
    commands = commands_for("serve", "ARGS=-m /models/a.gguf").splitlines()
    link = commands.index(".venv/bin/python tools/link.py --only .venv/bin/pyctl")
    assert commands[link + 1] == "exec .venv/bin/pyctl serve -m /models/a.gguf"
    assert not any("demo" in command for command in commands)


def test_the_link_of_make_serve_is_one_line(tmp_path: Path) -> None:
    place = tmp_path / ".local" / "bin" / "pyctl"
    path = f"/usr/bin:{place.parent}"
    assert run_link(tmp_path, path, "--only") == [f"{place} is the command of this checkout"]
    assert place.is_symlink()


def test_make_serve_prints_how_the_same_shell_finds_the_command(tmp_path: Path) -> None:
    """A shell that was opened before ~/.local/bin existed does not have it on PATH."""
    place = tmp_path / ".local" / "bin" / "pyctl"
    assert run_link(tmp_path, "/usr/bin:/bin", "--only") == [
        f"{place} is the command of this checkout",
        f'{place.parent} is not on PATH: export PATH="{place.parent}:$PATH"',
    ]


def test_a_link_that_is_not_on_the_path_is_told_so(tmp_path: Path) -> None:
    place = tmp_path / ".local" / "bin" / "pyctl"
    lines = run_link(tmp_path, "/usr/bin:/bin")
    assert lines[0] == f'{place.parent} is not on PATH: export PATH="{place.parent}:$PATH"'
    assert lines[2].split()[:3] == [str(place), "serve", "--open"]
    other = tmp_path / "other" / "pyctl"
    other.parent.mkdir()
    other.touch(0o700)
    lines = run_link(tmp_path, f"{other.parent}:{place.parent}")
    assert lines[0] == f"{other} is another pyctl and precedes this one on PATH: {place}"


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_command_of_another_installation_stays(tmp_path: Path, kind: str) -> None:
    place = tmp_path / ".local" / "bin" / "pyctl"
    place.parent.mkdir(parents=True)
    other = tmp_path / "other"
    if kind == "file":
        place.write_text("theirs")
    else:
        place.symlink_to(other)
    if kind == "link":
        other.write_text("theirs")
    lines = run_link(tmp_path, str(place.parent))
    assert lines[0] == f"{place} is of another installation and was not changed"
    assert lines[2].split()[0] == str(tmp_path / "checkout" / ".venv" / "bin" / "pyctl")
    assert place.readlink() == other if kind != "file" else place.read_text() == "theirs"


@pytest.mark.parametrize("is_ours", [True, False])
def test_clean_removes_its_own_link_only(tmp_path: Path, is_ours: bool) -> None:
    place = tmp_path / ".local" / "bin" / "pyctl"
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "venv" / "bin" / "pyctl" if is_ours else tmp_path / "other")
    command = ["make", "-f", str(ROOT / "Makefile"), "clean", f"BIN={tmp_path}/venv/bin"]
    subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        check=True,
        capture_output=True,
    )
    assert place.is_symlink() is not is_ours


def test_a_first_turn_is_no_sooner() -> None:
    """Nothing was restored: the warm run was the cold one, and the other came second."""
    assert demo.sooner(0, 61.0, 30.0) == ""
    assert demo.sooner(6909, 3000.0, 28_700.0) == "9.6x"


def test_a_release_makes_the_demo_without_a_compiler() -> None:
    wheels = '--find-links "/r"'
    build = "pip install --disable-pip-version-check --editable"
    commands = commands_for("demo", "PYCTL_RELEASE=/r")
    assert wheels in commands
    assert build not in commands
    assert build in commands_for("demo")


def test_a_machine_without_a_compiler_is_told_before_anything_is_built(tmp_path: Path) -> None:
    for name in ("make", "sh", "touch"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "pip").touch(0o700)
    flags = [f"BIN={tmp_path}", f"BUILT={tmp_path / 'built'}"]
    command = [tmp_path / "make", *flags, tmp_path / "built"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == NO_COMPILER


NO_COMPILER = (
    "a C++ compiler or Python's headers are missing; the packages are in "
    "docs/install.md, From the source\n"
)


def test_clients_are_of_the_versions_that_were_measured() -> None:
    page = (ROOT / "bench" / "results" / "clients.md").read_text(encoding="utf-8")
    pinned = re.findall(r"[\w/-]+(?:@|==)([\d.]+)", commands_for("clients"))
    assert len(pinned) == 11
    assert all(f" {version} |" in page for version in pinned)


def test_ci_installs_what_the_readme_names() -> None:
    (needed,) = re.findall(
        r"^sudo apt (?:update && sudo apt )?install (.*?) +#",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    installed = re.findall(
        r"apt-get install -y (.*)$",
        (ROOT / ".ci" / "run").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert {*needed.split()} <= {*" ".join(installed).split()}
