from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyctl.cli.arguments import FLAGS, parse_serve
from pyctl.cli.flag_aliases import INSTEAD, NO_OP, PRESETS, REJECTED, REMOVED
from pyctl.errors import ConfigError
from pyctl.settings.setting import GENERAL
from tests.unit.cli.given import SERVE_FLAGS, WITHOUT_USE, refused, serve

CONTRACT = Path(__file__).resolve().parents[3] / "vendor/llama.cpp/tools/server/README.md"


COPIED = [
    (
        "-m qwen.gguf -c 65536 -ngl 99 -fa on --jinja --host 0.0.0.0 --port 8001 -ctk q8_0 -ctv "
        "q8_0"
        " --temp 0.6 --top-p 0.95 --top-k 20 --min-p 0 --presence-penalty 1.5 --no-context-shift",
        (),
    ),
    (
        "--model q.gguf --threads -1 --ctx-size 16384 --n-gpu-layers 99 -ot .ffn_.*_exps.=CPU "
        "--seed 3407 --prio 2"
        " --temp 1.0 --min-p 0.0 --top-p 0.95 --top-k 40 --repeat-penalty 1.0",
        ("without effect here: --prio",),
    ),
    (
        "-m a.gguf -a qwen3 -np 2 -cb -kvu --metrics --slots --no-webui --cache-ram 16384 -ctxcp "
        "16 --cache-reuse 256"
        " -sps 0.5 --slot-save-path /tmp --no-warmup -cmoe --chat-template-kwargs "
        '{"enable_thinking":false}',
        ("without effect here: -ctxcp, --cache-reuse, -sps",),
    ),
    (
        "-m a.gguf -hf org/model:Q4_K_M --mlock --no-mmap --numa distribute -t 8 -tb 16 -b 4096 "
        "-ub 4096 -fa"
        " --control-vector-layer-range 1 2 --prio 1 --log-file x.log -md d.gguf -ngld 99 "
        "--prio-draft 1"
        " --mmproj-auto --mmproj p.gguf --lora l.gguf --rope-scaling yarn --rope-scale 4 "
        "--yarn-orig-ctx 32768",
        (
            "without effect here: --control-vector-layer-range, --prio, --prio-draft",
            "-hf has no effect with -m",
        ),
    ),
]


@pytest.mark.parametrize(("line", "warnings"), COPIED)
def test_copied_command_lines_start_with_one_line_about_what_has_no_effect(
    line: str, warnings: tuple[str]
) -> None:
    settings = parse_serve(line.split(), {})
    assert settings.warnings == warnings
    assert settings.model.path.endswith(".gguf")


def contract() -> list[tuple[list[str], bool, str]]:
    """Return the flags in the documentation of the pinned llama-server: names, whether a value
    follows, the variable.
    """
    if not CONTRACT.exists():
        pytest.skip(
            "llama-server's README is not unpacked under vendor/llama.cpp; the build does that"
        )
    rows = []
    for line in CONTRACT.read_text(encoding="utf-8").splitlines():
        if (match := re.match(r"\| `(-[^`]*)` \| (.*) \|$", line)) is None:
            continue
        words = re.findall(r"(?:^|, )(-[\w.-]+)", match[1])
        text = match[1][match[1].rindex(words[-1]) + len(words[-1]) :].strip()
        variable = re.search(r"\(env: (\w+)\)", match[2])
        rows.append((words, bool(text), variable[1] if variable else ""))
    assert len(rows) > 200
    return rows


NEWER_FLAGS = {"--moe-cache-mib", "--spec-draft-sampling"}
"""Flags of llama-server b11549, which is newer than the pinned one and its documentation."""

NEWER_VARIABLES = {"--slot-save-path": "LLAMA_ARG_SLOT_SAVE_PATH"}
"""Variables of flags that have none in the pinned llama-server, but in b11549."""


def test_every_llama_server_flag_is_known() -> None:
    used = {name: flag for flag in (*SERVE_FLAGS, *FLAGS[GENERAL]) for name in flag.spellings()}
    for names, with_value, variable in contract():
        for name in names:
            if name in used:
                takes_topic = used[name].dest == "help"
                assert (used[name].convert is not None) == (with_value or takes_topic), name
                assert used[name].env == NEWER_VARIABLES.get(name, variable), name
            elif name != "--control-vector-layer-range":
                assert WITHOUT_USE[name] == int(with_value), name


def test_every_other_flag_of_pyctl_is_its_own() -> None:
    """Only the listed flags are missing in llama-server's documentation, so that a flag misspelt
    here does not pass for one of pyctl's own.
    """
    documented = {name for names, *_ in contract() for name in names}
    own = {name for flag in SERVE_FLAGS for name in flag.spellings()} - documented
    assert own == {
        *(
            "--prefix-cache-slots",
            "--exact",
            "--no-exact",
            "--kv-cache-dir",
            "--kv-cache-budget",
            "--kv-cache",
        ),
        "--no-kv-cache",
        *("--canary-interval", "--receipts", "--no-receipts"),
        *("--loop-guard", "--no-loop-guard"),
        "--otel",
        *(
            "--kv-cache-min-tokens",
            "--kv-cache-cold-max",
            "--kv-cache-interim",
            "--disk-prefix-cache",
            "--kv-cache-daily-writes",
        ),
        *("--kv-store", "--kv-pool", "--open", "--warm-next", "--no-warm-next", "--prompt-replay"),
        *("--prewarm", "--no-prewarm"),
        *("--queue", "--show-prompts", "--max-connections", "--models-patience", "--stall-timeout"),
        *("--extension", "--no-extension"),
        *("--mmap", "--no-mmap", "--mlock"),  # older names, which llama-server still takes
    }
    assert WITHOUT_USE.keys() - documented == NEWER_FLAGS


def test_a_copied_environment_starts() -> None:
    """The variables of a llama-server start pyctl with the same settings. Those without effect are
    named in a warning, and an empty one counts as unset.
    """
    environ = {
        "LLAMA_ARG_MODEL": "/models/my_model.gguf",
        "LLAMA_ARG_CTX_SIZE": "4096",
        "LLAMA_ARG_N_PARALLEL": "2",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_PORT": "8081",
        "LLAMA_ARG_THREADS": "",
        "LLAMA_ARG_CONT_BATCHING": "1",
        "LLAMA_ARG_NO_SLOTS": "1",
        "LLAMA_ARG_SPEC_TYPE": "draft-mtp",
        "PATH": "/bin",
    }
    settings = parse_serve([], environ)
    assert settings.model.n_ctx == 4096
    assert settings.model.n_seqs == 2
    assert settings.model.n_threads == -1
    assert settings.listen.port == 8081
    assert settings.server.show_metrics is True
    assert settings.drafts.draft_types == ("draft-mtp",)
    assert settings.warnings == (
        "without effect here: LLAMA_ARG_CONT_BATCHING, LLAMA_ARG_NO_SLOTS",
    )


def test_what_is_refused_names_a_way_that_pyctl_takes() -> None:
    """A model's name among llama-server's flags must not start the built-in model."""
    assert REJECTED.keys() <= INSTEAD.keys()
    for name, flags in PRESETS.items():
        settings = parse_serve(flags.split(), {})
        assert settings.hub.hf_repo.startswith("ggml-org/")
        assert settings.warnings == ()
        with pytest.raises(
            ConfigError, match=re.escape(f"{name} is not supported: name its model: {flags}")
        ):
            parse_serve([name], {})
    known = {spelling for flag in SERVE_FLAGS for spelling in flag.spellings()}
    for text in REMOVED.values():
        assert {*re.findall(r"--[a-z0-9-]+", text)} <= known
    assert refused(LLAMA_ARG_DRAFT_MAX="16").startswith("LLAMA_ARG_DRAFT_MAX is not supported: ")


def test_no_flag_without_effect_is_offered() -> None:
    """``--contex-shift`` is near one, which would only be taken and do nothing."""
    for name in WITHOUT_USE:
        if name.startswith("--"):
            offered = re.search(r"did you mean (\S+)\?", refused(f"{name}x"))
            assert offered is None or offered[1] not in WITHOUT_USE, name


@pytest.mark.parametrize("name", sorted(WITHOUT_USE.keys() - REJECTED.keys()))
def test_every_ignored_flag_takes_as_many_values_as_in_llama_server(name: str) -> None:
    values = ["1"] * WITHOUT_USE[name]
    settings = serve(name, *values, "-c", "7")
    assert settings.model.n_ctx == 7
    assert len(settings.warnings) == (name not in NO_OP)
    assert all(name in warning for warning in settings.warnings)
    if values:
        assert refused(name, *values[1:]) == f"{name} needs a value"
