from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pyctl.cli import main

CHILD = """
import sys
from pyctl.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as error:
    code = error.code
names = {name.partition(".")[0] for name in sys.modules}
HEAVY = "numpy jinja2 llama_cpp gguf starlette uvicorn httpx rich msgspec mcp"
heavy = names & {*HEAVY.split()}
print(code, *sorted(heavy), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["serve", "--help"], ["chat", "--help"], ["cache", "--help"]),
        *(
            ["doctor", "--help"],
            ["bench", "--help"],
            ["models", "--help"],
            ["completion", "--help"],
        ),
        *(
            ["launch", "--help"],
            ["launch", "claude", "--help"],
            ["service", "--help"],
            ["launch", "dance"],
        ),
        *(["serve", "--no-such-flag"], ["cache", "dance"]),
        *(["srve"], ["cache", "list"], ["launch", "cluade"]),
    ],
    ids=" ".join,
)
def test_help_and_mistakes_import_nothing_that_takes_long(arguments: list[str]) -> None:
    command = [sys.executable, "-c", CHILD, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said, code = ["", *result.stderr.splitlines()][-2:]
    assert code == ("0" if arguments[-1] == "--help" else "2")
    meant = {"srve": "serve", "list": "ls", "cluade": "claude"}.get(arguments[-1], "")
    assert said.endswith(f"; did you mean {meant}?") is bool(meant)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "qwen3"], "unknown command: 'run'; pyctl chat -m FILE talks to a model"),
        (["pull", "qwen3"], "unknown command: 'pull'; pyctl serve -hf USER/MODEL fetches a model"),
        (["completion", "fish"], "completion for 'fish' does not exist: name bash or zsh"),
        (["chat", "--url", "http://127.0.0.1:9", "-p", "Hi"], "; pyctl serve starts a server"),
    ],
)
def test_mistakes_name_the_next_step(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("pyctl: error: ")
    assert told in error


def test_the_version_needs_no_metadata_of_pyctl_and_its_bindings() -> None:
    """The version is printed in a tree that nothing has installed."""
    code = """
import importlib.metadata as metadata
found = metadata.distribution
hidden = ("llama_cpp_python", "llama-cpp-python", "pyctl-llama")
metadata.distribution = lambda name: found("none-such" if name in hidden else name)
from pyctl.cli import main
main(["--version"])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert re.fullmatch(r"pyctl [\d.]+ \(llama-cpp-python [\d.]+\)", result.stdout.splitlines()[0])


@pytest.mark.parametrize(
    ("command", "absent"),
    [("serve", {"gguf", "mcp", "rich", "webbrowser", "yaml"}), ("chat", {"gguf", "mcp", "yaml"})],
)
def test_a_start_imports_nothing_that_only_some_need(command: str, absent: set[str]) -> None:
    code = (
        f"import sys, pyctl.cli.{command}_command, pyctl.cli.logs as logs; "
        "logs.LoadProgress(''); print(*sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not absent & set(result.stdout.split())
