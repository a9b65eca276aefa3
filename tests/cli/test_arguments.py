from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.persist import DiskPolicy
from pyctl.chat.template import keep_reasoning
from pyctl.cli import flag_table
from pyctl.cli.arguments import parse_chat, parse_serve
from pyctl.cli.flag_table import IGNORED, NO_OP, REJECTED, SPECULATIVE
from pyctl.cli.flags import Flag
from pyctl.cli.settings import (
    CacheSettings,
    ChatSettings,
    DiskSettings,
    FormatSettings,
    LogSettings,
    SamplingDefaults,
    ServerSettings,
    ServeSettings,
    TerminalSettings,
)
from pyctl.engine.llama.model_settings import ModelSettings
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import ConfigError, RequestError
from pyctl.models import HubSettings

CONTRACT = Path(__file__).resolve().parents[2] / "vendor/llama.cpp/tools/server/README.md"
WITHOUT_USE = {**NO_OP, **SPECULATIVE, **IGNORED, **REJECTED}

SERVE_FLAGS = (
    *flag_table.MODEL,
    *flag_table.HUB,
    *flag_table.CONTEXT,
    *flag_table.CACHE,
    *flag_table.DISK,
    *flag_table.SAMPLING,
    *flag_table.FORMAT,
    *flag_table.SERVER,
    *flag_table.LOG,
)

PRESERVED = keep_reasoning(True)

# Per destination: what is typed, where it ends up, and as what.
ROUND_TRIPS: dict[str, tuple[str, str, Any]] = {
    "path": ("other.gguf", "model.path", "other.gguf"),
    "alias": ("qwen, q", "model.alias", ("qwen", "q")),
    "n_gpu_layers": ("all", "model.n_gpu_layers", -2),
    "split_mode": ("row", "model.split_mode", "row"),
    "tensor_split": ("3,1", "model.tensor_split", (3.0, 1.0)),
    "main_gpu": ("1", "model.main_gpu", 1),
    "load_mode": ("dio", "model.load_mode", "dio"),
    "mmap": ("", "model.load_mode", "mmap"),
    "mlock": ("", "model.load_mode", "mmap+mlock"),
    "lazy_mode": ("off", "model.lazy_mode", "off"),
    "devices": ("CUDA0,CUDA1", "model.devices", ("CUDA0", "CUDA1")),
    "placements": ("", "", None),  # four flags, below
    "fit": ("off", "model.fit", False),
    "fit_target": ("512,256", "model.fit_target", (512, 256)),
    "fit_ctx": ("8192", "model.fit_ctx", 8192),
    "metadata": ("a.b=int:-3", "model.metadata", (("a.b", -3),)),
    "check_tensors": ("", "model.check_tensors", True),
    "repack": ("", "model.repack", True),
    "no_host": ("", "model.no_host", True),
    "numa": ("isolate", "model.numa", "isolate"),
    "lora": ("", "", None),  # two flags, below
    "lora_unapplied": ("", "", None),
    "hf_repo": ("org/m-GGUF:Q8_0", "hub.hf_repo", "org/m-GGUF:Q8_0"),
    "hf_file": ("", "", None),  # needs a repository, below
    "hf_token": ("hf_x", "hub.hf_token", "hf_x"),
    "model_url": ("http://h/m.gguf", "hub.model_url", "http://h/m.gguf"),
    "offline": ("", "hub.offline", True),
    "n_ctx": ("4096", "model.n_ctx", 4096),
    "n_seqs": ("4", "model.n_seqs", 4),
    "n_batch": ("1024", "model.n_batch", 1024),
    "n_ubatch": ("256", "model.n_ubatch", 256),
    "n_threads": ("6", "model.n_threads", 6),
    "n_threads_batch": ("12", "model.n_threads_batch", 12),
    "flash_attn": ("on", "model.flash_attn", "on"),
    "type_k": ("q8_0", "model.type_k", "q8_0"),
    "type_v": ("iq4_nl", "model.type_v", "iq4_nl"),
    "offload_kqv": ("", "model.offload_kqv", True),
    "op_offload": ("", "model.op_offload", True),
    "swa_full": ("", "model.swa_full", True),
    "n_ctx_per_seq": ("2048", "model.n_ctx", 2048),
    "rope_scaling": ("yarn", "model.rope_scaling", "yarn"),
    "rope_scale": ("4", "model.rope_freq_scale", 0.25),
    "rope_freq_base": ("1e6", "model.rope_freq_base", 1e6),
    "rope_freq_scale": ("0.5", "model.rope_freq_scale", 0.5),
    "yarn_orig_ctx": ("32768", "model.yarn_orig_ctx", 32768),
    "yarn_ext_factor": ("0.5", "model.yarn_ext_factor", 0.5),
    "yarn_attn_factor": ("1.5", "model.yarn_attn_factor", 1.5),
    "yarn_beta_slow": ("2", "model.yarn_beta_slow", 2.0),
    "yarn_beta_fast": ("16", "model.yarn_beta_fast", 16.0),
    "n_slots": ("0", "cache.n_slots", 0),
    "ram_mib": ("-1", "cache.ram_mib", -1),
    "cache_prompt": ("", "cache.cache_prompt", True),
    "checkpoint_min_step": ("0", "cache.checkpoint_min_step", 0),
    "exact": ("", "cache.exact", True),
    "cache_dir": ("/var/cache/kv", "disk.cache_dir", "/var/cache/kv"),
    "disk_mib": ("100", "disk.disk_mib", 100),
    "min_tokens": ("0", "disk.min_tokens", 0),
    "cold_max": ("0", "disk.cold_max", 0),
    "disk_policy": ("AUTO:8", "disk.disk_policy", "auto:8"),
    "daily_mib": ("20000", "disk.daily_mib", 20000),
    "n_predict": ("64", "sampling.n_predict", 64),
    "seed": ("42", "sampling.sampling.seed", 42),
    "samplers": ("", "", None),  # two flags, below
    "ignore_eos": ("", "sampling.sampling.ignore_eos", True),
    "temperature": ("0.6", "sampling.sampling.temperature", 0.6),
    "dynatemp_range": ("0.2", "sampling.sampling.dynatemp_range", 0.2),
    "dynatemp_exponent": ("2", "sampling.sampling.dynatemp_exponent", 2.0),
    "top_k": ("20", "sampling.sampling.top_k", 20),
    "top_p": ("0.8", "sampling.sampling.top_p", 0.8),
    "min_p": ("0", "sampling.sampling.min_p", 0.0),
    "top_n_sigma": ("1.5", "sampling.sampling.top_n_sigma", 1.5),
    "typical_p": ("0.9", "sampling.sampling.typical_p", 0.9),
    "xtc_probability": ("0.5", "sampling.sampling.xtc_probability", 0.5),
    "xtc_threshold": ("0.2", "sampling.sampling.xtc_threshold", 0.2),
    "repeat_last_n": ("128", "sampling.sampling.repeat_last_n", 128),
    "repeat_penalty": ("1.1", "sampling.sampling.repeat_penalty", 1.1),
    "presence_penalty": ("1.5", "sampling.sampling.presence_penalty", 1.5),
    "frequency_penalty": ("-0.5", "sampling.sampling.frequency_penalty", -0.5),
    "dry_multiplier": ("0.8", "sampling.sampling.dry_multiplier", 0.8),
    "dry_base": ("2", "sampling.sampling.dry_base", 2.0),
    "dry_allowed_length": ("3", "sampling.sampling.dry_allowed_length", 3),
    "dry_penalty_last_n": ("0", "sampling.sampling.dry_penalty_last_n", 0),
    "dry_sequence_breakers": (r"a\n\\", "sampling.sampling.dry_sequence_breakers", ("a\n\\",)),
    "mirostat": ("2", "sampling.sampling.mirostat", 2),
    "mirostat_eta": ("0.2", "sampling.sampling.mirostat_eta", 0.2),
    "mirostat_tau": ("4", "sampling.sampling.mirostat_tau", 4.0),
    "adaptive_target": ("0.5", "sampling.sampling.adaptive_target", 0.5),
    "adaptive_decay": ("0.8", "sampling.sampling.adaptive_decay", 0.8),
    "logit_bias": ("15043-1.5", "sampling.sampling.logit_bias", ((15043, -1.5),)),
    "grammar": ("", "", None),  # four flags, below
    "chat_template": ("{{ messages }}", "format.chat_template", "{{ messages }}"),
    "template_file": ("", "", None),  # needs a file, below
    "template_kwargs": ('{"a": 1}', "format.template_kwargs", {**PRESERVED, "a": 1}),
    "reasoning": ("off", "format.template_kwargs", {**PRESERVED, "enable_thinking": False}),
    "reasoning_format": ("deepseek", "format.reasoning_format", "deepseek"),
    "prompt_replay": ("full", "format.prompt_replay", "full"),
    "reasoning_effort": ("high", "format.template_kwargs", {**PRESERVED, "reasoning_effort": "high"}),
    "reasoning_preserve": ("", "format.template_kwargs", PRESERVED),
    "reasoning_budget": ("64", "format.reasoning_budget", 64),
    "reasoning_budget_message": ("Enough.", "format.reasoning_budget_message", "Enough."),
    "jinja": ("", "warnings", ()),
    "host": ("0.0.0.0", "server.host", "0.0.0.0"),
    "port": ("0", "server.port", 0),
    "api_keys": ("a,b", "server.api_keys", ("a", "b")),
    "key_file": ("", "", None),  # needs a file, below
    "ssl_key_file": ("", "", None),  # one needs the other, below
    "ssl_cert_file": ("", "", None),
    "sse_ping_interval": ("-1", "server.sse_ping_interval", -1),
    "metrics": ("", "server.metrics", True),
    "props": ("", "server.props", True),
    "slots": ("", "server.slots", True),
    "slot_save_path": ("/tmp", "server.slot_save_path", "/tmp"),
    "api_prefix": ("/llm", "server.api_prefix", "/llm"),
    "cors_origins": ("localhost", "server.cors_origins", "localhost"),
    "cors_methods": ("GET", "server.cors_methods", "GET"),
    "cors_headers": ("x-a", "server.cors_headers", "x-a"),
    "cors_credentials": ("", "server.cors_credentials", True),
    "sleep_idle_seconds": ("60", "server.sleep_idle_seconds", 60),
    "embeddings": ("", "model.embeddings", True),
    "pooling": ("mean", "model.pooling", "mean"),
    "embd_normalize": ("-1", "server.embd_normalize", -1),
    "spm_infill": ("", "server.spm_infill", True),
    "verbosity": ("", "", None),  # three flags, below
    "log_file": ("x.log", "log.log_file", "x.log"),
    "timestamps": ("", "log.timestamps", True),
}
PLAIN_FLAGS = [flag for flag in SERVE_FLAGS if ROUND_TRIPS[flag.dest][1]]


def serve(*argv: str, **environ: str) -> ServeSettings:
    return parse_serve(["-m", "model.gguf", *argv], environ)


def chat(*argv: str, **environ: str) -> ChatSettings:
    return parse_chat(["-m", "model.gguf", *argv], environ)


def at(settings: object, path: str) -> Any:
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        serve(*argv, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("flag", PLAIN_FLAGS, ids=lambda flag: flag.dest)
def test_every_spelling_sets_its_value(flag: Flag) -> None:
    text, path, value = ROUND_TRIPS[flag.dest]
    for name in flag.names.split():
        settings = serve(name, text) if flag.convert else serve(name)
        assert at(settings, path) == value
        if flag.convert and name.startswith("--"):
            assert at(serve(f"{name.replace('-', '_').replace('__', '--', 1)}={text}"), path) == value


@pytest.mark.parametrize("flag", [flag for flag in PLAIN_FLAGS if flag.env], ids=lambda flag: flag.dest)
def test_every_variable_sets_its_value_and_a_flag_wins_over_it(flag: Flag) -> None:
    text, path, value = ROUND_TRIPS[flag.dest]
    if flag.dest not in ("path", "hf_repo", "model_url"):
        assert at(parse_serve(["-m", "m"], {flag.env: text or "on"}), path) == value
    else:
        assert at(parse_serve([], {flag.env: text}), path) == value
    name = flag.names.split()[0]
    poison = "off" if flag.convert is None else "not a value at all"
    argv = ["-m", "m", name, text] if flag.convert else ["-m", "m", name]
    assert at(parse_serve(argv, {flag.env: poison}), path) == value


@pytest.mark.parametrize("flag", [flag for flag in SERVE_FLAGS if flag.off], ids=lambda flag: flag.dest)
def test_every_negation_by_flag_and_by_variable(flag: Flag) -> None:
    path = {"mmap": "model.load_mode", "jinja": "warnings"}.get(flag.dest, ROUND_TRIPS[flag.dest][1])
    value = {
        "mmap": "none",
        "jinja": ("--no-jinja has no effect here",),
        "reasoning_preserve": keep_reasoning(False),
    }.get(flag.dest, False)
    for name in flag.off.split():
        assert at(serve(name), path) == value
    if not flag.env:
        return
    for word in ("0", "off", "false", "disabled"):
        assert at(serve(**{flag.env: word}), path) == value
    if flag.env.startswith("LLAMA_ARG_"):
        assert at(serve(**{flag.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_"): "whatever"}), path) == value


def test_defaults_are_those_of_llama_server() -> None:
    settings = parse_serve(["-m", "model.gguf"], {})
    assert settings.model == ModelSettings(path="model.gguf")
    assert settings.cache == CacheSettings(n_slots=32, ram_mib=8192, checkpoint_min_step=8192)
    assert settings.disk == DiskSettings("", 4096, 512, 10240, "auto:30", 0)
    assert settings.sampling == SamplingDefaults(Sampling(), -1, frozenset())
    assert settings.format == FormatSettings(template_kwargs=PRESERVED)
    assert settings.server == ServerSettings(host="127.0.0.1", port=8080)
    assert settings.log == LogSettings(3)
    assert settings.hub == HubSettings()
    assert settings.action == "run"
    assert settings.warnings == ()


def test_every_field_has_a_flag_and_every_flag_a_field() -> None:
    parts = (ModelSettings, HubSettings, CacheSettings, DiskSettings, FormatSettings, ServerSettings, LogSettings)
    names = {item.name for part in (*parts, TerminalSettings, Sampling) for item in dataclasses.fields(part)}
    dests = {flag.dest for flag in (*SERVE_FLAGS, *flag_table.TERMINAL)}
    of_requests = {"min_keep", "grammar_lazy", "grammar_triggers", "grammar_prefill", "post_sampling_probs"}
    assert names - dests == of_requests
    assert dests - names == {
        "mmap",
        "mlock",
        "lora_unapplied",
        "n_ctx_per_seq",
        "rope_scale",
        "n_predict",
        "template_file",
        "reasoning",
        "reasoning_effort",
        "reasoning_preserve",
        "jinja",
        "key_file",
    }
    spellings = [name for flag in (*SERVE_FLAGS, *flag_table.GENERAL) for name in flag.spellings()]
    assert len(spellings) == len(set(spellings))
    assert not set(spellings) & WITHOUT_USE.keys()
    assert sum(map(len, (NO_OP, SPECULATIVE, IGNORED, REJECTED))) == len(WITHOUT_USE)


def test_the_last_of_several_wins() -> None:
    assert serve("-c", "1", "--ctx-size", "2").model.n_ctx == 2
    assert serve("--no-cache-prompt", "--cache-prompt").cache.cache_prompt


def test_flags_that_add_up() -> None:
    settings = serve("-l", "1+2", "--logit-bias", "3-inf", "--dry-sequence-breaker", "none")
    assert settings.sampling.sampling.logit_bias == ((1, 2.0), (3, -float("inf")))
    assert settings.sampling.sampling.dry_sequence_breakers == ()
    assert serve("--api-key", "a", "--api-key", "b", LLAMA_API_KEY="c").server.api_keys == ("a", "b")


@pytest.mark.parametrize("text", ["top_k;top_p;temperature", "top-k;nucleus;temp", "TopK; topp ;temperature;"])
def test_sampler_names(text: str) -> None:
    assert serve("--samplers", text).sampling.sampling.samplers == ("top_k", "top_p", "temperature")


def test_sampler_letters() -> None:
    assert serve("--sampling-seq", "kpt").sampling.sampling.samplers == ("top_k", "top_p", "temperature")
    assert serve("--sampler-seq", "edskypmxt").sampling.sampling == Sampling()


def test_flags_know_every_sampler_that_a_request_may_name() -> None:
    assert serve("--sampling-seq", "kia").sampling.sampling.samplers == ("top_k", "infill", "adaptive_p")
    assert serve("--samplers", "adaptive-p").sampling.sampling.samplers == ("adaptive_p",)


@pytest.mark.parametrize(
    ("argv", "value"),
    [(["auto"], -1), (["99"], 99), (["0"], 0), (["-1"], -1)],
)
def test_gpu_layers(argv: list[str], value: int) -> None:
    assert serve("-ngl", *argv).model.n_gpu_layers == value


def test_flash_attention_words_and_the_older_bare_flag() -> None:
    assert serve("-fa", "-c", "8").model == dataclasses.replace(serve("-fa", "on").model, n_ctx=8)
    assert serve("-fa").model.flash_attn == "on"
    assert serve("-fa", "0").model.flash_attn == "off"
    assert serve("--flash-attn=auto").model.flash_attn == "auto"
    assert serve(LLAMA_ARG_FLASH_ATTN="-1").model.flash_attn == "auto"


def test_load_mode_from_older_flags() -> None:
    assert serve("--no-mmap", "--mlock").model.load_mode == "mlock"
    assert serve("--no-mmap", LLAMA_ARG_LOAD_MODE="dio").model.load_mode == "none"
    assert serve("-lm", "dio", LLAMA_ARG_MLOCK="1").model.load_mode == "dio"
    assert serve(LLAMA_ARG_MLOCK="1").model.load_mode == "mmap+mlock"
    assert serve(LLAMA_ARG_NO_MMAP="").model.load_mode == "none"


def test_seed_of_minus_one_is_random() -> None:
    assert serve("-s", "-1").sampling.sampling.seed == RANDOM_SEED


def test_negative_temperature_is_greedy() -> None:
    assert serve("--temp", "-1").sampling.sampling.temperature == 0.0


def test_verbosity() -> None:
    assert serve("-v").log.verbosity == 5
    assert serve("--log-disable").log.verbosity == -1
    assert serve("-lv", "1").log.verbosity == 1
    assert serve(LLAMA_ARG_LOG_VERBOSITY="2").log.verbosity == 2
    assert serve("-v", LLAMA_ARG_LOG_VERBOSITY="2").log.verbosity == 5


def test_parallel_auto_is_one() -> None:
    assert serve("-np", "-1").model.n_seqs == 1


def test_values_from_files(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ ü }}", encoding="utf-8")
    (tmp_path / "keys").write_text("# comment\nkey1\r\n\nkey 2\n")
    (tmp_path / "grammar").write_text('root ::= "a"')
    assert serve("--chat-template-file", str(tmp_path / "template")).format.chat_template == "{{ ü }}"
    assert serve("--api-key", "k", "--api-key-file", str(tmp_path / "keys")).server.api_keys == ("k", "key1", "key 2")
    assert serve("--grammar-file", str(tmp_path / "grammar")).sampling.sampling.grammar == 'root ::= "a"'
    (tmp_path / "schema").write_text('{"type": "boolean"}')
    for flags in (["-jf", str(tmp_path / "schema")], ["--json-schema", '{"type": "boolean"}']):
        assert '"true" | "false"' in serve(*flags).sampling.sampling.grammar
    assert "unknown type" in refused("-j", '{"type": "wizard"}')
    assert "not a JSON schema" in refused("-j", "{")
    assert serve("--grammar", "root ::= [a-z]").sampling.sampling.grammar == "root ::= [a-z]"
    settings = serve("--chat-template", "{{ x }}", LLAMA_ARG_CHAT_TEMPLATE_FILE=str(tmp_path / "template"))
    assert settings.format.chat_template == "{{ x }}"


def test_reasoning_joins_the_template_values() -> None:
    settings = serve("--reasoning", "on", "--chat-template-kwargs", '{"effort": "low"}')
    assert settings.format.template_kwargs == {**PRESERVED, "effort": "low", "enable_thinking": True}
    assert serve("--reasoning", "auto").format.template_kwargs == PRESERVED
    forgetting = keep_reasoning(False)
    assert serve("--chat-template-kwargs", '{"preserve_reasoning": false}').format.template_kwargs == forgetting


@pytest.mark.parametrize(
    "text",
    [
        *("off", "None", "disabled", "FULL", "full-prefix", "auto", "auto:1", "auto:1000000", "1", "1000000", "0900"),
        *("", "core", "task", "auto:0", "auto:-1", "auto:", "auto:x", "auto: 3", "auto:1000001", "auto:auto:3"),
        *("0", "-5", "+5", "1.5", "1000001", "99999999999", "off:3", "full:1", " off", "٣", "auto:٣"),
    ],
)
def test_the_flag_takes_the_policies_that_a_request_takes(text: str) -> None:
    try:
        policy = DiskPolicy.parse(text)
    except RequestError:
        assert refused("--disk-prefix-cache", text, "--kv-cache-min-tokens", "0")
    else:
        settings = serve("--disk-prefix-cache", text, "--kv-cache-min-tokens", "0")
        assert DiskPolicy.parse(settings.disk.disk_policy) == policy


def test_flags_of_the_disk_without_a_directory() -> None:
    assert serve("--disk-prefix-cache", "full", "--kv-cache-budget", "9", PYCTL_KV_CACHE_COLD_MAX="5").warnings == (
        "--disk-prefix-cache has no effect without --kv-cache-dir",
        "--kv-cache-budget has no effect without --kv-cache-dir",
    )
    assert serve("--disk-prefix-cache", "full", "--kv-cache-dir", "kv").warnings == ()
    assert serve("--kv-cache-dir", "~/kv").disk.cache_dir == str(Path.home() / "kv")


def test_tls_files() -> None:
    server = serve("--ssl-key-file", "k", "--ssl-cert-file", "c").server
    assert (server.ssl_key_file, server.ssl_cert_file) == ("k", "c")


COPIED = [
    (
        "-m qwen.gguf -c 65536 -ngl 99 -fa on --jinja --host 0.0.0.0 --port 8001 -ctk q8_0 -ctv q8_0"
        " --temp 0.6 --top-p 0.95 --top-k 20 --min-p 0 --presence-penalty 1.5 --no-context-shift",
        (),
    ),
    (
        "--model q.gguf --threads -1 --ctx-size 16384 --n-gpu-layers 99 -ot .ffn_.*_exps.=CPU --seed 3407 --prio 2"
        " --temp 1.0 --min-p 0.0 --top-p 0.95 --top-k 40 --repeat-penalty 1.0",
        ("without effect here: --prio",),
    ),
    (
        "-m a.gguf -a qwen3 -np 2 -cb -kvu --metrics --slots --no-webui --cache-ram 16384 -ctxcp 16 --cache-reuse 256"
        ' -sps 0.5 --slot-save-path /tmp --no-warmup -cmoe --chat-template-kwargs {"enable_thinking":false}',
        ("without effect here: -ctxcp, --cache-reuse, -sps",),
    ),
    (
        "-m a.gguf -hf org/model:Q4_K_M --mlock --no-mmap --numa distribute -t 8 -tb 16 -b 4096 -ub 4096 -fa"
        " --control-vector-layer-range 1 2 --poll 50 --log-file x.log -md d.gguf -ngld 99 --draft-max 16"
        " --mmproj-auto --mmproj p.gguf --lora l.gguf --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768",
        (
            "without effect here: --control-vector-layer-range, --poll, --mmproj-auto, --mmproj;"
            " no speculative decoding: -md, -ngld, --draft-max",
            "-hf has no effect beside -m",
        ),
    ),
]


@pytest.mark.parametrize(("line", "warnings"), COPIED)
def test_copied_command_lines_start_with_one_line_about_what_has_no_effect(line: str, warnings: tuple[str]) -> None:
    settings = parse_serve(line.split(), {})
    assert settings.warnings == warnings
    assert settings.model.path.endswith(".gguf")


def contract() -> list[tuple[list[str], bool, str]]:
    """The flags in the documentation of the pinned llama-server: names, whether a value follows, the variable."""
    if not CONTRACT.exists():
        pytest.skip("llama-server's README is not unpacked under vendor/llama.cpp; the build does that")
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


def test_every_flag_of_llama_server_is_known_with_its_values_and_its_variable() -> None:
    used = {name: flag for flag in (*SERVE_FLAGS, *flag_table.GENERAL) for name in flag.spellings()}
    for names, with_value, variable in contract():
        for name in names:
            if name in used:
                assert (used[name].convert is not None) == with_value, name
                assert used[name].env == variable, name
            elif name != "--control-vector-layer-range":
                assert WITHOUT_USE[name] == int(with_value), name


def test_every_other_flag_of_pyctl_is_its_own() -> None:
    documented = {name for names, *_ in contract() for name in names}
    own = {name for flag in SERVE_FLAGS for name in flag.spellings()} - documented
    assert own == {
        *("--prefix-cache-slots", "--exact", "--no-exact", "--kv-cache-dir", "--kv-cache-budget"),
        *("--kv-cache-min-tokens", "--kv-cache-cold-max", "--disk-prefix-cache", "--kv-cache-daily-writes"),
        "--prompt-replay",
        *("--mmap", "--no-mmap", "--mlock"),  # older names, which llama-server still takes
    }
    assert WITHOUT_USE.keys() <= documented


def test_a_copied_environment_starts() -> None:
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
    assert (settings.model.n_ctx, settings.model.n_seqs, settings.model.n_threads) == (4096, 2, -1)
    assert (settings.server.port, settings.server.metrics) == (8081, True)
    assert settings.warnings == (
        "without effect here: LLAMA_ARG_CONT_BATCHING, LLAMA_ARG_NO_SLOTS;"
        " no speculative decoding: LLAMA_ARG_SPEC_TYPE",
    )


@pytest.mark.parametrize("name", sorted(WITHOUT_USE.keys() - REJECTED.keys()))
def test_every_ignored_flag_takes_as_many_values_as_in_llama_server(name: str) -> None:
    values = ["1"] * WITHOUT_USE[name]
    settings = serve(name, *values, "-c", "7")
    assert settings.model.n_ctx == 7
    assert len(settings.warnings) == (name not in NO_OP)
    assert all(name in warning for warning in settings.warnings)
    if values:
        assert refused(name, *values[1:]) == f"{name} needs a value"


def test_placements_keep_their_order_and_their_variables_add_up() -> None:
    experts = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    argv = ["-ot", r"blk\.0\.=CUDA0,attn=CPU", "-cmoe", "--n-cpu-moe", "2", "-ncffn", "1"]
    assert serve(*argv).model.placements == (
        (r"blk\.0\.", "CUDA0"),
        ("attn", "CPU"),
        (experts, "CPU"),
        (r"blk\.0" + experts, "CPU"),
        (r"blk\.1" + experts, "CPU"),
        (r"blk\.0\.ffn_(up|down|gate)\.", "CPU"),
    )
    environ = {"LLAMA_ARG_OVERRIDE_TENSOR": "attn=CPU", "LLAMA_ARG_CPU_MOE": "1", "LLAMA_ARG_N_CPU_MOE": "1"}
    made = parse_serve(["-m", "m"], environ).model.placements
    assert made == (("attn", "CPU"), (experts, "CPU"), (r"blk\.0" + experts, "CPU"))


def test_metadata_of_every_type() -> None:
    text = "a=int:-5,b=float:0.5,c=bool:true,d=str:x:y=z"
    assert serve("--override-kv", text, "--override-kv", "e=bool:false").model.metadata == (
        ("a", -5),
        ("b", 0.5),
        ("c", True),
        ("d", "x:y=z"),
        ("e", False),
    )


def test_adapters() -> None:
    argv = ["--lora", "a.gguf,b.gguf", "--lora-scaled", "c.gguf:0.5"]
    assert serve(*argv).model.lora == (("a.gguf", 1.0), ("b.gguf", 1.0), ("c.gguf", 0.5))
    assert [scale for _, scale in serve(*argv, "--lora-init-without-apply").model.lora] == [0.0] * 3


def test_the_context_of_several_sequences() -> None:
    assert serve("-np", "3", "--kv-unified-per-slot", "1024").model.n_ctx == 3072
    assert serve("-np", "3", "--kv-unified-per-slot", "1024", "-c", "512").model.n_ctx == 512


def test_models_from_the_network() -> None:
    settings = parse_serve(["-hf", "a/b", "-hff", "x.gguf", "--offline"], {"HF_TOKEN": "t"})
    assert settings.hub == HubSettings("a/b", "x.gguf", "t", "", True)
    assert settings.model.path == ""
    assert settings.warnings == ()


def test_questions() -> None:
    assert parse_serve(["--list-devices"], {}).action == "devices"
    assert parse_serve(["-cl"], {}).action == "models"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--foo"], "unknown flag --foo"),
        (["--ctxsize", "8"], "unknown flag --ctxsize; did you mean --ctx-size?"),
        (["--prefix-cache-slot=4"], "unknown flag --prefix-cache-slot; did you mean --prefix-cache-slots?"),
        (["stray"], "unexpected argument 'stray'"),
        (["--"], "unexpected argument '--'"),
        (["-c"], "-c needs a value"),
        (["-c", "-5"], "-c: -5 is too small, the least is 0"),
        (["-c", "4k"], "-c: '4k' is not a whole number"),
        (["-c", "99999999999"], "-c: 99999999999 is too large, the most is 2147483647"),
        (["--metrics=1"], "--metrics takes no value"),
        (["-b", "0"], "-b: 0 is too small, the least is 1"),
        (["-ub", "-1"], "-ub: -1 is too small, the least is 1"),
        (["-np", "0"], "-np: 0 is too small, the least is 1"),
        (["--port", "65536"], "--port: 65536 is too large, the most is 65535"),
        (["--port", "-1"], "--port: -1 is too small, the least is 0"),
        (["--host", "a,b"], "--host: 'a,b' is not one address"),
        (["-ngl", "most"], "-ngl: 'most' is not a whole number or auto or all"),
        (["-ctk", "q9"], "-ctk: 'q9' is none of f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1"),
        (["-fa", "maybe"], "-fa: 'maybe' is none of on, off, auto"),
        (["-fa", "off", "-ctv", "q8_0"], "--cache-type-v q8_0 needs flash attention, which --flash-attn off forbids"),
        (
            ["-fa", "off", "-ctv", "iq4_nl"],
            "--cache-type-v iq4_nl needs flash attention, which --flash-attn off forbids",
        ),
        (["--rope-scale", "2", "--rope-freq-scale", "2"], "--rope-freq-scale and --rope-scale exclude each other"),
        (["--rope-scale", "0"], "--rope-scale: 0.0 is too small, the least is 1e-09"),
        (["-lm", "mmap", "--no-mmap"], "-lm and --no-mmap exclude each other"),
        (["-ts", "0,0"], "-ts: at least one proportion must be above 0"),
        (["-ts", "1,x"], "-ts: 'x' is not a number"),
        (["--cache-ram", "-2"], "--cache-ram: -2 is too small, the least is -1"),
        (["--prefix-cache-slots", "-1"], "--prefix-cache-slots: -1 is too small, the least is 0"),
        (["--kv-cache-budget", "-1"], "--kv-cache-budget: -1 is too small, the least is 0"),
        (["--kv-cache-dir", "/dev/null"], "--kv-cache-dir: '/dev/null' is not a directory"),
        (["--kv-cache-dir", "~nobody-of-this-name/x"], "--kv-cache-dir: '~nobody-of-this-name/x' names a home that"),
        (
            ["--kv-cache-dir", "kv", "-cram", "0"],
            "--kv-cache-dir needs the prefix cache, which --cache-ram 0 turns off",
        ),
        (
            ["--kv-cache-dir", "kv", "--prefix-cache-slots", "0"],
            "--kv-cache-dir needs the prefix cache, which --prefix-cache-slots 0 turns off",
        ),
        (
            ["--disk-prefix-cache", "400"],
            "--disk-prefix-cache 400 is below --kv-cache-min-tokens 512: nothing would ever be written",
        ),
        (
            ["--disk-prefix-cache", "core"],
            "--disk-prefix-cache: 'core' is none of off, full, auto, auto:N, N, with N from 1 to 1000000",
        ),
        (["--temp", "hot"], "--temp: 'hot' is not a number"),
        (["--temp", "nan"], "--temp: 'nan' is not a finite number"),
        (["--top-k", "1.5"], "--top-k: '1.5' is not a whole number"),
        (["--repeat-penalty", "0"], "repeat_penalty must be greater than 0"),
        (["--mirostat", "3"], "--mirostat: 3 is too large, the most is 2"),
        (["--samplers", "top_k;beam"], "unknown sampler 'beam'; known are penalties, dry, top_n_sigma, top_k,"),
        (["--sampler-seq", "kz"], "--sampler-seq: 'z' is none of the letters edskypmxt"),
        (["-l", "hello+1"], "-l: 'hello+1' is not of the form TOKEN_ID+BIAS or TOKEN_ID-BIAS"),
        (["-s", "4294967296"], "-s: 4294967296 is too large, the most is 4294967295"),
        (["-n", "-2"], "-n: -2 is too small, the least is -1"),
        (["--chat-template", "llama3"], "--chat-template: 'llama3' is not a Jinja template;"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs: not JSON: "),
        (["--chat-template-kwargs", "[]"], "--chat-template-kwargs: not a JSON object"),
        (
            ["--chat-template-file", "/no/file"],
            "--chat-template-file: cannot read '/no/file': No such file or directory",
        ),
        (["--api-key-file", "/dev/null"], "--api-key-file: no key in '/dev/null'"),
        (["--ssl-key-file", "k"], "--ssl-key-file and --ssl-cert-file need each other"),
        (["--reasoning-format", "x"], "--reasoning-format: 'x' is none of auto, none, deepseek, deepseek-legacy"),
        (["-dr", "ai/x"], "-dr is for llama-server only: pyctl can neither answer it nor do without"),
        (["-ot", "attn"], "-ot: 'attn' is not of the form PATTERN=BUFFER"),
        (["-ot", "(=CPU"], "-ot: '(' is not a regular expression: "),
        (["-ncmoe", "-1"], "-ncmoe: -1 is too small, the least is 0"),
        (["--override-kv", "a=u8:1"], "--override-kv: 'a=u8:1' is not of the form KEY=TYPE:VALUE with a type of"),
        (["--override-kv", "a=int:x"], "--override-kv: 'x' is not a whole number"),
        (["--override-kv", "a=bool:1"], "--override-kv: '1' is none of true, false"),
        (["--lora-scaled", "a.gguf"], "--lora-scaled: 'a.gguf' is not of the form FILE:SCALE"),
        (["--fit", "maybe"], "--fit: 'maybe' is none of on, off"),
        (["-hf", "model"], "-hf: 'model' is not of the form USER/MODEL or USER/MODEL:QUANT"),
        (["-hff", "x.gguf"], "--hf-file needs --hf-repo"),
        (["--api-prefix", "llm/"], "--api-prefix: 'llm/' is not a path such as /llm"),
        (["--sleep-idle-seconds", "0"], "--sleep-idle-seconds: 0 is neither a time nor -1"),
    ],
)
def test_what_is_refused_is_one_clear_line(argv: list[str], text: str) -> None:
    assert refused(*argv).startswith(text)


def test_a_bad_variable_is_named() -> None:
    assert refused(LLAMA_ARG_CTX_SIZE="many") == "LLAMA_ARG_CTX_SIZE: 'many' is not a whole number"
    assert refused(LLAMA_ARG_ENDPOINT_METRICS="yes").startswith("LLAMA_ARG_ENDPOINT_METRICS: 'yes' is none of")


def test_two_templates_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{{ x }}")
    text = refused("--chat-template", "{{ x }}", "--chat-template-file", str(tmp_path / "t"))
    assert text == "--chat-template and --chat-template-file exclude each other"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff{")
    assert refused("--chat-template-file", str(tmp_path / "t")).endswith("is not UTF-8 text")
    assert refused("--grammar-file", "~nobody-of-that-name/g").endswith("no such user")


def test_ubatch_is_cut_to_batch() -> None:
    settings = serve("-b", "256")
    assert (settings.model.n_ubatch, settings.warnings) == (256, ())
    settings = serve("-ub", "4096")
    assert (settings.model.n_ubatch, settings.warnings) == (2048, ("--ubatch-size 4096 is cut to --batch-size 2048",))


def test_without_a_model_the_built_in_one_is_meant() -> None:
    for parse in (parse_serve, parse_chat):
        assert parse([], {}).model.path == ""


def test_help_lists_every_flag_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_serve(["-h"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for group in (
        "model:",
        "context:",
        "model from the network:",
        "cache:",
        "disk cache:",
        "sampling:",
        "chat format:",
        "server:",
        "log:",
    ):
        assert f"\n{group}\n" in text
    for flag in SERVE_FLAGS:
        assert all(name in text for name in flag.spellings())
        assert flag.env in text
    assert "(default: 2048)" in text
    assert max(map(len, text.splitlines())) <= 110


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_chat(["--version"], {})
    assert capsys.readouterr().out.startswith("pyctl 0.")


def test_chat_settings() -> None:
    settings = chat("-p", "-hello", "-sys", "Be brief.", "--no-stats", "--temp", "0", "-c", "512")
    assert settings.terminal == TerminalSettings(prompt="-hello", system_prompt="Be brief.", stats=False)
    assert settings.sampling.sampling.temperature == 0.0
    assert settings.model.n_ctx == 512
    assert chat(PYCTL_STATS="off", PYCTL_SYSTEM_PROMPT="s").terminal == TerminalSettings(system_prompt="s", stats=False)


def test_chat_takes_server_flags_without_effect() -> None:
    settings = chat("--host", "0.0.0.0", "--port", "9", "--metrics", LLAMA_ARG_PORT="8081")
    assert settings.warnings == ("without effect here: --host, --port, --metrics",)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost:8080/", "http://localhost:8080"),
        ("localhost:8080", "http://localhost:8080"),
        ("https://example.org/v1", "https://example.org/v1"),
    ],
)
def test_chat_with_a_server(text: str, url: str) -> None:
    terminal = parse_chat(["--url", text, "--api-key", "k"], {"LLAMA_ARG_MODEL": "m.gguf"}).terminal
    assert (terminal.url, terminal.api_key) == (url, "k")
    assert parse_chat([], {"PYCTL_URL": text}).terminal.url == url


def test_chat_with_a_server_has_no_model_of_its_own() -> None:
    with pytest.raises(ConfigError, match="--url and -m exclude each other"):
        parse_chat(["--url", "localhost", "-m", "m.gguf"], {})
    settings = parse_chat(["--url", "localhost", "-c", "8", "--exact"], {})
    assert settings.warnings == ("-c has no effect with --url", "--exact has no effect with --url")


def test_chat_refuses_bad_addresses_and_empty_prompts() -> None:
    for argv in (["--url", "ftp://x"], ["--url", "http://"], ["--url", "h", "--api-key", "ü"], ["-m", "m", "-p", ""]):
        with pytest.raises(ConfigError):
            parse_chat(argv, {})


def test_only_what_was_asked_for_is_sent_to_a_server() -> None:
    argv = ["--url", "h", "--temp", "0.5", "-s", "-1", "-n", "9", "-l", "1-inf", "-l", "2+1", "--samplers", "top_k"]
    assert parse_chat(argv, {"LLAMA_ARG_TOP_K": "3"}).sampling.request_fields() == {
        "temperature": 0.5,
        "seed": -1,
        "max_tokens": 9,
        "logit_bias": [[1, False], [2, 1.0]],
        "samplers": ("top_k",),
        "top_k": 3,
    }
    assert parse_chat(["--url", "h"], {}).sampling.request_fields() == {}
