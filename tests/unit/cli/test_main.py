from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import sys
from pyctl.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as error:
    code = error.code
names = {name.partition(".")[0] for name in sys.modules}
heavy = names & {"numpy", "jinja2", "llama_cpp", "gguf", "starlette", "uvicorn", "httpx", "rich", "msgspec", "mcp"}
print(code, *sorted(heavy), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["serve", "--help"], ["chat", "--help"], ["cache", "--help"]),
        *(["doctor", "--help"], ["bench", "--help"]),
        *(["launch", "--help"], ["launch", "claude", "--help"], ["service", "--help"], ["launch", "dance"]),
        *(["serve", "--no-such-flag"], ["cache", "dance"]),
    ],
    ids=" ".join,
)
def test_help_and_mistakes_import_nothing_that_takes_long(arguments: list[str]) -> None:
    command = [sys.executable, "-c", CHILD, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    code = "2" if arguments[-1] in ("--no-such-flag", "dance") else "0"
    assert result.stderr.splitlines()[-1] == code


@pytest.mark.parametrize(
    ("command", "absent"), [("serve", {"gguf", "mcp", "rich", "webbrowser", "yaml"}), ("chat", {"gguf", "mcp", "yaml"})]
)
def test_a_start_imports_nothing_that_only_some_need(command: str, absent: set[str]) -> None:
    code = (
        f"import sys, pyctl.cli.{command}_command, pyctl.cli.logs as logs; logs.LoadProgress(''); print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not absent & set(result.stdout.split())
