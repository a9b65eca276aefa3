"""Every flag of `pyctl serve` and `pyctl chat` reaches a part of the program, not only a setting."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyctl.cache.cache_stats import CacheStats, CacheView, SnapshotView
from pyctl.cache.sequence import LiveSequence
from pyctl.cli import serve_command
from pyctl.cli.arguments import FLAGS
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.draft.source import DraftJob
from pyctl.engine.model_settings import ModelSettings
from pyctl.errors import ModelError
from pyctl.llama import fit, load, loader
from pyctl.llama.library import redirect_log
from pyctl.llama.make_encoder import make_encoder
from pyctl.llama.pool_fit import fit_pool
from pyctl.models import builtin_model
from pyctl.setting import CHAT, GENERAL, SAMPLING, SERVER, Flag, Section
from tests.model.llama.test_memory_plan import Run
from tests.unit.cli.commands import HI, Seen, look
from tools.generator import VISION_SHAPES, cached_model

Look = Callable[[Seen], Any]


@dataclass(frozen=True)
class Effect:
    """``text`` is the flag's value; ``see`` finds what changes by it; ``beside`` are flags without which it is idle.

    A switch that is on by default is turned off.
    """

    text: str
    see: Look
    beside: tuple[str, ...] = ()


def model(name: str) -> Look:
    return lambda seen: getattr(seen.model_params, name)


def context(name: str) -> Look:
    return lambda seen: getattr(seen.context_params, name)


def drafts(name: str) -> Look:
    """The files opened besides the model, and the draft sources."""
    return lambda seen: getattr(seen.drafts, name)


def draft_model(name: str) -> Look:
    return lambda seen: getattr(seen.draft_params[0], name)


def draft_context(name: str) -> Look:
    return lambda seen: getattr(seen.draft_params[1], name)


def draft_placements(seen: Seen) -> Any:
    return seen.draft_params[0].tensor_buft_overrides is not None and seen.drafts.draft_placements


def ngrams(name: str) -> Look:
    """Drafts of a request from its own text, in which each kind finds a match."""
    return lambda seen: ngram_drafts(seen, name)


def ngram_drafts(seen: Seen, name: str) -> list[tuple[int, ...]]:
    """The drafts of the source ``name`` at each token of a text that repeats itself, with differences."""
    speculation = seen.built["Engine"]["4"]
    (source,) = (source for source in speculation.sources if source.name == name)
    text = np.tile(np.arange(100, dtype=np.int32), 6)
    text[::70] = 7
    seq = LiveSequence(0, 4096)
    seq.append(text[:150], exact=True)
    source.begin(1, text[:150])
    found = []
    for token in text[150:].tolist():
        found.append(source.match(DraftJob(1, seq, (token,), 100)).read(100))
        seq.append_one(token)
    return found


def taken(seen: Seen) -> list[int]:
    """How many of three drafts count as right."""
    acceptance = seen.built["Speculation"]["acceptance"]
    if acceptance is None:
        return []
    acceptance.begin(1, 7)
    return [acceptance.draw(1, 3) for _ in range(50)]


def sampling(name: str) -> Look:
    return lambda seen: getattr(seen.request.sampling, name)


def built(what: str, argument: str) -> Look:
    return lambda seen: seen.built.get(what, {}).get(argument)


def option(name: str) -> Look:
    return lambda seen: getattr(seen.built["Engine"]["2"], name)


def picture(seen: Seen) -> str:
    """The error message about an image in a file."""
    content = [{"type": "image_url", "image_url": {"url": "file://picture.png"}}]
    asked = {"messages": [{"role": "user", "content": content}]}
    return str(seen.client.post("/v1/chat/completions", json=asked).json()["error"]["message"])


def prompt(seen: Seen) -> bytes:
    return bytes(seen.request.prompt.tokens.tobytes())


def going_on(seen: Seen) -> bytes:
    """The prompt of a conversation that ends in a reply."""
    last = [*HI, {"role": "assistant", "content": "Well,"}]
    seen.client.post(seen.prefix + "/v1/chat/completions", json={"messages": last})
    return bytes(seen.requests[-1].prompt.tokens.tobytes())


def limit(seen: Seen) -> Any:
    return seen.request.reasoning


def status(method: str, path: str, **kwargs: Any) -> Look:
    return lambda seen: seen.client.request(method, path, **kwargs).status_code


def offered(seen: Seen) -> Any:
    """The object that runs tools, of the server or of the chat."""
    return bool(seen.chat["tools"]) if seen.chat else seen.client.get("/tools").status_code


def header(name: str, **asked: str) -> Look:
    return lambda seen: seen.client.options("/props", headers={"origin": "http://page", **asked}).headers.get(name)


def loading(seen: Seen) -> str:
    """The error of loading llama.cpp."""
    try:
        load(replace(seen.model, n_threads=1, n_ctx=256)).backend.unload()
    except ModelError as error:
        return str(error)
    return ""


def described(name: str) -> Look:
    def see(seen: Seen) -> Any:
        loaded = load(replace(seen.model, n_threads=1, **({} if name == "n_ctx" else {"n_ctx": 256})))
        loaded.backend.unload()
        return getattr(loaded.info, name)

    return see


def pairs(pointer: Any, *names: str) -> list[Any]:
    found: list[Any] = []
    while pointer and getattr(pointer[len(found)], names[0]):
        found.append(tuple(getattr(pointer[len(found)], name) for name in names))
    return found


def metadata(seen: Seen) -> Any:
    return pairs(seen.model_params.kv_overrides, "key", "tag")


def placements(seen: Seen) -> Any:
    return seen.model_params.tensor_buft_overrides is not None and seen.model.placements


def fitted(free: int) -> Look:
    """The context that fits beside a larger model into ``free`` MiB of a GPU."""

    @contextlib.contextmanager
    def large(settings: ModelSettings, *_: object) -> Iterator[Run]:
        yield Run(settings, free * fit.MIB, 64_000 * fit.MIB)

    def see(seen: Seen) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fit, "dry_run", large)
            return fit.fit_settings(seen.model)[0].n_ctx

    return see


def eyes(seen: Seen) -> Any:
    """The error of making the image encoder; else the tokens of an image."""
    try:
        path = seen.vision.mmproj_path or str(tiny_eyes())
        return make_encoder(seen.model, replace(seen.vision, mmproj_path=path)).grid.limits
    except ModelError as error:
        return str(error)


@cache
def tiny_eyes() -> Path:
    return cached_model(VISION_SHAPES["tiny-vision"], Path(tempfile.mkdtemp()))


def pooled(seen: Seen) -> Any:
    """The plan of a pool for the model."""
    redirect_log()
    found = fit_pool(seen.model, seen.drafts, seen.pool) if seen.pool.n_pooled else None
    return found[1].pool if found is not None else None


def numa(seen: Seen) -> list[int]:
    given: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        # For real it would bind this process to one part of the machine.
        patch.setattr(loader.api, "llama_numa_init", given.append)
        loading(seen)
    return given


def scales(seen: Seen) -> list[float]:
    given: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader.api, "llama_adapter_lora_init", lambda *_: ctypes.c_void_p(1))
        patch.setattr(loader.api, "llama_set_adapters_lora", lambda *args: given.extend(args[3]) or 0)
        loader._apply_adapters(None, None, seen.model)
    return given


def infill(seen: Seen) -> Any:
    seen.client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    return seen.requests[-1].prompt.tokens.tolist()


def embedding(seen: Seen) -> Any:
    return seen.client.post("/embedding", json={"content": "x"}).json()


def ping(seen: Seen) -> Any:
    seen.client.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    return seen.pings


def cached_text(seen: Seen) -> bool:
    future: Future[CacheView] = Future()
    held = SnapshotView("a", "", 1, 1, 1, 0, 0.0, 0.0, False, tuple(b"x"))
    future.set_result(CacheView(1, 1, -1, 0, CacheStats(), (held,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineAdmin, "view", lambda _: future)
        return "tail" in seen.client.get("/cache").text


def hub(name: str) -> Look:
    return lambda seen: getattr(seen.hub, name, None)


DIR = "{dir}"

FILE = "{file}"
ALONE = "{alone}"  # no model is named
MODELS = str(builtin_model().parent)


def body(path: str) -> Look:
    """The server's answer at ``path``."""
    return lambda seen: seen.client.get(path).json()


def model_names(seen: Seen) -> list[str]:
    return [model["id"] for model in seen.client.get("/v1/models").json()["data"]]


TLS = ("--ssl-key-file", "key.pem", "--ssl-cert-file", "cert.pem")

EFFECTS: dict[str, Effect] = {
    # -- model
    "-m": Effect("other.gguf", loading),
    "-a": Effect("q", described("model_alias")),
    "--tags": Effect("small,fast", described("model_tags")),
    "-ngl": Effect("3", model("n_gpu_layers")),
    "-sm": Effect("row", model("split_mode")),
    "-ts": Effect("3,1", lambda seen: bool(seen.model_params.tensor_split) and seen.model_params.tensor_split[0]),
    "-mg": Effect("1", model("main_gpu")),
    "-lm": Effect("dio", model("load_mode")),
    "--mmap": Effect("", model("load_mode")),
    "--mlock": Effect("", model("load_mode")),
    "-lzm": Effect("off", model("lazy_mode")),
    "-dev": Effect("none", lambda seen: bool(seen.model_params.devices)),
    "--rpc": Effect("a:1", lambda seen: seen.workers),
    "-ot": Effect("attn=CPU", placements),
    "-cmoe": Effect("", placements),
    "-ncmoe": Effect("1", placements),
    "-ncffn": Effect("1", placements),
    "--override-kv": Effect("a.b=int:3", metadata),
    "--check-tensors": Effect("", model("check_tensors")),
    "--repack": Effect("", model("use_extra_bufts")),
    "--no-host": Effect("", model("no_host")),
    "-fit": Effect("off", fitted(8_000)),
    "-fitt": Effect("2048", fitted(8_000)),
    "-fitc": Effect("30000", fitted(5_000)),
    "--numa": Effect("isolate", numa),
    "--lora-init-without-apply": Effect("", scales, ("--lora", "a.gguf")),
    "--lora": Effect("no-adapter.gguf", loading),
    "--lora-scaled": Effect("no-scaled-adapter.gguf:0.5", loading),
    "-mm": Effect("other.gguf", eyes),
    "--mmproj-offload": Effect("", eyes, ("-mmdev", "CUDA7")),
    "-mmdev": Effect("CUDA7", eyes),
    "--image-min-tokens": Effect("64", eyes),
    "--image-max-tokens": Effect("512", eyes),
    # -- model from the network
    "-hf": Effect("org/m:Q8_0", hub("hf_repo"), (ALONE,)),
    "-hff": Effect("x.gguf", hub("hf_file"), (ALONE, "-hf", "org/m")),
    "-hft": Effect("secret", hub("hf_token"), (ALONE, "-hf", "org/m")),
    "-mu": Effect("http://h/m.gguf", hub("model_url"), (ALONE,)),
    "-hfd": Effect("org/d:Q8_0", hub("hf_repo"), ("--spec-type", "draft-simple")),
    "-mmu": Effect("http://h/v.gguf", hub("model_url")),
    "--mmproj-auto": Effect("", lambda seen: seen.vision.mmproj_path, (ALONE, "-hf", "org/m")),
    "--offline": Effect("", hub("offline"), (ALONE, "-hf", "org/m")),
    # -- context
    "-c": Effect("512", described("n_ctx")),
    "-np": Effect("3", context("n_seq_max")),
    "-b": Effect("1024", context("n_batch")),
    "-ub": Effect("256", context("n_ubatch")),
    "-t": Effect("77", context("n_threads")),
    "-tb": Effect("78", context("n_threads_batch")),
    "--poll": Effect("7", lambda seen: os.environ["GOMP_SPINCOUNT"]),
    "-fa": Effect("off", context("flash_attn_type")),
    "-ctk": Effect("q8_0", context("type_k")),
    "-ctv": Effect("q8_0", context("type_v")),
    "-kvo": Effect("", context("offload_kqv")),
    "--op-offload": Effect("", context("op_offload")),
    "--swa-full": Effect("", context("swa_full")),
    "-kvu": Effect("", described("n_ctx"), ("-np", "2")),
    "--kv-unified-per-slot": Effect("512", described("n_ctx")),
    "--kv-pool": Effect("4096", pooled, ("-c", "8192")),
    "--rope-scaling": Effect("yarn", context("rope_scaling_type")),
    "--rope-scale": Effect("4", context("rope_freq_scale")),
    "--rope-freq-base": Effect("1e6", context("rope_freq_base")),
    "--rope-freq-scale": Effect("0.5", context("rope_freq_scale")),
    "--yarn-orig-ctx": Effect("32768", context("yarn_orig_ctx")),
    "--yarn-ext-factor": Effect("0.5", context("yarn_ext_factor")),
    "--yarn-attn-factor": Effect("1.5", context("yarn_attn_factor")),
    "--yarn-beta-slow": Effect("2", context("yarn_beta_slow")),
    "--yarn-beta-fast": Effect("16", context("yarn_beta_fast")),
    # -- cache
    "--prefix-cache-slots": Effect("5", built("RamCache", "0")),
    "-cram": Effect("100", built("RamCache", "1")),
    "--cache-prompt": Effect("", lambda seen: seen.request.cache_prompt),
    "--warm-next": Effect("", lambda seen: bool(seen.reply and seen.warmed)),
    "-cms": Effect("77", option("min_step")),
    "--exact": Effect("", option("exact")),
    "--cache-idle-slots": Effect("", option("clear_idle")),
    # -- disk cache
    "--kv-cache-dir": Effect(DIR, built("DiskStore", "0")),
    "--kv-cache": Effect("", built("DiskStore", "0"), ("--kv-cache", "--kv-cache-budget", "100")),
    "--kv-cache-budget": Effect("100", built("DiskStore", "2"), ("--kv-cache-dir", DIR)),
    "--kv-cache-min-tokens": Effect("9", built("DiskStore", "min_tokens"), ("--kv-cache-dir", DIR)),
    "--kv-cache-cold-max": Effect("9", built("DiskTier", "cold_max"), ("--kv-cache-dir", DIR)),
    "--disk-prefix-cache": Effect("full", built("DiskTier", "1"), ("--kv-cache-dir", DIR)),
    "--kv-cache-daily-writes": Effect("9", built("DiskStore", "daily_bytes"), ("--kv-cache-dir", DIR)),
    "--kv-store": Effect("memory://", built("StoreBehind", "1"), ("--kv-cache-dir", DIR)),
    # -- sampling
    "-n": Effect("9", lambda seen: seen.request.max_tokens),
    "-s": Effect("42", sampling("seed")),
    "--samplers": Effect("top_k;adaptive-p", sampling("samplers")),
    "--sampler-seq": Effect("ki", sampling("samplers")),
    "--ignore-eos": Effect("", sampling("ignore_eos")),
    "--temp": Effect("0.1", sampling("temperature")),
    "--dynatemp-range": Effect("0.2", sampling("dynatemp_range")),
    "--dynatemp-exp": Effect("2", sampling("dynatemp_exponent")),
    "--top-k": Effect("7", sampling("top_k")),
    "--top-p": Effect("0.5", sampling("top_p")),
    "--min-p": Effect("0.2", sampling("min_p")),
    "--top-nsigma": Effect("1.5", sampling("top_n_sigma")),
    "--typical": Effect("0.9", sampling("typical_p")),
    "--xtc-probability": Effect("0.5", sampling("xtc_probability")),
    "--xtc-threshold": Effect("0.2", sampling("xtc_threshold")),
    "--repeat-last-n": Effect("9", sampling("repeat_last_n")),
    "--repeat-penalty": Effect("1.1", sampling("repeat_penalty")),
    "--presence-penalty": Effect("1.5", sampling("presence_penalty")),
    "--frequency-penalty": Effect("0.5", sampling("frequency_penalty")),
    "--dry-multiplier": Effect("0.8", sampling("dry_multiplier")),
    "--dry-base": Effect("2", sampling("dry_base")),
    "--dry-allowed-length": Effect("3", sampling("dry_allowed_length")),
    "--dry-penalty-last-n": Effect("9", sampling("dry_penalty_last_n")),
    "--dry-sequence-breaker": Effect("x", sampling("dry_sequence_breakers")),
    "--adaptive-target": Effect("0.5", sampling("adaptive_target")),
    "--adaptive-decay": Effect("0.8", sampling("adaptive_decay")),
    "--mirostat": Effect("2", sampling("mirostat")),
    "--mirostat-lr": Effect("0.2", sampling("mirostat_eta")),
    "--mirostat-ent": Effect("4", sampling("mirostat_tau")),
    "-l": Effect("15+1", sampling("logit_bias")),
    "--grammar": Effect('root ::= "a"', sampling("grammar")),
    "--grammar-file": Effect(FILE, sampling("grammar")),
    "-j": Effect('{"type": "boolean"}', sampling("grammar")),
    "-jf": Effect(FILE, sampling("grammar")),
    # -- speculative decoding
    "--spec-type": Effect("draft-mtp", lambda seen: seen.built["Engine"]["4"].names),
    "--spec-default": Effect("", lambda seen: seen.built["Engine"]["4"].names),
    "--spec-draft-n-max": Effect("5", built("ModelDrafts", "1"), ("--spec-type", "draft-mtp")),
    "--spec-draft-n-min": Effect("2", built("ModelDrafts", "2"), ("--spec-type", "draft-mtp")),
    "--spec-draft-p-min": Effect("0.5", drafts("draft_p_min")),
    "-md": Effect("small.gguf", drafts("draft_path")),
    "-ngld": Effect("3", draft_model("n_gpu_layers")),
    "-devd": Effect("none", lambda seen: bool(seen.draft_params[0].devices)),
    "-otd": Effect("attn=CPU", draft_placements),
    "-cmoed": Effect("", draft_placements),
    "-ncmoed": Effect("1", draft_placements),
    "-td": Effect("77", draft_context("n_threads")),
    "-tbd": Effect("78", draft_context("n_threads_batch"), ("-td", "77")),
    "-ctkd": Effect("q8_0", draft_context("type_k")),
    "-ctvd": Effect("q8_0", draft_context("type_v")),
    "--spec-ngram-simple-size-n": Effect("3", ngrams("ngram-simple"), ("--spec-type", "ngram-simple")),
    "--spec-ngram-simple-size-m": Effect("3", ngrams("ngram-simple"), ("--spec-type", "ngram-simple")),
    "--spec-ngram-map-k-size-n": Effect("3", ngrams("ngram-map-k"), ("--spec-type", "ngram-map-k")),
    "--spec-ngram-map-k-size-m": Effect("3", ngrams("ngram-map-k"), ("--spec-type", "ngram-map-k")),
    "--spec-ngram-map-k4v-size-n": Effect("3", ngrams("ngram-map-k4v"), ("--spec-type", "ngram-map-k4v")),
    "--spec-ngram-map-k4v-size-m": Effect("3", ngrams("ngram-map-k4v"), ("--spec-type", "ngram-map-k4v")),
    "--spec-ngram-mod-n-match": Effect("16", ngrams("ngram-mod"), ("--spec-type", "ngram-mod")),
    "--spec-ngram-mod-n-max": Effect("52", ngrams("ngram-mod"), ("--spec-type", "ngram-mod")),
    # -- chat format
    "--chat-template": Effect("{{ messages[0].content }}", prompt),
    "--chat-template-file": Effect(FILE, prompt),
    "--chat-template-kwargs": Effect('{"flavour": "salt"}', prompt),
    "-rea": Effect("off", prompt),
    "--reasoning-effort": Effect("high", prompt),
    "--reasoning-preserve": Effect("", prompt),
    "--reasoning-format": Effect("none", lambda seen: seen.reply),
    "--reasoning-budget": Effect("9", limit),
    "--reasoning-budget-message": Effect("So:", limit, ("--reasoning-budget", "5")),
    "--prefill-assistant": Effect("", going_on),
    "--prompt-replay": Effect("full", built("Replay", "0")),
    "--jinja": Effect("", lambda seen: seen.log.get("warning")),
    # -- log
    "-lv": Effect("1", lambda seen: seen.log["level"]),
    "-v": Effect("", lambda seen: seen.log["level"]),
    "--log-disable": Effect("", lambda seen: seen.log["level"]),
    "--log-file": Effect(FILE, lambda seen: len(seen.log["handlers"])),
    "--log-timestamps": Effect("", lambda seen: seen.log["handlers"][0].formatter._fmt),
    # -- server
    "--host": Effect("0.0.0.0", lambda seen: seen.address),
    "--port": Effect("9", lambda seen: seen.address),
    "--max-connections": Effect("9", lambda seen: seen.served.max_connections),
    "--api-key": Effect("k", status("GET", "/props")),
    "--api-key-file": Effect(FILE, status("GET", "/props")),
    "--ssl-key-file": Effect("other.pem", lambda seen: seen.served.ssl_key_file, TLS),
    "--ssl-cert-file": Effect("other.pem", lambda seen: seen.served.ssl_cert_file, TLS),
    "--sse-ping-interval": Effect("7", ping),
    "--metrics": Effect("", status("GET", "/metrics")),
    "--warm": Effect(FILE, lambda seen: [len(each.prompt) > 5 and each.background for each in seen.warmed]),
    "--props": Effect("", status("POST", "/props", json={})),
    "--show-prompts": Effect("", cached_text),
    "--slots": Effect("", status("GET", "/slots")),
    "--slot-save-path": Effect(DIR, status("POST", "/slots/0?action=save", json={"filename": "f"})),
    "--open": Effect("", lambda seen: seen.opened),
    "--ui": Effect("", status("GET", "/")),
    "--media-path": Effect(DIR, picture),
    "--path": Effect(str(Path(__file__).parent), status("GET", "/test_effects.py")),
    "--api-prefix": Effect("/llm", status("GET", "/health")),
    "--cors-origins": Effect("localhost", header("access-control-allow-origin")),
    "--cors-methods": Effect("GET", header("access-control-allow-methods")),
    "--cors-headers": Effect("x-a", header("access-control-allow-headers")),
    "--cors-credentials": Effect("", header("access-control-allow-credentials")),
    "--models-dir": Effect(MODELS, model_names, (ALONE,)),
    "--models-preset": Effect(FILE, model_names, (ALONE,)),
    "--models-max": Effect("1", built("LoadOrder", "0"), (ALONE, "--models-dir", MODELS)),
    "--models-autoload": Effect("", body("/props"), (ALONE, "--models-dir", MODELS)),
    "--models-patience": Effect("7", built("LoadOrder", "1"), (ALONE, "--models-dir", MODELS)),
    "--models-warm": Effect("", lambda seen: "WarmFiles" in seen.built, (ALONE, "--models-dir", MODELS)),
    "--queue": Effect("9", option("n_queue")),
    "--sleep-idle-seconds": Effect("60", built("Worker", "2")),
    "--stall-timeout": Effect("7", built("Worker", "3")),
    "--embedding": Effect("", embedding),
    "--pooling": Effect("cls", described("pooling"), ("--embedding",)),
    "--rerank": Effect("", described("pooling")),
    "--embd-normalize": Effect("-1", embedding, ("--embedding",)),
    "--spm-infill": Effect("", infill),
    # -- tools
    "--mcp-servers-config": Effect(FILE, offered),
    "--mcp-servers-json": Effect('{"mcpServers": {"a": {"command": ""}}}', offered),
    # -- chat
    "-p": Effect("Hello", lambda seen: seen.chat["settings"].prompt),
    "-sys": Effect("Be brief.", lambda seen: seen.chat["settings"].system_prompt),
    "--stats": Effect("", lambda seen: seen.chat["settings"].stats),
    "--lines": Effect("", lambda seen: seen.chat["settings"].lines),
    "--continue": Effect("", lambda seen: seen.chat["settings"].resumes),
    "--url": Effect("http://h", lambda seen: seen.remote[:1], (ALONE,)),
}
OF_CHAT = {"--api-key": Effect("k", lambda seen: seen.remote[1], (ALONE, "--url", "h"))}
"""The same name means something else there."""

FILES = {
    "--grammar-file": 'root ::= "b"',
    "-jf": '{"type": "null"}',
    "--chat-template-file": "{{ messages[0].role }}",
    "--api-key-file": "key",
    "--models-preset": "[one]\nmodel = one.gguf\n",
    "--mcp-servers-config": '{"mcpServers": {"a": {"command": ""}}}',
    "--warm": '[{"messages": [{"role": "system", "content": "Be brief."}]}, {"tools": []}]',
}


def flags(without: Section) -> list[Flag]:
    return [flag for section, group in FLAGS.items() if section not in (GENERAL, without) for flag in group]


def name_of(flag: Flag) -> str:
    return flag.names.split()[0]


def given(flag: Flag, text: str) -> list[str]:
    """The flag with ``text``, or as the switch that changes something."""
    if flag.convert is not None:
        return [name_of(flag), text]
    return [flag.off.split()[0] if flag.off and flag.default == "on" else name_of(flag)]


CASES = [
    pytest.param(command, flag, id=f"{command} {name_of(flag)}")
    for command, flags_of_command in (("serve", flags(CHAT)), ("chat", flags(SERVER)))
    for flag in flags_of_command
]


@pytest.mark.parametrize(("command", "flag"), CASES)
def test_every_flag_changes_what_its_consumer_gets(
    command: str,
    flag: Flag,
    tmp_path: Path,
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    name = name_of(flag)
    effect = OF_CHAT.get(name, EFFECTS[name]) if command == "chat" else EFFECTS[name]
    places = {DIR: str(tmp_path), FILE: str(tmp_path / "file")}
    (tmp_path / "file").write_text(FILES.get(name, ""))
    beside = [places.get(word, word) for word in effect.beside if word != ALONE]
    argv = [command, *([] if ALONE in effect.beside else ["-m", str(model_path("tiny-hybrid"))]), *beside]
    before = look(monkeypatch, argv, effect.see)
    after = look(monkeypatch, [*argv, *given(flag, places.get(effect.text, effect.text))], effect.see)
    assert after != before, f"{name} changes nothing"


@pytest.mark.parametrize("flag", FLAGS[SAMPLING], ids=name_of)
def test_every_flag_of_sampling_reaches_a_server_elsewhere(
    flag: Flag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_of(flag)
    (tmp_path / "file").write_text(FILES.get(name, ""))
    text = EFFECTS[name].text.replace(FILE, str(tmp_path / "file"))
    (fields,) = look(monkeypatch, ["chat", "--url", "h", *given(flag, text)], lambda seen: seen.remote[2:])
    other = {"-n": "max_tokens", "-j": "json_schema", "-jf": "json_schema"}
    assert list(fields) == [other.get(name, flag.dest)]


def test_a_draft_model_is_fetched_beside_a_model_that_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["serve", "-m", "m.gguf", "-hfd", "org/d:Q8_0", "-md", "small.gguf"]
    asked, path, model = look(monkeypatch, argv, lambda seen: (seen.hub, seen.drafts.draft_path, seen.model.path))
    assert (asked.hf_repo, asked.hf_file) == ("org/d:Q8_0", "small.gguf")
    assert (path, model) == ("fetched.gguf", "m.gguf")


def test_a_vision_encoder_that_nobody_asked_for_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """-hf brings the encoder beside the model. An unsupported one is a warning; only a named one is an error."""
    argv = ["serve", "-hf", "org/gemma"]
    path, warning = look(monkeypatch, argv, lambda seen: (seen.vision.mmproj_path, str(seen.log["warning"])))
    assert (path, warning) == ("", "images as gemma.gguf makes them are not supported")
    with pytest.raises(AssertionError):
        look(monkeypatch, ["serve", "-m", "m.gguf", "--mmproj", "gemma.gguf"], lambda seen: seen.vision)


def test_a_vision_encoder_that_is_named_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv, path in (
        (["-hf", "org/m"], "eyes.gguf"),
        (["-hf", "org/m", "--no-mmproj"], ""),
        (["-hf", "org/m", "--mmproj", "mine.gguf"], "mine.gguf"),
        (["-hf", "org/m", "-mmu", "http://h/v.gguf"], "fetched.gguf"),
        (["-hf", "org/m", "--kv-pool", "auto"], ""),
        (["-m", "m.gguf", "-mmu", "http://h/v.gguf"], "fetched.gguf"),
        (["-m", "m.gguf"], ""),
    ):
        assert look(monkeypatch, ["serve", *argv], lambda seen: seen.vision.mmproj_path) == path, argv


@pytest.mark.parametrize("is_gpu", [True, False])
def test_a_start_on_the_cpu_says_which_card_is_idle(monkeypatch: pytest.MonkeyPatch, is_gpu: bool) -> None:
    said: list[str] = []
    note = SimpleNamespace(**dict.fromkeys(("debug", "info"), lambda *_, **__: None))
    monkeypatch.setattr(serve_command, "log", note)
    note.warning = lambda text, *values: said.append(text % values)
    monkeypatch.setattr(serve_command, "devices", lambda: [SimpleNamespace(is_gpu=is_gpu)])
    monkeypatch.setattr(serve_command, "unused_card", lambda: "RTX 3090 is idle")
    assert look(monkeypatch, ["serve", "-m", "m.gguf"], lambda seen: seen.address)
    assert ("RTX 3090 is idle" in said) is not is_gpu
