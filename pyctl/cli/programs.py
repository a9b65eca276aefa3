"""The programs that `pyctl launch` starts, each with a server's address and context; and its own
settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyctl.settings.convert import web_address
from pyctl.settings.setting import Section

__all__ = ["LAUNCH", "NO_KEY", "PROGRAMS", "ClientProgram", "Endpoint", "LaunchSettings"]

LAUNCH = Section("launch")


@dataclass(frozen=True)
class LaunchSettings:
    """The settings of a launch; ``server_flags`` were typed and are for a server that is started
    here.
    """

    url: str = LAUNCH.flag(
        "",
        "--url",
        "use this server; by default the one that answers at --host and --port, else a new one",
        web_address,
        "PYCTL_URL",
        "URL",
    )
    dry_run: bool = LAUNCH.flag(
        False, "--dry-run", "print the environment and the command, and start nothing"
    )
    server_flags: tuple[str, ...] = ()


MAX_REPLY_TOKENS = 32_000

NO_KEY = "none"
"""The key for a server without keys: most programs refuse to start without one."""


@dataclass(frozen=True)
class Endpoint:
    """A server as programs see it: ``url`` without /v1, and ``n_ctx`` tokens for the prompt and
    reply of a request.

    ``model_path`` is the file of its model, if it is known.
    """

    url: str
    key: str
    model: str
    n_ctx: int
    model_path: str = ""

    @property
    def v1(self) -> str:
        """The address for OpenAI's APIs."""
        return f"{self.url}/v1"

    @property
    def n_reply(self) -> int:
        """Tokens of the context that a program keeps free for a reply, if it needs a number."""
        return min(MAX_REPLY_TOKENS, self.n_ctx // 8)


def _nothing(to: Endpoint) -> Any:
    """Return no settings and no arguments."""
    return {}


@dataclass(frozen=True)
class ClientProgram:
    """A program and its settings for an `Endpoint`.

    ``arguments`` come before the user's. ``files`` are texts of temporary files: the name is the
    flag, or else the variable, that gets the path. ``unset`` starts variables that would lead the
    program to another server.
    """

    install: str
    arguments: Callable[[Endpoint], Sequence[str]] = _nothing
    environment: Callable[[Endpoint], Mapping[str, str]] = _nothing
    files: Callable[[Endpoint], Mapping[str, str]] = _nothing
    unset: tuple[str, ...] = ()


def _claude(to: Endpoint) -> Mapping[str, str]:
    models = (
        "ANTHROPIC_MODEL",
        *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU", "FABLE")),
    )
    return {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.key,
        **dict.fromkeys(models, to.model),
        # CLAUDE_CODE_AUTO_COMPACT_WINDOW takes no less than 100,000 tokens.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(to.n_ctx),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(to.n_reply),
    }


def _codex(to: Endpoint) -> Sequence[str]:
    settings = {
        "model": to.model,
        "model_provider": "pyctl",
        "model_providers.pyctl.name": "pyctl",
        "model_providers.pyctl.base_url": to.v1,
        "model_providers.pyctl.wire_api": "responses",
        "model_providers.pyctl.env_key": "PYCTL_LAUNCH_KEY",
        "model_context_window": to.n_ctx,
    }
    # A JSON string is a TOML string.
    return [
        word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")
    ]


def _opencode(to: Endpoint) -> str:
    settings = {
        "model": f"pyctl/{to.model}",
        "small_model": f"pyctl/{to.model}",
        "provider": {
            "pyctl": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": to.v1, "apiKey": to.key},
                "models": {to.model: {"limit": {"context": to.n_ctx, "output": to.n_reply}}},
            }
        },
    }
    return json.dumps(settings)


def _copilot(to: Endpoint) -> Mapping[str, str]:
    return {
        "COPILOT_OFFLINE": "true",
        "COPILOT_MODEL": to.model,
        "COPILOT_PROVIDER_BASE_URL": to.v1,
        "COPILOT_PROVIDER_API_KEY": to.key,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(to.n_ctx - to.n_reply),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(to.n_reply),
    }


def _vibe(to: Endpoint) -> Mapping[str, str]:
    provider = {
        "name": "pyctl",
        "api_base": to.v1,
        "api_key_env_var": "PYCTL_LAUNCH_KEY",
        "backend": "generic",
    }
    sizes = {"max_context_length": to.n_ctx, "auto_compact_threshold": to.n_ctx - to.n_reply}
    return {
        "PYCTL_LAUNCH_KEY": to.key,
        "VIBE_ACTIVE_MODEL": to.model,
        "VIBE_PROVIDERS": json.dumps([provider]),
        "VIBE_MODELS": json.dumps(
            [{"name": to.model, "alias": to.model, "provider": "pyctl", **sizes}]
        ),
    }


def _qwen(to: Endpoint) -> Mapping[str, Any]:
    return {
        "model": {"name": to.model, "generationConfig": {"contextWindowSize": to.n_ctx}},
        "security": {"auth": {"selectedType": "openai"}},
    }


def _aider(to: Endpoint) -> Mapping[str, Any]:
    sizes = {
        "max_tokens": to.n_reply,
        "max_input_tokens": to.n_ctx,
        "max_output_tokens": to.n_reply,
    }
    free = {"input_cost_per_token": 0, "output_cost_per_token": 0}
    return {f"openai/{to.model}": {**sizes, **free, "litellm_provider": "openai", "mode": "chat"}}


PROGRAMS: Mapping[str, ClientProgram] = {
    "claude": ClientProgram(
        "npm install -g @anthropic-ai/claude-code",
        environment=_claude,
        # The `env` of the user's own settings counts more than the environment, and less than this
        # file.
        files=lambda to: {"--settings": json.dumps({"env": _claude(to)})},
        unset=(
            "ANTHROPIC_API_KEY",
            *(f"CLAUDE_CODE_USE_{name}" for name in ("BEDROCK", "VERTEX", "FOUNDRY")),
        ),
    ),
    "codex": ClientProgram(
        "npm install -g @openai/codex",
        arguments=_codex,
        environment=lambda to: {"PYCTL_LAUNCH_KEY": to.key},
    ),
    "opencode": ClientProgram(
        "npm install -g opencode-ai",
        environment=lambda to: {"OPENCODE_CONFIG_CONTENT": _opencode(to)},
    ),
    "kilo": ClientProgram(
        "npm install -g @kilocode/cli",
        environment=lambda to: {"KILO_CONFIG_CONTENT": _opencode(to)},
    ),
    "copilot": ClientProgram(
        "npm install -g @github/copilot", environment=_copilot, unset=("COPILOT_PROVIDER_",)
    ),
    "vibe": ClientProgram("pipx install mistral-vibe", environment=_vibe),
    "gptme": ClientProgram(
        "pipx install gptme",
        arguments=lambda to: ["--model", f"local/{to.model}"],
        environment=lambda to: {
            "OPENAI_API_BASE": to.v1,  # which it reads before OPENAI_BASE_URL
            "OPENAI_API_KEY": to.key,
            "GPTME_CONTEXT_BUDGET": str(to.n_ctx - to.n_reply),
        },
    ),
    "qwen": ClientProgram(
        "npm install -g @qwen-code/qwen-code",
        arguments=lambda to: [
            "--auth-type",
            "openai",
            "--openai-base-url",
            to.v1,
            "--model",
            to.model,
        ],
        environment=lambda to: {
            "OPENAI_BASE_URL": to.v1,
            "OPENAI_API_KEY": to.key,
            "OPENAI_MODEL": to.model,
        },
        files=lambda to: {"QWEN_CODE_SYSTEM_SETTINGS_PATH": json.dumps(_qwen(to))},
    ),
    "aider": ClientProgram(
        "pipx install aider-chat",
        # Flags count more than a .env file of the project.
        arguments=lambda to: ["--model", f"openai/{to.model}", "--openai-api-base", to.v1],
        environment=lambda to: {"OPENAI_API_KEY": to.key},
        files=lambda to: {"--model-metadata-file": json.dumps(_aider(to))},
    ),
}
"""Every program by the name of its executable."""
