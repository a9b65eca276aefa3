"""`pyctl launch`: the arguments of each program, and the server that it uses."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from pyctl.cli.arguments import parse_launch
from pyctl.cli.launch_command import invocation_of, run_launch
from pyctl.cli.launched_server import address_of, follow
from pyctl.cli.programs import PROGRAMS, Endpoint
from pyctl.errors import ConfigError

TO = Endpoint("http://127.0.0.1:8099", "sesame", 'a "27B" model', 54321)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_address_key_and_context(name: str, tmp_path: Path) -> None:
    made = invocation_of(name, TO, ["--its-own"], {"PATH": "/bin"}, tmp_path)
    assert made.command[-1] == "--its-own"
    assert made.environment == {"PATH": "/bin", **made.added}
    assert TO.key not in " ".join(made.command), "all users of a machine see that"
    files = [path.read_text() for path in tmp_path.iterdir()]
    text = "\n".join([*made.command, *made.added.values(), *files]).replace("\\", "")
    assert TO.url in text
    assert TO.key in text
    assert str(TO.n_ctx) in text or str(TO.n_ctx - TO.n_reply) in text
    assert TO.model in text


def test_settings_of_codex_are_toml() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    words = list(PROGRAMS["codex"].arguments(TO))
    assert words[::2] == ["-c"] * (len(words) // 2)
    read = tomllib.loads("\n".join(words[1::2]))
    assert read["model"] == TO.model
    assert read["model_providers"]["pyctl"]["base_url"] == TO.v1
    assert read["model_context_window"] == TO.n_ctx


def test_claude_code_gets_its_limit_where_its_own_settings_cannot_change_it(tmp_path: Path) -> None:
    environ = {
        "ANTHROPIC_API_KEY": "of the cloud",
        "CLAUDE_CODE_USE_BEDROCK": "1",
        "NO_PROXY": "example.org",
    }
    made = invocation_of("claude", TO, ["-p", "hi"], environ, tmp_path)
    assert made.command[:2] == ("claude", "--settings")
    settings = json.loads(Path(made.command[2]).read_text())["env"]
    assert settings["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(TO.n_ctx)
    assert settings.items() <= made.environment.items()
    assert made.removed == ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK")
    assert not {*made.removed} & made.environment.keys()
    assert made.environment["NO_PROXY"] == "example.org,127.0.0.1"


def launched(server: Endpoint | None, *argv: str) -> int:
    """Run the command where ``server`` answers, whatever the address."""
    return run_launch(argv, {}, lambda url, key: server)


def test_a_dry_run_prints_lines_for_a_shell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Endpoint("http://127.0.0.1:8099", "none", "qwen", 54321, "/m.gguf")
    assert launched(server, "qwen", "--dry-run", "--", "-p", "two words") == 0
    out = capsys.readouterr().out
    assert "export OPENAI_BASE_URL=http://127.0.0.1:8099/v1\n" in out
    assert out.endswith(" --model qwen -p 'two words'\n")
    (path,) = re.findall(r"export QWEN_CODE_SYSTEM_SETTINGS_PATH=(.*)", out)
    assert not Path(path).exists()


def test_a_running_server_serves_its_own_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Endpoint("http://127.0.0.1:8080", "none", "qwen", 4096, "/models/a.gguf")
    with pytest.raises(
        ConfigError, match=r"http://127.0.0.1:8080 serves /models/a.gguf; leave -m out"
    ):
        launched(found, "codex", "--dry-run", "-m", "/models/b.gguf")
    for chosen, idle in (
        (["--port", "8080"], "-c"),
        (["--url", found.url, "--port", "8080"], "--port, -c"),
    ):
        argv = ["codex", "--dry-run", "-m", "/models/a.gguf", *chosen, "-c", "100"]
        assert launched(found, *argv) == 0
        assert f"runs already; without effect: {idle}\n" in capsys.readouterr().err
    assert launched(found, "codex", "--dry-run", "--port", "8080") == 0
    assert "without effect" not in capsys.readouterr().err


def test_without_a_server_a_dry_run_says_which_one_would_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launched(None, "opencode", "-m", "/models/a.gguf", "--dry-run", "-c", "100") == 0
    out = capsys.readouterr().out
    assert "this starts: pyctl serve -m /models/a.gguf -c 100\n" in out
    assert '"pyctl/a.gguf"' in out
    with pytest.raises(ConfigError, match="neither pyctl nor llama-server answers at http://box:1"):
        launched(None, "opencode", "--url", "box:1/v1", "--dry-run")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["emacs"], "unknown program: 'emacs'; the programs are claude, codex"),
        (["claude"], "claude is not installed: npm install -g @anthropic-ai/claude-code"),
        (["claude", "--no-such-flag"], "unknown flag --no-such-flag"),
        (["claude", "-p", "hi"], "unknown flag -p"),
        (["claude", "--dry-run", "--host", "/tmp/a.sock"], "programs need an http address"),
    ],
)
def test_mistakes(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_launch(argv, {"PATH": "/nowhere"})


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ([], "http://127.0.0.1:8080"),
        (["--host", "0.0.0.0", "--port", "99"], "http://127.0.0.1:99"),
        (["--host", "/tmp/a.sock,::", "--api-prefix", "/llm"], "http://[::1]:8080/llm"),
    ],
)
def test_the_address_that_a_program_on_this_machine_uses(flags: list[str], address: str) -> None:
    assert address_of(parse_launch("claude", flags, {})[0]) == address


class Steps:
    """An event that is set after the ``steps``, which run one at each wait."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = [*steps]

    def wait(self, _: float) -> bool:
        if not self._steps:
            return True
        self._steps.pop(0)()
        return False


def test_a_program_without_a_screen_shows_how_far_its_prompt_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("10:00:00 prefill      1 of 2 tokens evaluated\n")  # of before

    def add(text: str) -> Callable[[], object]:
        def write() -> None:
            with log.open("a") as file:
                file.write(text)

        return write

    steps = Steps(
        add("10:00:05 prefill       4,096 of 39,293 tokens evaluated   10 %   819 tok/s"),
        add("    43 s to go  request 1\n10:00:06 ready\n"),
        add("10:00:07 chat  39,293 tokens\n"),
    )
    follow(log, cast(threading.Event, steps))
    assert capsys.readouterr().err.splitlines() == [
        "pyctl: prompt: 4,096 of 39,293 tokens evaluated 10 % 819 tok/s 43 s to go request 1"
    ]
