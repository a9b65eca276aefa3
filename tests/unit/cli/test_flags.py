from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyctl.chat import keep_reasoning
from pyctl.cli.arguments import parse_chat, parse_serve
from pyctl.engine.draft.draft_settings import MODEL_TYPES
from pyctl.engine.placements import CPU_EXPERTS
from pyctl.errors import ConfigError
from pyctl.setting import Flag
from pyctl.tools import BUILT_IN, McpServer
from tests.unit.cli.given import PRESERVED, SERVE_FLAGS, at, refused, serve

# Per destination: what is typed, where it ends up, and as what.
ROUND_TRIPS: dict[str, tuple[str, str, Any]] = {
    "path": ("other.gguf", "model.path", "other.gguf"),
    "alias": ("qwen, q", "model.alias", ("qwen", "q")),
    "tags": ("x,y", "model.tags", ("x", "y")),
    "n_gpu_layers": ("all", "model.n_gpu_layers", -2),
    "split_mode": ("row", "model.split_mode", "row"),
    "tensor_split": ("3,1", "model.tensor_split", (3.0, 1.0)),
    "main_gpu": ("1", "model.main_gpu", 1),
    "load_mode": ("dio", "model.load_mode", "dio"),
    "mmap": ("", "model.load_mode", "mmap"),
    "mlock": ("", "model.load_mode", "mmap+mlock"),
    "lazy_mode": ("off", "model.lazy_mode", "off"),
    "devices": ("CUDA0,CUDA1", "model.devices", ("CUDA0", "CUDA1")),
    "workers": ("a.lan:50052,10.0.0.2:1,a.lan:50052", "model.workers", ("a.lan:50052", "10.0.0.2:1")),
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
    "draft_repo": ("org/d-GGUF:Q8_0", "hub.draft_repo", "org/d-GGUF:Q8_0"),
    "offline": ("", "hub.offline", True),
    "n_ctx": ("4096", "model.n_ctx", 4096),
    "n_seqs": ("4", "model.n_seqs", 4),
    "n_batch": ("1024", "model.n_batch", 1024),
    "n_ubatch": ("256", "model.n_ubatch", 256),
    "n_threads": ("6", "model.n_threads", 6),
    "poll": ("7", "model.poll", 7),
    "n_threads_batch": ("12", "model.n_threads_batch", 12),
    "flash_attn": ("on", "model.flash_attn", "on"),
    "type_k": ("q8_0", "model.type_k", "q8_0"),
    "type_v": ("iq4_nl", "model.type_v", "iq4_nl"),
    "offload_kqv": ("", "model.offload_kqv", True),
    "op_offload": ("", "model.op_offload", True),
    "swa_full": ("", "model.swa_full", True),
    "kv_unified": ("", "model.kv_unified", True),
    "n_ctx_per_seq": ("2048", "model.n_ctx_per_seq", 2048),
    "n_pooled": ("65536", "pool.n_pooled", 65_536),
    "n_selected": ("4096", "pool.select.n_selected", 4096),
    "n_sinks": ("128", "pool.select.n_sinks", 128),
    "n_tail": ("512", "pool.select.n_tail", 512),
    "pinned": ("none", "pool.select.pinned", "none"),
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
    "cache_prompt": ("", "replies.cache_prompt", True),
    "warm_next": ("", "replies.warm_next", True),
    "warm": ("", "", None),  # needs a file, below
    "prefill_assistant": ("", "replies.prefill_assistant", True),
    "min_step": ("0", "engine.min_step", 0),
    "exact": ("", "engine.exact", True),
    "cache_dir": ("/var/cache/kv", "disk.cache_dir", "/var/cache/kv"),
    "kv_cache": ("", "disk.kv_cache", True),
    "disk_mib": ("100", "disk.disk_mib", 100),
    "min_tokens": ("0", "disk.min_tokens", 0),
    "cold_max": ("0", "disk.cold_max", 0),
    "disk_policy": ("AUTO:8", "disk.disk_policy", "auto:8"),
    "daily_mib": ("20000", "disk.daily_mib", 20000),
    "store_url": ("s3://bucket/kv", "disk.store_url", "s3://bucket/kv"),
    "store_mib": ("100", "disk.store_mib", 100),
    "store_daily_mib": ("100", "disk.store_daily_mib", 100),
    "n_predict": ("64", "replies.n_predict", 64),
    "seed": ("42", "replies.sampling.seed", 42),
    "samplers": ("", "", None),  # two flags, below
    "ignore_eos": ("", "replies.sampling.ignore_eos", True),
    "temperature": ("0.6", "replies.sampling.temperature", 0.6),
    "draft_types": ("", "", None),  # two flags, below
    "n_draft": ("5", "drafts.n_draft", 5),
    "n_draft_min": ("-1", "drafts.n_draft_min", -1),
    "draft_p_min": ("0.5", "drafts.draft_p_min", 0.5),
    "draft_path": ("d.gguf", "drafts.draft_path", "d.gguf"),
    "draft_gpu_layers": ("all", "drafts.draft_gpu_layers", -2),
    "draft_devices": ("CUDA0,CUDA1", "drafts.draft_devices", ("CUDA0", "CUDA1")),
    "draft_placements": ("", "", None),  # three flags, below
    "draft_threads": ("6", "drafts.draft_threads", 6),
    "draft_threads_batch": ("12", "drafts.draft_threads_batch", 12),
    "draft_type_k": ("q8_0", "drafts.draft_type_k", "q8_0"),
    "draft_type_v": ("iq4_nl", "drafts.draft_type_v", "iq4_nl"),
    "simple_size_n": ("5", "ngrams.simple_size_n", 5),
    "simple_size_m": ("6", "ngrams.simple_size_m", 6),
    "map_k_size_n": ("7", "ngrams.map_k_size_n", 7),
    "map_k_size_m": ("8", "ngrams.map_k_size_m", 8),
    "map_k4v_size_n": ("9", "ngrams.map_k4v_size_n", 9),
    "map_k4v_size_m": ("10", "ngrams.map_k4v_size_m", 10),
    "mod_match": ("16", "ngrams.mod_match", 16),
    "mod_max": ("60", "ngrams.mod_max", 60),
    "dynatemp_range": ("0.2", "replies.sampling.dynatemp_range", 0.2),
    "dynatemp_exponent": ("2", "replies.sampling.dynatemp_exponent", 2.0),
    "top_k": ("20", "replies.sampling.top_k", 20),
    "top_p": ("0.8", "replies.sampling.top_p", 0.8),
    "min_p": ("0", "replies.sampling.min_p", 0.0),
    "top_n_sigma": ("1.5", "replies.sampling.top_n_sigma", 1.5),
    "typical_p": ("0.9", "replies.sampling.typical_p", 0.9),
    "xtc_probability": ("0.5", "replies.sampling.xtc_probability", 0.5),
    "xtc_threshold": ("0.2", "replies.sampling.xtc_threshold", 0.2),
    "repeat_last_n": ("128", "replies.sampling.repeat_last_n", 128),
    "repeat_penalty": ("1.1", "replies.sampling.repeat_penalty", 1.1),
    "presence_penalty": ("1.5", "replies.sampling.presence_penalty", 1.5),
    "frequency_penalty": ("-0.5", "replies.sampling.frequency_penalty", -0.5),
    "dry_multiplier": ("0.8", "replies.sampling.dry_multiplier", 0.8),
    "dry_base": ("2", "replies.sampling.dry_base", 2.0),
    "dry_allowed_length": ("3", "replies.sampling.dry_allowed_length", 3),
    "dry_penalty_last_n": ("0", "replies.sampling.dry_penalty_last_n", 0),
    "dry_sequence_breakers": (r"a\n\\", "replies.sampling.dry_sequence_breakers", ("a\n\\",)),
    "mirostat": ("2", "replies.sampling.mirostat", 2),
    "mirostat_eta": ("0.2", "replies.sampling.mirostat_eta", 0.2),
    "mirostat_tau": ("4", "replies.sampling.mirostat_tau", 4.0),
    "adaptive_target": ("0.5", "replies.sampling.adaptive_target", 0.5),
    "adaptive_decay": ("0.8", "replies.sampling.adaptive_decay", 0.8),
    "logit_bias": ("15043-1.5", "replies.sampling.logit_bias", ((15043, -1.5),)),
    "grammar": ("", "", None),  # four flags, below
    "chat_template": ("{{ messages }}", "format.chat_template", "{{ messages }}"),
    "template_file": ("", "", None),  # needs a file, below
    "template_kwargs": ('{"a": 1}', "format.template_kwargs", {**PRESERVED, "a": 1}),
    "reasoning": ("off", "format.template_kwargs", {**PRESERVED, "enable_thinking": False}),
    "reasoning_format": ("deepseek", "replies.reasoning_format", "deepseek"),
    "prompt_replay": ("full", "format.prompt_replay", "full"),
    "reasoning_effort": ("high", "format.template_kwargs", {**PRESERVED, "reasoning_effort": "high"}),
    "reasoning_preserve": ("", "format.template_kwargs", PRESERVED),
    "reasoning_budget": ("64", "replies.reasoning_budget", 64),
    "reasoning_budget_message": ("Enough.", "replies.reasoning_budget_message", "Enough."),
    "jinja": ("", "warnings", ()),
    "built_in": ("all", "tools.built_in", BUILT_IN),
    "agent": ("", "tools.agent", True),
    "mcp_config": ("", "", None),  # needs a file, below
    "mcp_json": ('{"mcpServers": {"a": {"command": "b"}}}', "tools.mcp_json", (McpServer("a", "b"),)),
    "hosts": ("0.0.0.0,::1", "listen.hosts", ("0.0.0.0", "::1")),
    "max_connections": ("9", "listen.max_connections", 9),
    "port": ("0", "listen.port", 0),
    "models_dir": ("/tmp", "router.models_dir", "/tmp"),
    "preset_path": ("m.ini", "router.preset_path", "m.ini"),
    "most_loaded": ("2", "router.most_loaded", 2),
    "autoload": ("", "router.autoload", True),
    "patience": ("0.5", "router.patience", 0.5),
    "keep_files": ("", "router.keep_files", True),
    "api_keys": ("a,b", "server.api_keys", ("a", "b")),
    "key_file": ("", "", None),  # needs a file, below
    "ssl_key_file": ("", "", None),  # one needs the other, below
    "ssl_cert_file": ("", "", None),
    "ping_seconds": ("-1", "server.ping_seconds", -1),
    "show_metrics": ("", "server.show_metrics", True),
    "change_props": ("", "server.change_props", True),
    "show_prompts": ("", "server.show_prompts", True),
    "show_slots": ("", "server.show_slots", True),
    "slot_save_path": ("/tmp", "server.slot_save_path", Path("/tmp")),
    "show_page": ("", "server.show_page", True),
    "open_page": ("", "listen.open_page", True),
    "mmproj_path": ("v.gguf", "vision.mmproj_path", "v.gguf"),
    "mmproj_offload": ("", "vision.mmproj_offload", True),
    "mmproj_device": ("CUDA1", "vision.mmproj_device", "CUDA1"),
    "image_min_tokens": ("64", "vision.image_min_tokens", 64),
    "image_max_tokens": ("512", "vision.image_max_tokens", 512),
    "mmproj_url": ("http://h/v.gguf", "hub.mmproj_url", "http://h/v.gguf"),
    "mmproj_auto": ("", "hub.mmproj_auto", True),
    "media_path": ("/tmp", "server.media_path", "/tmp"),
    "static_path": ("/tmp", "server.static_path", "/tmp"),
    "api_prefix": ("/llm", "server.api_prefix", "/llm"),
    "origins": ("localhost", "server.cors.origins", "localhost"),
    "methods": ("GET", "server.cors.methods", "GET"),
    "headers": ("x-a", "server.cors.headers", "x-a"),
    "credentials": ("", "server.cors.credentials", True),
    "clear_idle": ("", "engine.clear_idle", True),
    "n_queue": ("9", "engine.n_queue", 9),
    "sleep_seconds": ("60", "engine.sleep_seconds", 60),
    "stall_seconds": ("7", "engine.stall_seconds", 7),
    "embeddings": ("", "model.embeddings", True),
    "pooling": ("mean", "model.pooling", "mean"),
    "rerank": ("", "model.pooling", "rank"),
    "embd_normalize": ("-1", "replies.embd_normalize", -1),
    "spm_infill": ("", "replies.spm_infill", True),
    "verbosity": ("", "", None),  # three flags, below
    "log_file": ("x.log", "log.log_file", "x.log"),
    "timestamps": ("", "log.timestamps", True),
}


PLAIN_FLAGS = [flag for flag in SERVE_FLAGS if ROUND_TRIPS[flag.dest][1]]


@pytest.mark.parametrize("flag", PLAIN_FLAGS, ids=lambda flag: flag.dest)
def test_every_spelling_sets_its_value(flag: Flag) -> None:
    text, path, value = ROUND_TRIPS[flag.dest]
    for name in flag.names.split():
        # After its negation, for a switch that is on by default.
        settings = serve(name, text) if flag.convert else serve(*flag.off.split()[:1], name)
        assert at(settings, path) == value
        if flag.convert and name.startswith("--"):
            assert at(serve(f"{name.replace('-', '_').replace('__', '--', 1)}={text}"), path) == value


@pytest.mark.parametrize("flag", [flag for flag in PLAIN_FLAGS if flag.env], ids=lambda flag: flag.dest)
def test_every_variable_sets_its_value_and_a_flag_wins_over_it(flag: Flag) -> None:
    text, path, value = ROUND_TRIPS[flag.dest]
    if flag.dest not in ("path", "hf_repo", "model_url"):
        settings = parse_serve(["-m", "m"], {flag.env: text or "on"})
        assert at(settings, path) == value
        assert not any(flag.env in warning for warning in settings.warnings), "a variable without effect"
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


def test_types_of_drafts_add_up_in_their_order() -> None:
    settings = serve("--spec-type", "draft-mtp,ngram-mod", "--spec-type", "cache", "--spec-type", "none,draft-simple")
    assert settings.drafts.ordered_types == ("ngram-mod", "cache", "draft-mtp")
    for name in MODEL_TYPES:
        assert serve("--spec-type", name, "-md", "f").drafts.reads_rows == (name != "draft-simple")
    assert serve("--spec-default").drafts.ordered_types == ("ngram-mod",)
    assert serve("--spec-default", LLAMA_ARG_SPEC_TYPE="draft-mtp").drafts.ordered_types == ("ngram-mod",)


def test_where_tensors_of_a_draft_model_go() -> None:
    settings = serve("-otd", "attn=CPU", "-cmoed", "--spec-draft-ncmoe", "1").drafts
    assert settings.draft_placements == (("attn", "CPU"), (CPU_EXPERTS, "CPU"), (rf"blk\.0{CPU_EXPERTS}", "CPU"))
    assert serve(LLAMA_ARG_SPEC_DRAFT_CPU_MOE="1").drafts.draft_placements == ((CPU_EXPERTS, "CPU"),)


def test_the_last_of_several_wins() -> None:
    assert serve("-c", "1", "--ctx-size", "2").model.n_ctx == 2
    assert serve("--no-cache-prompt", "--cache-prompt").replies.cache_prompt


def test_flags_that_add_up() -> None:
    settings = serve("-l", "1+2", "--logit-bias", "3-inf", "--dry-sequence-breaker", "none")
    assert settings.replies.sampling.logit_bias == ((1, 2.0), (3, -float("inf")))
    assert settings.replies.sampling.dry_sequence_breakers == ()
    assert serve("--api-key", "a", "--api-key", "b", LLAMA_API_KEY="c").server.api_keys == ("a", "b")


def test_prompts_to_be_made_ready_come_from_files(tmp_path: Path) -> None:
    one, more, wrong = tmp_path / "one", tmp_path / "more", tmp_path / "wrong"
    one.write_text('{"messages": []}')
    more.write_text('[{"tools": []}, {"messages": ["x"]}]')
    bodies = ({"messages": []}, {"tools": []}, {"messages": ["x"]})
    assert serve("--warm", str(one), "--warm", str(more)).replies.warm == bodies
    assert serve(PYCTL_WARM=str(one)).replies.warm == bodies[:1]
    for text in ("{", "5", "[1]", "[" * 5000, "[" + ",".join(["{}"] * 17) + "]"):
        wrong.write_text(text)
        with pytest.raises(ConfigError, match="--warm"):
            serve("--warm", str(wrong))
    with pytest.raises(ConfigError, match="cannot read"):
        serve("--warm", str(tmp_path / "nothing"))


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
        (["--prefix-cache-slot=4"], "unknown flag --prefix-cache-slot; did you mean --prefix-cache-slots?"),
        (["stray"], "unexpected argument 'stray'"),
        (["a/b.gguf"], "unexpected argument 'a/b.gguf'; did you mean -m a/b.gguf?"),
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
        (["--host", " , "], "--host: ' , ' is not an address"),
        (["--api-key", ""], "--api-key: no key given"),
        (["--api-key", " "], "--api-key: no key given"),
        (["--api-key", ","], "--api-key: no key given"),
        (["-ngl", "most"], "-ngl: 'most' is not a whole number or auto or all"),
        (["-ctk", "q9"], "-ctk: 'q9' is none of f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1"),
        (["--spec-type", "foo"], "--spec-type: unknown speculative type: foo"),
        (
            ["--spec-type", "ngram-cache"],
            "--spec-type: ngram-cache is not supported; use one of ngram-simple,",
        ),
        (["--spec-draft-n-max", "-1"], "--spec-draft-n-max: -1 is too small, the least is 0"),
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
        (["--kv-cache-dir", "~no-such-user/x"], "--kv-cache-dir: '~no-such-user/x' names a home that"),
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
            "--disk-prefix-cache: 'core' must be one of off, full, auto, auto:N, N, with N from 1 to 1000000, spill, "
            "or one of them and ,spill",
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
        (["--ssl-key-file", "k"], "--ssl-key-file and --ssl-cert-file must be given together"),
        (["--reasoning-format", "x"], "--reasoning-format: 'x' is none of auto, none, deepseek, deepseek-legacy"),
        (["-dr", "ai/x"], "-dr is not supported: pyctl has no equivalent of this flag of llama-server"),
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
        (["--path", "/nowhere"], "--path: '/nowhere' does not exist"),
        (["--api-prefix", "llm/"], "--api-prefix: 'llm/' is not a path such as /llm"),
        (["--sleep-idle-seconds", "0"], "--sleep-idle-seconds: 0 seconds is too short; use -1 for never"),
    ],
)
def test_what_is_refused_is_one_clear_line(argv: list[str], text: str) -> None:
    assert refused(*argv).startswith(text)


def test_a_bad_variable_is_named() -> None:
    assert refused(LLAMA_ARG_CTX_SIZE="many") == "LLAMA_ARG_CTX_SIZE: 'many' is not a whole number"
    assert refused(LLAMA_ARG_ENDPOINT_METRICS="yes").startswith("LLAMA_ARG_ENDPOINT_METRICS: 'yes' is none of")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff{")
    assert refused("--chat-template-file", str(tmp_path / "t")).endswith("is not UTF-8 text")
    assert refused("--grammar-file", "~no-such-user/g").endswith("no such user")


def test_help_lists_every_flag_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_serve(["-h", "all"], {})
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
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("parse", [parse_serve, parse_chat])
def test_help_begins_with_what_matters(
    capsys: pytest.CaptureFixture[str], parse: Callable[[list[str], dict[str, str]], object]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 80
    assert lines[2] == "examples:"
    for example in lines[3:5]:
        parse(shlex.split(example)[2:], {})
    flags = [line for line in lines if re.match(r"  -", line)]
    assert 18 <= len(flags) <= 22
    assert any("--cache-ram" in line for line in flags)


@pytest.mark.parametrize(
    ("topic", "there", "missing"),
    [
        ("cache", ["cache:", "disk cache:", "--kv-cache-dir", "PYCTL_EXACT"], ["--port", "--ctx-size"]),
        ("Disk", ["disk cache:", "--kv-cache-dir"], ["--cache-ram"]),
        ("cors", ["server:", "--cors-origins"], ["--port", "model:"]),
        ("--cache-ram", ["cache:", "--cache-ram"], ["--exact"]),
    ],
)
def test_help_on_a_topic(capsys: pytest.CaptureFixture[str], topic: str, there: list[str], missing: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_serve([f"--help={topic}"], {})
    text = capsys.readouterr().out
    assert [each for each in there if each not in text] == []
    assert [each for each in missing if each in text] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_chat(["--version"], {})
    assert capsys.readouterr().out.startswith("pyctl 0.")
