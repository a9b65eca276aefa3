"""The fingerprint: snapshots are restored with the same model, settings and build, and with no
other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved
from pyctl.prompt import Prompt, as_tokens
from tests.unit.engine.drive import Reply, ask, tier_on
from tools.generator import byte_vocab, finish

WIDTH = 64
HEADS = 2
KV_HEADS = 1
FEED_FORWARD = 128
LAYERS = 2
VOCAB = 288
HEAD = WIDTH // HEADS

PROMPT = Prompt(as_tokens(np.random.default_rng(1).integers(0, 256, 700)), (320, 640))


def write(
    path: Path, arch: str, *, seed: int = 0, quantised: bool = False, last_scale: float = 1.0
) -> Path:
    """Write a random model: llama, llama with two tables of rope factors, or cohere2 with its
    sliding windows.

    It is split in two where the name says so, with nothing but metadata in the first file.
    ``last_scale`` changes the last layer's V alone, in values that keep their size.
    """
    random = np.random.default_rng(seed)
    split = "-00001-of-" in path.name
    stem = path.with_name(path.name.split("-00001-of-")[0] + ".gguf") if split else path
    writer = GGUFWriter(stem, arch, split_max_tensors=1000 if split else 0, small_first_shard=split)
    writer.add_name("random")
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCAB)
    if arch == "cohere2":
        writer.add_sliding_window(64)
        writer.add_logit_scale(1.0)
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_string("llama.rope.scaling.type", "longrope")
        writer.add_rope_scaling_orig_ctx_len(1024)
    vocab = byte_vocab().fitted(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    writer.add_eos_token_id(vocab.ids["<|im_end|>"])

    def add(name: str, *dims: int, scale: float = 1.0) -> None:
        values = (random.normal(size=dims) * scale).astype(np.float32)
        if len(dims) == 1:
            writer.add_tensor(name, np.ones(dims, np.float32))
        elif quantised and name.startswith("blk"):
            packed = quants.quantize(values, GGMLQuantizationType.Q4_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q4_0)
        else:
            writer.add_tensor(name, values.astype(np.float16))

    add("token_embd.weight", VOCAB, WIDTH)
    add("output_norm.weight", WIDTH)
    if arch == "llama":
        half = np.arange(HEAD // 2, dtype=np.float32)
        writer.add_tensor("rope_factors_long.weight", 1 + half)
        writer.add_tensor("rope_factors_short.weight", np.ones_like(half))
    for layer in range(LAYERS):
        last = last_scale if layer == LAYERS - 1 else 1.0
        add(f"blk.{layer}.attn_norm.weight", WIDTH)
        add(f"blk.{layer}.attn_q.weight", WIDTH, WIDTH, scale=0.3)
        add(f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD, WIDTH, scale=0.3)
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD, WIDTH, scale=last)
        add(f"blk.{layer}.attn_output.weight", WIDTH, WIDTH)
        if arch == "llama":
            add(f"blk.{layer}.ffn_norm.weight", WIDTH)
        add(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, WIDTH, scale=0.2)
        add(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, WIDTH, scale=0.2)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, FEED_FORWARD, scale=0.2)
    finish(writer)
    return path


def opened(path: Path, **fields: Any) -> Loaded:
    return load(
        ModelSettings(path=str(path), **{"n_ctx": 1024, "n_ubatch": 64, "n_threads": 1, **fields})
    )


def asked(directory: Path, path: Path, **fields: Any) -> tuple[Reply, Reply]:
    """Return the replies of a server that was just started: from what the cache holds, and
    evaluated from the beginning.
    """
    loaded = opened(path, **fields)
    tier = tier_on(directory, loaded.info.fingerprint, min_tokens=64, cold_max=0)
    engine = Engine(loaded.backend, RamCache(8, None), EngineSettings(), tier)
    reply = ask(engine, PROMPT, 24)
    plain = ask(engine, PROMPT, 24, cache_prompt=False)
    engine.prefix_cache.close()
    loaded.backend.unload()
    assert reply.error is None
    assert plain.error is None
    return reply, plain


CHANGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "kernels": ("q4_0", {}, {"repack": False}),
    "kernels of one tensor": ("q4_0", {}, {"placements": ((r"blk\.0\.ffn", "CPU"),)}),
    "the table of rope factors": ("llama", {"n_ctx": 1024}, {"n_ctx": 2048}),
    "the base of rope": ("llama", {}, {"rope_freq_base": 5000.0}),
    "flash attention": ("llama", {"flash_attn": "on"}, {"flash_attn": "off"}),
    "the type of K": ("llama", {}, {"type_k": "q8_0"}),
    "the batch": ("llama", {}, {"n_ubatch": 128}),
    "the size of sliding windows": ("cohere2", {}, {"swa_full": True}),
    "the type of K beside sliding windows": ("cohere2", {}, {"type_k": "bf16"}),
    "flash attention beside sliding windows": (
        "cohere2",
        {"flash_attn": "on"},
        {"flash_attn": "off"},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("odd")

    def get(name: str) -> Path:
        path = directory / f"{name}.gguf"
        return (
            path
            if path.exists()
            else write(path, "llama" if name == "q4_0" else name, quantised=name == "q4_0")
        )

    return get


@pytest.mark.parametrize("change", CHANGES)
def test_a_restart_with_a_change_restores_nothing_of_before(
    tmp_path: Path, model: Callable[[str], Path], change: str
) -> None:
    name, before, after = CHANGES[change]
    if change == "kernels" and not Resolved.from_settings(ModelSettings()).model.repack:
        pytest.skip("no weights are rearranged on a CPU with AMX")
    asked(tmp_path, model(name), **before)
    same, plain = asked(tmp_path, model(name), **before)
    assert same.done.stats.source == "disk", "a restart with the same flags goes on"
    assert same.tokens == plain.tokens
    changed, plain = asked(tmp_path, model(name), **after)
    assert changed.done.stats.source == "none"
    assert changed.done.stats.n_cached == 0
    assert changed.tokens == plain.tokens


@pytest.mark.parametrize("change", [{"seed": 1}, {"last_scale": 1.05}], ids=["all", "one tensor"])
def test_another_second_file_under_the_same_metadata_is_another_model(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    write(path, "cohere2")
    first_file = path.read_bytes()
    cache = tmp_path / "cache"
    cache.mkdir()
    asked(cache, path)
    assert asked(cache, path)[0].done.stats.source == "disk"
    for part in tmp_path.glob("m-*.gguf"):
        part.unlink()
    write(path, "cohere2", **change)
    assert path.read_bytes() == first_file
    reply, plain = asked(cache, path)
    assert reply.tokens == plain.tokens
    assert reply.done.stats.n_cached == 0


def name_of(path: Path, **fields: Any) -> str:
    loaded = opened(path, **fields)
    loaded.backend.unload()
    return loaded.info.fingerprint


def test_what_changes_no_byte_keeps_the_fingerprint(
    tmp_path: Path, model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that change no byte of a row keep the fingerprint, and with it the cache on disk; a
    change of the rope table or of a kernel variable renews it.
    """
    path = model("llama")
    plain = name_of(path)
    for fields in (
        {"n_ctx": 512},
        {"n_threads": 2},
        {"flash_attn": "on"},
        {"swa_full": True},
        {"n_gpu_layers": 3},
        {"offload_kqv": False},
        {"load_mode": "none"},
        {"alias": ("other",)},
    ):
        assert name_of(path, **fields) == plain, fields
    long = name_of(path, n_ctx=2048)
    assert long == name_of(path, n_ctx=4096) != plain
    assert name_of(
        path, n_ctx=2048, metadata=(("llama.rope.scaling.original_context_length", 4096),)
    ) not in (
        plain,
        long,
    )
    other = tmp_path / "moved.gguf"
    other.write_bytes(path.read_bytes())
    assert name_of(other) == plain
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    assert name_of(path) == plain
    monkeypatch.setenv("GGML_CPU_DISABLE_FUSION", "1")
    assert name_of(path) != plain
