from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from pyctl.chat import keep_reasoning
from pyctl.cli.arguments import FLAGS, CommandSettings, parse_chat, parse_serve
from pyctl.llama.settings.draft_settings import MODEL_TYPES
from pyctl.llama.settings.placements import CPU_EXPERTS
from pyctl.mcp import McpServer
from pyctl.settings.setting import SAMPLING, Flag
from tests.unit.cli.given import PRESERVED, SERVE_FLAGS, at, refused, serve

# Per destination whose value is not simply what its flag reads: what is typed, where it ends up,
# and as what.
CONVERTED: dict[str, tuple[str, str, Any]] = {
    "alias": ("qwen, q", "model.alias", ("qwen", "q")),
    "tags": ("x,y", "model.tags", ("x", "y")),
    "n_gpu_layers": ("all", "model.n_gpu_layers", -2),
    "tensor_split": ("3,1", "model.tensor_split", (3.0, 1.0)),
    "mmap": ("", "model.load_mode", "mmap"),
    "mlock": ("", "model.load_mode", "mmap+mlock"),
    "devices": ("CUDA0,CUDA1", "model.devices", ("CUDA0", "CUDA1")),
    "workers": (
        "a.lan:50052,10.0.0.2:1,a.lan:50052",
        "model.workers",
        ("a.lan:50052", "10.0.0.2:1"),
    ),
    "fit": ("off", "model.fit", False),
    "fit_target": ("512,256", "model.fit_target", (512, 256)),
    "metadata": ("a.b=int:-3", "model.metadata", (("a.b", -3),)),
    "n_pooled": ("65536", "pool.n_pooled", 65_536),
    "rope_scale": ("4", "model.rope_freq_scale", 0.25),
    "disk_policy": ("AUTO:8", "disk.disk_policy", "auto:8"),
    "dry_sequence_breakers": (r"a\n\\", "replies.sampling.dry_sequence_breakers", ("a\n\\",)),
    "logit_bias": ("15043-1.5", "replies.sampling.logit_bias", ((15043, -1.5),)),
    "template_kwargs": ('{"a": 1}', "format.template_kwargs", {**PRESERVED, "a": 1}),
    "reasoning": ("off", "format.template_kwargs", {**PRESERVED, "enable_thinking": False}),
    "reasoning_effort": (
        "high",
        "format.template_kwargs",
        {**PRESERVED, "reasoning_effort": "high"},
    ),
    "reasoning_preserve": ("", "format.template_kwargs", PRESERVED),
    "mcp_json": (
        '{"mcpServers": {"a": {"command": "b"}}}',
        "tools.mcp_json",
        (McpServer("a", "b"),),
    ),
    "hosts": ("0.0.0.0,::1", "listen.hosts", ("0.0.0.0", "::1")),
    "preset_path": ("m.ini", "router.preset_path", "m.ini"),
    "api_keys": ("a,b", "server.api_keys", ("a", "b")),
    "slot_save_path": ("/tmp", "server.slot_save_path", Path("/tmp")),
    "media_path": ("/tmp", "server.media_path", "/tmp"),
    "rerank": ("", "model.pooling", "rank"),
    "log_file": ("x.log", "log.log_file", "x.log"),
}

SEVERAL = {
    *(
        "placements",
        "lora",
        "lora_unapplied",
        "samplers",
        "draft_types",
        "draft_placements",
        "grammar",
        "verbosity",
    ),
    *("hf_file", "ssl_key_file", "ssl_cert_file"),  # one needs the other
    *("template_file", "mcp_config", "key_file"),  # need a file
}
"""Destinations of flags that tests below and in test_arguments.py combine."""

PLAIN_FLAGS = [flag for flag in SERVE_FLAGS if flag.dest not in SEVERAL]


def field_of(settings: Any, name: str) -> Any:
    """Return the value of the field ``name``, in whichever of the settings it is."""
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if item.name == name:
            return value
        if dataclasses.is_dataclass(value) and (found := field_of(value, name)) is not None:
            return found
    return None


TEXTS = (
    *("9", "0.5", "2", "q8_0", "off", "yarn", "row", "dio", "isolate", "cls", "none"),
    *("org/m", "/llm", "/", "memory://", "{{ x }}"),
)
"""Values, one of which each plain flag takes."""


def typed(flag: Flag) -> str:
    """Return a text for ``flag`` whose value is not its default."""
    if flag.dest in CONVERTED:
        return CONVERTED[flag.dest][0]
    for text in TEXTS:
        with contextlib.suppress(ValueError):
            if flag.convert is not None and str(flag.convert(text)) != flag.default:
                return text
    return ""


def takes(settings: CommandSettings, flag: Flag) -> bool:
    """Return whether ``settings`` hold the value typed for ``flag``."""
    if flag.dest in CONVERTED:
        _, path, value = CONVERTED[flag.dest]
        return bool(at(settings, path) == value)
    return bool(
        field_of(settings, flag.dest) == (flag.convert(typed(flag)) if flag.convert else True)
    )


@pytest.mark.parametrize("flag", PLAIN_FLAGS, ids=lambda flag: flag.dest)
def test_every_spelling_sets_its_value(flag: Flag) -> None:
    text = typed(flag)
    for name in flag.names.split():
        # After its negation, for a switch that is on by default.
        assert takes(
            serve(name, text) if flag.convert else serve(*flag.off.split()[:1], name), flag
        )
        if flag.convert and name.startswith("--"):
            assert takes(serve(f"{name.replace('-', '_').replace('__', '--', 1)}={text}"), flag)


@pytest.mark.parametrize(
    "flag", [flag for flag in PLAIN_FLAGS if flag.env], ids=lambda flag: flag.dest
)
def test_every_variable_sets_its_value_and_a_flag_wins_over_it(flag: Flag) -> None:
    text = typed(flag)
    if flag.dest not in ("path", "hf_repo", "model_url"):
        settings = parse_serve(["-m", "m"], {flag.env: text or "on"})
        assert takes(settings, flag)
        assert not any(flag.env in warning for warning in settings.warnings), (
            "a variable without effect"
        )
    else:
        assert takes(parse_serve([], {flag.env: text}), flag)
    name = flag.names.split()[0]
    poison = "off" if flag.convert is None else "not a value at all"
    argv = ["-m", "m", name, text] if flag.convert else ["-m", "m", name]
    assert takes(parse_serve(argv, {flag.env: poison}), flag)


def is_default_of_help(flag: Flag, value: Any) -> bool:
    """Return whether ``value`` is the default that --help shows for ``flag``; also where that text
    cannot be read as one.
    """
    if flag.convert is None:
        return flag.default == ("on" if value else "off")
    try:
        return bool(flag.convert(flag.default) == value)
    except ValueError:  # such as "half of the RAM"; a text with figures names the value
        return str(value) in flag.default or not re.search(r"\d", flag.default)


DERIVED = {
    "n_seqs",  # serve and chat have their own
    "n_ubatch",  # the device decides
    *(
        "mmap",
        "mlock",
        "rerank",
        "reasoning",
        "reasoning_effort",
        "reasoning_preserve",
    ),  # become other settings
    *("kv_cache", "lora_unapplied"),
    "ram_mib",  # the free memory decides
    *("cache_dir", "mmproj_device"),  # the environment, and the model's devices
}
"""Destinations whose value --help cannot show as the setting has it."""


@pytest.mark.parametrize(
    "flag",
    [flag for flag in SERVE_FLAGS if flag.default and flag.dest not in DERIVED],
    ids=lambda flag: flag.dest,
)
def test_the_help_shows_the_default_of_who_gives_no_flag(flag: Flag) -> None:
    value = field_of(serve(), flag.dest)
    assert value is None or is_default_of_help(flag, value), (
        f"--help shows {flag.default!r}, it is {value!r}"
    )


@pytest.mark.parametrize(
    "flag", [flag for flag in SERVE_FLAGS if flag.off], ids=lambda flag: flag.dest
)
def test_every_negation_by_flag_and_by_variable(flag: Flag) -> None:
    """Each flag that has a negation is turned off by every spelling, by each false word in its
    variable, and by the variable with `NO_`, as llama-server accepts them.
    """
    path, value = {
        "mmap": ("model.load_mode", "none"),
        "reasoning_preserve": ("format.template_kwargs", keep_reasoning(False)),
    }.get(flag.dest, ("", False))

    def found(settings: CommandSettings) -> Any:
        return at(settings, path) if path else field_of(settings, flag.dest)

    for name in flag.off.split():
        assert found(serve(name)) == value
    if not flag.env:
        return
    for word in ("0", "off", "false", "disabled"):
        assert found(serve(**{flag.env: word})) == value
    if flag.env.startswith("LLAMA_ARG_"):
        assert (
            found(serve(**{flag.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_"): "whatever"})) == value
        )


@pytest.mark.parametrize("flag", FLAGS[SAMPLING], ids=lambda flag: flag.names.split()[0])
def test_every_flag_of_sampling_reaches_a_server_elsewhere(flag: Flag, tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"type": "null"}')
    name = flag.names.split()[0]
    text = {"-j": "{}", "--samplers": "top_k", "--sampler-seq": "ki", "-l": "15+1"}.get(
        name, typed(flag) or str(tmp_path / "file")
    )
    fields = parse_chat(["--url", "h", name, *([text] if flag.convert else [])], {}).request_fields
    other = {"-n": "max_tokens", "-j": "json_schema", "-jf": "json_schema"}
    assert list(fields) == [other.get(name, flag.dest)]


def test_types_of_drafts_add_up_in_their_order() -> None:
    settings = serve(
        "--spec-type",
        "draft-mtp,ngram-mod",
        "--spec-type",
        "cache",
        "--spec-type",
        "none,draft-simple",
    )
    assert settings.drafts.ordered_types == ("ngram-mod", "cache", "draft-mtp")
    for name in MODEL_TYPES:
        assert serve("--spec-type", name, "-md", "f").drafts.reads_rows == (name != "draft-simple")
    assert serve("--spec-default").drafts.ordered_types == ("ngram-mod",)
    assert serve("--spec-default", LLAMA_ARG_SPEC_TYPE="draft-mtp").drafts.ordered_types == (
        "ngram-mod",
    )


def test_where_tensors_of_a_draft_model_go() -> None:
    settings = serve("-otd", "attn=CPU", "-cmoed", "--spec-draft-ncmoe", "1").drafts
    assert settings.draft_placements == (
        ("attn", "CPU"),
        (CPU_EXPERTS, "CPU"),
        (rf"blk\.0{CPU_EXPERTS}", "CPU"),
    )
    assert serve(LLAMA_ARG_SPEC_DRAFT_CPU_MOE="1").drafts.draft_placements == (
        (CPU_EXPERTS, "CPU"),
    )


def test_the_last_of_several_wins() -> None:
    assert serve("-c", "1", "--ctx-size", "2").model.n_ctx == 2
    assert serve("--no-cache-prompt", "--cache-prompt").replies.cache_prompt


def test_flags_that_add_up() -> None:
    settings = serve("-l", "1+2", "--logit-bias", "3-inf", "--dry-sequence-breaker", "none")
    assert settings.replies.sampling.logit_bias == ((1, 2.0), (3, -float("inf")))
    assert settings.replies.sampling.dry_sequence_breakers == ()
    assert serve("--api-key", "a", "--api-key", "b", LLAMA_API_KEY="c").server.api_keys == (
        "a",
        "b",
    )


def test_flash_attention_words_and_the_older_bare_flag() -> None:
    assert serve("-fa", "-c", "8").model == dataclasses.replace(serve("-fa", "on").model, n_ctx=8)
    assert serve("-fa").model.flash_attn == "on"
    assert serve("-fa", "0").model.flash_attn == "off"
    assert serve("--flash-attn=auto").model.flash_attn == "auto"
    assert serve(LLAMA_ARG_FLASH_ATTN="-1").model.flash_attn == "auto"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--foo"], "unknown flag --foo"),
        (["--ctx", "8"], "unknown flag --ctx; did you mean --ctx-size?"),
        (["--ctxsize", "8"], "unknown flag --ctxsize; did you mean --ctx-size?"),
        (
            ["--prefix-cache-slot=4"],
            "unknown flag --prefix-cache-slot; did you mean --prefix-cache-slots?",
        ),
        (["stray"], "unexpected argument 'stray'"),
        (["a/b.gguf"], "unexpected argument 'a/b.gguf'; did you mean -m a/b.gguf?"),
        (["--"], "unexpected argument '--'"),
        (["-c"], "-c needs a value"),
        (["-c", "-5"], "-c: -5 is below the minimum of 0"),
        (["-c", "4g"], "-c: '4g' is not a whole number"),
        (["-c", "99999999999"], "-c: 99999999999 is above the maximum of 2147483647"),
        (["--metrics=1"], "--metrics takes no value"),
        (["-b", "0"], "-b: 0 is below the minimum of 1"),
        (["-ub", "-1"], "-ub: -1 is below the minimum of 1"),
        (["-np", "0"], "-np: 0 is below the minimum of 1"),
        (["--port", "65536"], "--port: 65536 is above the maximum of 65535"),
        (["--port", "-1"], "--port: -1 is below the minimum of 0"),
        (["--host", " , "], "--host: ' , ' is not an address"),
        (["--api-key", ""], "--api-key: no key given"),
        (["--api-key", " "], "--api-key: no key given"),
        (["--api-key", ","], "--api-key: no key given"),
        (["-ngl", "most"], "-ngl: 'most' is not a whole number or auto or all"),
        (
            ["-ctk", "q9"],
            "-ctk: 'q9' is not one of f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1",
        ),
        (["--spec-type", "foo"], "--spec-type: unknown speculative type: foo"),
        (
            ["--spec-type", "ngram-cache"],
            "--spec-type: ngram-cache is not supported; use one of ngram-simple,",
        ),
        (["--spec-draft-n-max", "-1"], "--spec-draft-n-max: -1 is below the minimum of 0"),
        (["-fa", "maybe"], "-fa: 'maybe' is not one of on, off, auto"),
        (
            ["-fa", "off", "-ctv", "q8_0"],
            "--cache-type-v q8_0 needs flash attention, which --flash-attn off forbids",
        ),
        (
            ["-fa", "off", "-ctv", "iq4_nl"],
            "--cache-type-v iq4_nl needs flash attention, which --flash-attn off forbids",
        ),
        (
            ["--rope-scale", "2", "--rope-freq-scale", "2"],
            "--rope-freq-scale and --rope-scale exclude each other",
        ),
        (["--rope-scale", "0"], "--rope-scale: 0.0 is below the minimum of 1e-09"),
        (["-lm", "mmap", "--no-mmap"], "-lm and --no-mmap exclude each other"),
        (["-ts", "0,0"], "-ts: at least one proportion must be above 0"),
        (["-ts", "1,x"], "-ts: 'x' is not a number"),
        (["--cache-ram", "-2"], "--cache-ram: -2 is below the minimum of -1"),
        (["--prefix-cache-slots", "-1"], "--prefix-cache-slots: -1 is below the minimum of 0"),
        (["--kv-cache-budget", "-1"], "--kv-cache-budget: -1 is below the minimum of 0"),
        (["--kv-cache-dir", "/dev/null"], "--kv-cache-dir: '/dev/null' is not a directory"),
        (
            ["--kv-cache-dir", "~no-such-user/x"],
            "--kv-cache-dir: '~no-such-user/x' names a home that",
        ),
        (
            ["--kv-cache-dir", "kv", "-cram", "0"],
            "--kv-cache-dir needs the prefix cache, which --cache-ram 0 turns off",
        ),
        (
            ["--disk-prefix-cache", "400"],
            "--disk-prefix-cache 400 is below --kv-cache-min-tokens 512: nothing would be written",
        ),
        (
            ["--disk-prefix-cache", "core"],
            "--disk-prefix-cache: 'core' must be one of off, full, auto, auto:N, N, with N from 1 "
            "to 1000000, spill, "
            "or one of them and ,spill",
        ),
        (["--temp", "hot"], "--temp: 'hot' is not a number"),
        (["--temp", "nan"], "--temp: 'nan' is not a finite number"),
        (["--top-k", "1.5"], "--top-k: '1.5' is not a whole number"),
        (["--repeat-penalty", "0"], "repeat_penalty must be greater than 0"),
        (["--mirostat", "3"], "--mirostat: 3 is above the maximum of 2"),
        (
            ["--samplers", "top_k;beam"],
            "unknown sampler 'beam'; known are penalties, dry, top_n_sigma, top_k,",
        ),
        (["--sampler-seq", "kz"], "--sampler-seq: 'z' is not one of the letters edskypmxt"),
        (["-l", "hello+1"], "-l: 'hello+1' is not of the form TOKEN_ID+BIAS or TOKEN_ID-BIAS"),
        (["-s", "4294967296"], "-s: 4294967296 is above the maximum of 4294967295"),
        (["-n", "-2"], "-n: -2 is below the minimum of -1"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs: not JSON: "),
        (["--chat-template-kwargs", "[]"], "--chat-template-kwargs: not a JSON object"),
        (
            ["--chat-template-file", "/no/file"],
            "--chat-template-file: cannot read '/no/file': No such file or directory",
        ),
        (["--api-key-file", "/dev/null"], "--api-key-file: no key in '/dev/null'"),
        (["--ssl-key-file", "k"], "--ssl-key-file and --ssl-cert-file must be given together"),
        (
            ["--reasoning-format", "x"],
            "--reasoning-format: 'x' is not one of auto, none, deepseek, deepseek-legacy",
        ),
        (
            ["--chat-template", "llama3"],
            "--chat-template: 'llama3' is not a Jinja template. Of llama.cpp's names only",
        ),
        (
            ["-dr", "ai/x"],
            "-dr is not supported: pyctl fetches models with -hf USER/MODEL:QUANT or --model-url",
        ),
        (
            ["--draft-max", "16"],
            "--draft-max is not supported: llama-server has removed it; use --spec-draft-n-max",
        ),
        (
            ["--draft-min=1"],
            "--draft-min is not supported: llama-server has removed it; use --spec-draft-n-min",
        ),
        (
            ["--gpt-oss-20b-default"],
            (
                "--gpt-oss-20b-default is not supported: name its model: -hf "
                "ggml-org/gpt-oss-20b-GGUF --port 8013"
            ),
        ),
        (["--contxt", "5"], "unknown flag --contxt; did you mean --ctx-size?"),
        (["-ot", "attn"], "-ot: 'attn' is not of the form PATTERN=BUFFER"),
        (["-ot", "(=CPU"], "-ot: '(' is not a regular expression: "),
        (["-ncmoe", "-1"], "-ncmoe: -1 is below the minimum of 0"),
        (
            ["--override-kv", "a=u8:1"],
            "--override-kv: 'a=u8:1' is not of the form KEY=TYPE:VALUE with a type of",
        ),
        (["--override-kv", "a=int:x"], "--override-kv: 'x' is not a whole number"),
        (["--override-kv", "a=bool:1"], "--override-kv: '1' is neither true nor false"),
        (["--lora-scaled", "a.gguf"], "--lora-scaled: 'a.gguf' is not of the form FILE:SCALE"),
        (["--fit", "maybe"], "--fit: 'maybe' is neither on nor off"),
        (["-hf", "model"], "-hf: 'model' is not of the form USER/MODEL or USER/MODEL:QUANT"),
        (["-hff", "x.gguf"], "--hf-file needs --hf-repo"),
        (["--path", "/nowhere"], "--path: '/nowhere' does not exist"),
        (["--api-prefix", "llm/"], "--api-prefix: 'llm/' is not a path such as /llm"),
        (
            ["--sleep-idle-seconds", "0"],
            "--sleep-idle-seconds: 0 seconds is too short; use -1 for never",
        ),
    ],
)
def test_what_is_refused_is_one_clear_line(argv: list[str], text: str) -> None:
    assert refused(*argv).startswith(text)


def test_a_bad_variable_is_named() -> None:
    assert refused(LLAMA_ARG_CTX_SIZE="many") == "LLAMA_ARG_CTX_SIZE: 'many' is not a whole number"
    assert refused(LLAMA_ARG_ENDPOINT_METRICS="yes").startswith(
        "LLAMA_ARG_ENDPOINT_METRICS: 'yes' is neither on nor off"
    )


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff{")
    assert refused("--chat-template-file", str(tmp_path / "t")).endswith("is not UTF-8 text")
    assert refused("--grammar-file", "~no-such-user/g").endswith("no such user")


@pytest.mark.parametrize(
    ("typed", "n"), [("16k", 16384), ("32K", 32768), ("1m", 2**20), ("16384", 16384)]
)
def test_tokens_are_counted_as_contexts_are_called(typed: str, n: int) -> None:
    settings = serve("-c", typed, "-b", typed, "-n", typed, "--kv-cache-min-tokens", typed)
    found = (
        settings.model.n_ctx,
        settings.model.n_batch,
        settings.disk.min_tokens,
        settings.request_fields["max_tokens"],
    )
    assert found == (n,) * 4
    assert serve(LLAMA_ARG_CTX_SIZE=typed).model.n_ctx == n
