"""Other spellings of flags, llama-server's names of them, and names without effect here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyctl.engine.sampling import GrammarKind
from pyctl.errors import RequestError
from pyctl.settings.convert import file_text, number, on_off_auto
from pyctl.settings.setting import CONTEXT, FORMAT, GENERAL, MODEL, SAMPLING, SERVER, Flag, Section

__all__ = [
    "FURTHER",
    "IGNORED",
    "INSTEAD",
    "NO_OP",
    "OF_TOOLS",
    "PRESETS",
    "REJECTED",
    "REMOVED",
    "BoundBySchema",
    "FlagAliases",
    "InfoFlags",
]


@dataclass(frozen=True)
class BoundBySchema:
    """A JSON schema in the place of a grammar, and its result."""

    schema: Any
    grammar: str
    kind: GrammarKind


def bound_by_schema(text: str) -> BoundBySchema:
    """Return a JSON schema and its grammar. Raises ValueError for one that has none."""
    # Only now: most starts need no grammar.
    from pyctl.chat.constraint import json_constraint

    try:
        schema = json.loads(text, parse_constant=number())
        constraint = json_constraint(schema)
        return BoundBySchema(schema, constraint.grammar, constraint.kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON schema: {error}") from error
    except RequestError as error:
        raise ValueError(str(error)) from error


def bound_by_schema_file(text: str) -> BoundBySchema:
    """Return a JSON schema in a file."""
    return bound_by_schema(file_text(text))


@dataclass(frozen=True)
class InfoFlags:
    """The flags that print something and exit."""

    help: str = GENERAL.flag(
        "",
        "-h --help --usage",
        "show the flags that matter, a section such as cache, flags with a word, or all",
        str.lower,
        metavar="[TOPIC]",
        bare="",
        shown="",
    )
    version: bool = GENERAL.flag(False, "--version", "show the version and exit")
    list_devices: bool = GENERAL.flag(
        False, "--list-devices", "show the devices that can hold a model and exit"
    )
    list_models: bool = GENERAL.flag(
        False, "-cl --cache-list", "show the models that -hf has fetched and exit"
    )


@dataclass(frozen=True)
class FlagAliases:
    """The flags that `arguments` resolves: it fills the settings with their meaning."""

    mmap: bool = MODEL.flag(
        True,
        "--mmap",
        "map the file into memory; superseded by -lm",
        None,
        "LLAMA_ARG_MMAP",
        off="--no-mmap",
    )
    mlock: bool = MODEL.flag(
        False, "--mlock", "lock the model in RAM; superseded by -lm", None, "LLAMA_ARG_MLOCK"
    )
    lora_unapplied: bool = MODEL.flag(
        False, "--lora-init-without-apply", "load adapters at scale 0"
    )
    rope_scale: float = CONTEXT.flag(
        1.0,
        "--rope-scale",
        "scale the context by N",
        number(1e-9),
        "LLAMA_ARG_ROPE_SCALE",
        shown="",
    )
    template_file: str = FORMAT.flag(
        "",
        "--chat-template-file",
        "file of a Jinja template in place of the model's",
        file_text,
        "LLAMA_ARG_CHAT_TEMPLATE_FILE",
        "FILE",
    )
    reasoning: str = FORMAT.flag(
        "auto",
        "-rea --reasoning",
        "reasoning: on, off or auto (the template decides)",
        on_off_auto,
        "LLAMA_ARG_REASONING",
        "WHEN",
    )
    reasoning_effort: str = FORMAT.flag(
        "default",
        "--reasoning-effort",
        "reasoning effort for the template, such as low or high; default = the template's",
        str,
        "LLAMA_ARG_REASONING_EFFORT",
        "LEVEL",
        shown="",
    )
    reasoning_preserve: bool = FORMAT.flag(
        True,
        "--reasoning-preserve",
        "keep the reasoning of earlier replies in prompts",
        None,
        "LLAMA_ARG_REASONING_PRESERVE",
        off="--no-reasoning-preserve",
    )
    rerank: bool = SERVER.flag(
        False,
        "--rerank --reranking",
        "serve reranking: --embeddings with --pooling rank",
        None,
        "LLAMA_ARG_RERANKING",
    )


FURTHER: tuple[tuple[Section, Flag], ...] = (
    (
        SAMPLING,
        Flag("--grammar-file", "file of a GBNF grammar", file_text, metavar="FILE", dest="grammar"),
    ),
    (
        SAMPLING,
        Flag(
            "-j --json-schema",
            "JSON schema that replies must follow",
            bound_by_schema,
            metavar="SCHEMA",
            dest="grammar",
        ),
    ),
    (
        SAMPLING,
        Flag(
            "-jf --json-schema-file",
            "file of a JSON schema",
            bound_by_schema_file,
            metavar="FILE",
            dest="grammar",
        ),
    ),
)
"""Flags for a field whose class cannot parse them."""


def _names(bare: str, with_value: str = "", with_two: str = "") -> dict[str, int]:
    """Return each name, and the number of values that follow it."""
    return {
        name: n for n, names in enumerate((bare, with_value, with_two)) for name in names.split()
    }


NO_OP: Mapping[str, int] = _names(
    """
--jinja --no-perf -e --escape --no-escape -cb --cont-batching --no-context-shift
--warmup --no-warmup --log-prefix --no-log-prefix
--no-log-jsonl -no-ag --no-agent --no-ui-mcp-proxy --no-webui-mcp-proxy --no-skip-chat-parsing
--spec-draft-backend-sampling --no-spec-draft-backend-sampling
""",
    """
--log-colors --threads-http
""",
)
"""Flags for the way pyctl works anyway, or without a visible difference: taken without a warning.
"""

IGNORED: Mapping[str, int] = _names(
    """
--perf --log-jsonl
-bs --backend-sampling --context-shift -sp --special
--no-jinja -nocb --no-cont-batching --reuse-port --ui-mcp-proxy --webui-mcp-proxy
--skip-chat-parsing
""",
    """
-C --cpu-mask -Cr --cpu-range --cpu-strict --prio -Cb --cpu-mask-batch -Crb --cpu-range-batch
--cpu-strict-batch --prio-batch --poll-batch --keep -dt --defrag-thold --control-vector
--control-vector-scaled -ctxcp --ctx-checkpoints --swa-checkpoints -r --reverse-prompt
--mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir --spec-synth-len
--spec-synth-rates --ui-config --webui-config --ui-config-file --webui-config-file --cache-reuse
-sps --slot-prompt-similarity --log-prompts-dir -to --timeout -lcs --lookup-cache-static -lcd
--lookup-cache-dynamic --spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd
--cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft
--spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft
--spec-draft-poll-batch --poll-batch-draft --spec-draft-p-split --draft-p-split
--spec-ngram-simple-min-hits --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-min-hits
--spec-ngram-mod-n-min --spec-draft-sampling --moe-cache-mib
""",
    """
--control-vector-layer-range
""",
)
"""Flags that are taken with a warning."""

_DRAFT = "-hfd ggml-org/Qwen2.5-Coder-0.5B-Q8_0-GGUF"

PRESETS: Mapping[str, str] = {
    "--embd-gemma-default": (
        "-hf ggml-org/embeddinggemma-300M-qat-q4_0-GGUF --embeddings --port 8011"
    ),
    "--fim-qwen-1.5b-default": "-hf ggml-org/Qwen2.5-Coder-1.5B-Q8_0-GGUF --port 8012",
    "--fim-qwen-3b-default": "-hf ggml-org/Qwen2.5-Coder-3B-Q8_0-GGUF --port 8012",
    "--fim-qwen-7b-default": "-hf ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF --port 8012",
    "--fim-qwen-7b-spec": f"-hf ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF {_DRAFT} --port 8012",
    "--fim-qwen-14b-spec": f"-hf ggml-org/Qwen2.5-Coder-14B-Q8_0-GGUF {_DRAFT} --port 8012",
    "--fim-qwen-30b-default": "-hf ggml-org/Qwen3-Coder-30B-A3B-Instruct-Q8_0-GGUF --port 8012",
    "--gpt-oss-20b-default": "-hf ggml-org/gpt-oss-20b-GGUF --port 8013",
    "--gpt-oss-120b-default": "-hf ggml-org/gpt-oss-120b-GGUF --port 8013",
    "--vision-gemma-4b-default": "-hf ggml-org/gemma-3-4b-it-qat-GGUF --port 8014",
    "--vision-gemma-12b-default": "-hf ggml-org/gemma-3-12b-it-qat-GGUF --port 8014",
}
"""Flags that are a model in llama-server, and the flags that they stand for there (common/arg.cpp).
"""

_MAXIMUM = "use --spec-draft-n-max, or --spec-ngram-mod-n-max for n-grams"
_MINIMUM = "use --spec-draft-n-min"

REMOVED: Mapping[str, str] = {
    "--draft": _MAXIMUM,
    "--draft-n": _MAXIMUM,
    "--draft-max": _MAXIMUM,
    "--draft-min": _MINIMUM,
    "--draft-n-min": _MINIMUM,
    "--spec-ngram-size-n": (
        "use --spec-ngram-mod-n-match, or --spec-ngram-simple-size-n and the like"
    ),
    "--spec-ngram-size-m": "use --spec-ngram-mod-n-max, or --spec-ngram-simple-size-m and the like",
    "--spec-ngram-min-hits": "omit it: drafts have the length that pays",
    "LLAMA_ARG_DRAFT_MAX": _MAXIMUM,
    "LLAMA_ARG_DRAFT_MIN": _MINIMUM,
}
"""Flags and variables that llama-server has removed and also refuses."""

REJECTED: Mapping[str, int] = {
    **_names("--completion-bash -ag --agent", "-dr --docker-repo --tools --tools-runtime"),
    **dict.fromkeys(PRESETS, 0),
    **{name: 1 for name in REMOVED if name.startswith("--")},
}
"""Flags for answers, tools or sources of models that pyctl lacks, and those that llama-server also
refuses.
"""

OF_TOOLS = ("--tools", "--tools-runtime", "-ag", "--agent", "LLAMA_ARG_TOOLS", "LLAMA_ARG_AGENT")
"""Names by which llama-server turns on built-in tools, variables included."""

_TOOLS_INSTEAD = (
    "pyctl has no built-in tools; name MCP servers with --mcp-servers-config, such as"
    " @modelcontextprotocol/server-filesystem for files and mcp-shell-server for commands"
)

_NO_DOCKER = "pyctl fetches models with -hf USER/MODEL:QUANT or --model-url"

INSTEAD: Mapping[str, str] = {
    "--completion-bash": "pyctl completion bash prints it",
    "-dr": _NO_DOCKER,
    "--docker-repo": _NO_DOCKER,
    **dict.fromkeys(OF_TOOLS, _TOOLS_INSTEAD),
    **{name: f"llama-server has removed it; {text}" for name, text in REMOVED.items()},
    **{name: f"name its model: {text}" for name, text in PRESETS.items()},
}
"""The way out for each name that is refused."""
