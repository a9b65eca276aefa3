"""What `make` and CI install: what is used, and the versions that the pages name."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def commands_for(target: str, *variables: str) -> str:
    """What `make` would run for ``target`` in a fresh checkout."""
    command = ["make", "--dry-run", "--always-make", "--directory", str(ROOT), target, *variables]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_what_it_imports() -> None:
    assert re.findall(r"in '([\w,]+)'\.split", commands_for("demo")) == ["demo"]
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    tree = ast.parse((ROOT / "tools" / "demo.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    tops = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"pyctl", "tools"}
    assert tops <= {re.split(r"[<>=]", each)[0] for each in required}


def test_a_release_makes_the_demo_without_a_compiler() -> None:
    wheels, build = '--find-links "/r"', "pip install --disable-pip-version-check --editable"
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
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, NO_COMPILER)


NO_COMPILER = "a C++ compiler or Python's headers are missing; the packages are in docs/install.md, From the source\n"


def test_clients_are_of_the_versions_that_were_measured() -> None:
    page = (ROOT / "bench" / "results" / "clients.md").read_text(encoding="utf-8")
    pinned = re.findall(r"[\w/-]+(?:@|==)([\d.]+)", commands_for("clients"))
    assert len(pinned) == 9
    assert all(f" {version} |" in page for version in pinned)


def test_ci_installs_what_the_readme_names() -> None:
    (needed,) = re.findall(
        r"^sudo apt install (.*?) +#", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    installed = re.findall(
        r"apt-get install -y (.*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {*needed.split()} - {"git"} <= {*" ".join(installed).split()}
