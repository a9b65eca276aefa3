"""`pyctl launch` with a program that records what it gets and talks to the server."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.process.conftest import Server, clean_environment
from tests.waiting import until
from tools.container import CONTAINERFILE, stages, words_of

PROGRAM = f"""#!{sys.executable}
import json, os, signal, sys, urllib.request as web
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
url = os.environ["ANTHROPIC_BASE_URL"]
seen = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "cache": []}}
messages = json.loads(os.environ["MESSAGES"])
if messages:
    body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 8, "messages": messages}}
    headers = {{"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"]}}
    request = web.Request(url + "/v1/messages", json.dumps(body).encode(), headers)
    with web.urlopen(request, timeout=60) as reply:
        seen["cache"] = reply.headers["x-pyctl-cache"].split("; ")
with open(os.environ["RECORD"] + ".new", "w") as file:
    json.dump(seen, file)
os.rename(os.environ["RECORD"] + ".new", os.environ["RECORD"])
if not messages:
    signal.pause()
sys.exit(7)
"""

FACTS = [{"role": "user", "content": "Facts to remember. " * 120}]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with `claude` in the PATH; the program writes its input into RECORD."""
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    more = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "RECORD": str(tmp_path / "seen"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "MESSAGES": json.dumps(FACTS),
    }
    return clean_environment() | more


def launched(
    environment: dict[str, str], *words: str, program: str = "claude"
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pyctl", "launch", program, *words]
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_server_lives_as_long_as_the_program_and_the_next_one_resumes(
    environment: dict[str, str], model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """The program gets the server's address and key, its exit code is passed on, and the server
    ends with it; the next launch restores the conversation from disk.
    """
    flags = [
        "-m",
        str(model_path("tiny-hybrid")),
        *shlex.split("-c 8192 -t 1 --port 0 --api-key sesame"),
    ]
    flags += ["--kv-cache-dir", str(tmp_path / "kv"), "--", "--go", "on"]
    sources = []
    for messages in (FACTS, [*FACTS, {"role": "assistant", "content": "Yes."}, *FACTS[:1]]):
        environment["MESSAGES"] = json.dumps(messages)
        with launched(environment, *flags) as process:
            assert process.stderr is not None
            said = process.stderr.read()
            assert process.wait(60) == 7, said
        seen = json.loads(Path(environment["RECORD"]).read_text())
        sources.append(seen["cache"][0])
        assert seen["arguments"][-2:] == ["--go", "on"]
        assert not Path(seen["arguments"][1]).exists()  # its temporary settings
        assert seen["environment"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"
        assert seen["environment"]["ANTHROPIC_AUTH_TOKEN"] == "sesame"
        with pytest.raises(httpx.ConnectError):
            httpx.get(seen["environment"]["ANTHROPIC_BASE_URL"] + "/health", trust_env=False)
        assert "8,192 tokens of context" in said
        assert (
            "first prompt has 10,000 to 40,000 tokens and may take minutes; its progress: tail -f /"
            in said
        )
    assert sources == ["source=none", "source=disk"]


def test_signals_are_for_the_program_and_a_server_that_runs_goes_on(
    environment: dict[str, str], start: Callable[..., Server]
) -> None:
    server = start("tiny-hybrid")
    environment["MESSAGES"] = "[]"
    with launched(environment, "--url", server.url) as process:
        until(Path(environment["RECORD"]).exists)
        process.send_signal(
            signal.SIGINT
        )  # the terminal sends it to the program, which here has none
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 9
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


def test_a_server_that_does_not_start(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "noise.gguf").write_bytes(b"\x00\x01" * 500)
    with launched(environment, "-m", str(tmp_path / "noise.gguf"), "--port", "0") as process:
        assert process.stderr is not None
        said = process.stderr.read().splitlines()
        assert process.wait(60) == 2
    assert said[-1].startswith("pyctl: error: the server ended with exit code 2: ")
    assert "noise.gguf" in said[-1]
    assert not Path(environment["RECORD"]).exists()


def test_the_health_check_of_the_image(start: Callable[..., Server]) -> None:
    (check,) = (
        each for each in stages(CONTAINERFILE.read_text())[-1] if each.name == "HEALTHCHECK"
    )
    server = start("tiny-hybrid")
    _, *arguments = [word.replace("http://127.0.0.1:8080", server.url) for word in words_of(check)]
    command = [sys.executable, *arguments]
    assert subprocess.run(command, timeout=60, env=clean_environment()).returncode == 0
    server.stop()
    assert (
        subprocess.run(
            command, timeout=60, env=clean_environment(), stderr=subprocess.DEVNULL
        ).returncode
        != 0
    )
