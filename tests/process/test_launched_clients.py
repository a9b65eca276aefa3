"""Real programs through `pyctl launch`: a turn, a restart of everything, and a turn that resumes
from disk.

`make clients` installs the programs. The model is tiny and of random weights, with the words of the
built-in one; a grammar is its only reply.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import pytest

from bench.clients.programs import CLIENTS, write_words_model
from tests.process.conftest import clean_environment
from tests.process.node_sdk import OLDEST_NODE, node_version

PLACES = "node_modules/.bin", "aider/bin", "gptme/bin", "vibe/bin"

SERVER = ("-c", "65536", "-np", "2", "-n", "64", "--port", "0", "--grammar", 'root ::= "Noted."')

SECONDS = 270
"""For one turn, in which a program evaluates up to 40,000 tokens."""

SLACK = 64
"""Tokens that may be evaluated again where a prompt goes on: a header, and tokens that join
differently at a seam.
"""

QUIET = {
    "TZ": "UTC",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "KILO_DISABLE_AUTOUPDATE": "1",
    "KILO_DISABLE_MODELS_FETCH": "1",
    "VIBE_ENABLE_UPDATE_CHECKS": "false",
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
}
"""Variables that keep programs from requests to other servers."""

REQUEST = re.compile(
    r"^[\d:]{8} (?:messages|responses|chat) +(\d+) tokens +(\d+) (from disk|\w+)", re.MULTILINE
)


@dataclass(frozen=True)
class Turn:
    """Tokens of the longest prompt of a program's turn, and the most that one took from disk."""

    n_prompt: int
    n_from_disk: int


@pytest.fixture(scope="module")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the fastest model with a vocabulary of 40,000 tokens: one recurrent layer, one of
    attention.
    """
    path = tmp_path_factory.mktemp("models") / "words.gguf"
    write_words_model(path)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user's first day: no settings of any program."""
    places = os.pathsep.join(str(CLIENTS / place) for place in PLACES)
    home = {"HOME": str(tmp_path), "PATH": f"{places}{os.pathsep}{os.environ['PATH']}"}
    kept = {
        name: value for name, value in clean_environment().items() if not name.startswith("XDG_")
    }
    return kept | home | QUIET


def needs(program: str, environment: dict[str, str]) -> None:
    if shutil.which(program, path=environment["PATH"].partition(os.environ["PATH"])[0]) is None:
        pytest.skip(f"{program} is not installed; make clients installs it, with npm")
    if program == "qwen" and node_version() < OLDEST_NODE:
        pytest.skip(f"qwen needs Node.js {OLDEST_NODE}")


def take_turn(environment: dict[str, str], model: Path, program: str, *arguments: str) -> Turn:
    """Run ``program`` on a server of its own; it must print the only reply."""
    home = Path(environment["HOME"])
    project = home / "project"
    project.mkdir(exist_ok=True)
    flags = ["-m", str(model), *SERVER, "--kv-cache-dir", str(home / "kv")]
    done = subprocess.run(
        [sys.executable, "-m", "pyctl", "launch", program, *flags, "--", *arguments],
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    (log,) = (home / ".local" / "state" / "pyctl").glob("launch-*.log")
    said = log.read_text(encoding="utf-8")
    log.unlink()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{said}"
    assert "Noted." in done.stdout
    found = [
        (int(n_prompt), int(n_cached), source)
        for n_prompt, n_cached, source in REQUEST.findall(said.replace(",", ""))
    ]
    assert found, said
    from_disk = [n_cached for _, n_cached, source in found if source == "from disk"]
    return Turn(max(found)[0], max(from_disk, default=0))


ASKED = ("My name is Anna.", "What is my name?")
AIDER = "--yes-always --no-git --no-show-model-warnings --message"

TURNS = {
    "claude": ("-p", "-p -c"),
    "codex": ("exec --skip-git-repo-check", "exec --skip-git-repo-check resume --last"),
    "opencode": ("run", "run --continue"),
    "kilo": ("run", "run --continue"),
    "copilot": ("--allow-all-tools -p", "--continue --allow-all-tools -p"),
    "vibe": ("--trust -p", "--trust --continue -p"),
    "gptme": ("--non-interactive", "--non-interactive --resume"),
    "qwen": ("-p", "--continue -p"),
    "aider": (AIDER, f"--restore-chat-history {AIDER}"),
}
"""Flags of each program for a first question, and for the next in the same session."""


@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("program", TURNS)
def test_a_session_goes_on_from_disk(
    program: str, environment: dict[str, str], words_model: Path
) -> None:
    needs(program, environment)
    day = None
    while day != (
        day := datetime.now(timezone.utc).date()
    ):  # once, unless midnight changes the date in a prompt
        before, after = (
            take_turn(environment, words_model, program, *words.split(), asked)
            for words, asked in zip(TURNS[program], ASKED, strict=True)
        )
    assert after.n_prompt > before.n_prompt, "the history was restored"
    if program != "aider":  # which inserts the history before what it sent
        assert after.n_from_disk > before.n_prompt - SLACK
