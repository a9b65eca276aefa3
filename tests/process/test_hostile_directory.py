"""Commands that start in a stranger's directory run no Python code of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from pyctl.measure.server_process import ServerProcess, clean_environment
from tests.unit.files.test_pdf_file import pdf, says

PYCTL = str(Path(sys.executable).with_name("pyctl"))

MODULES = (
    "resource",
    "json",
    "markdown_it",
    "pypdf",
    "base64",
    "linecache",
    "runpy",
    "pip",
    "venv",
    "sitecustomize",
)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The current directory has modules of these names; returns those that ran."""
    (tmp_path / "pyctl").mkdir()
    place = tmp_path
    ran = tmp_path / "ran"
    for path in (place / "pyctl" / "__init__.py", *(place / f"{name}.py" for name in MODULES)):
        path.write_text(f"open({str(ran)!r}, 'a').write(__name__ + '\\n')\nraise SystemExit(9)\n")
    monkeypatch.chdir(place)
    return lambda: ran.read_text().split() if ran.exists() else []


def test_a_server_runs_nothing_of_it(hostile: Callable[[], list[str]]) -> None:
    with ServerProcess((PYCTL, "serve", "-c", "1024", "-t", "1"), Path("log")) as server:
        html = httpx.post(f"{server.url}/page/markdown", json={"texts": ["**bold**"]}).json()[
            "html"
        ]
        assert html == ["<p><strong>bold</strong></p>\n"]
        assert hostile() == []
        text = httpx.post(f"{server.url}/page/pdf", content=pdf(says("A lamp"))).json()["text"]
    assert text == "A lamp"
    assert hostile() == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "bench --quick --depths 64 --budget 1 -t 1 -c 4096 --spec-type none",
            "pyctl is ready after",
        ),
        ("setup --cpu --yes", "pip could not fetch the source"),
    ],
)
def test_a_command_runs_nothing_of_it(
    hostile: Callable[[], list[str]], command: str, words: str
) -> None:
    homes = {"XDG_CACHE_HOME": os.path.abspath("cache"), "XDG_DATA_HOME": os.path.abspath("data")}
    environment = {**clean_environment(), **homes, "PIP_NO_INDEX": "1"}
    arguments = [PYCTL, *command.split()]
    done = subprocess.run(
        arguments, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert words in done.stdout + done.stderr
    assert hostile() == []


def test_a_child_has_the_packages_of_its_parent(hostile: Callable[[], list[str]]) -> None:
    """A child can import the packages of PYTHONPATH, and of a directory that the parent added
    itself.
    """
    for package in (Path("given", "package_given"), Path("added", "package_added")):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    Path("added/package_added/child.py").write_text(
        "import package_given, pyctl.text, sys; print(sys.argv[1:])"
    )
    Path("added/parent.py").write_text(
        "import subprocess; from pyctl.processes.module_command import module_command\n"
        "subprocess.run([*module_command('package_added.child'), 'a b', '-m'])"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.abspath("given")}
    command = [sys.executable, "added/parent.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "['a b', '-m']\n"
    assert done.stderr == ""
    assert hostile() == []
