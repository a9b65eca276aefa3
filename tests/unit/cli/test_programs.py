"""Each program's arguments, variables and files for a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyctl.cli.launch_command import build_invocation
from pyctl.cli.programs import PROGRAMS, Endpoint

TO = Endpoint("http://127.0.0.1:8099", "sesame", 'a "27B" model', 54321)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_address_key_and_context(name: str, tmp_path: Path) -> None:
    made = build_invocation(name, TO, ["--its-own"], {"PATH": "/bin"}, tmp_path)
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
    made = build_invocation("claude", TO, ["-p", "hi"], environ, tmp_path)
    assert made.command[:2] == ("claude", "--settings")
    settings = json.loads(Path(made.command[2]).read_text())["env"]
    assert settings["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(TO.n_ctx)
    assert settings.items() <= made.environment.items()
    assert made.removed == ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK")
    assert not {*made.removed} & made.environment.keys()
    assert made.environment["NO_PROXY"] == "example.org,127.0.0.1"
