"""Models whose attention cannot read rows that lie elsewhere: refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter, RopeScalingType

from pyctl.errors import ModelError
from pyctl.llama.fit.dry_runs import MemoryMeter
from pyctl.llama.fit.pool_fit import pool_plan
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.resolved import Resolved
from tests.model.native.stores import Store
from tools.generator import finish


def of_another_family(path: Path, source: Path, arch: str) -> Path:
    """Write a model of one layer with random weights at ``path``: "bloom", or "llama" whose
    positions differ in long contexts.
    """
    width = 64
    n_vocab = 0
    writer = GGUFWriter(path, arch)
    for name, field in GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            kinds = field.types
            writer.add_key_value(
                name, field.contents(), kinds[0], sub_type=kinds[1] if len(kinds) > 1 else None
            )
            n_vocab = len(field.contents()) if name == "tokenizer.ggml.tokens" else n_vocab
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_eps(1e-5)
    writer.add_layer_norm_rms_eps(1e-5)
    square = ["attn_output", "ffn_up", "ffn_down"]
    if arch == "llama":
        writer.add_rope_dimension_count(32)
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        square += ["attn_q", "attn_k", "attn_v", "ffn_gate"]
    shapes = {"token_embd": (n_vocab, width), "output_norm": (width,), "blk.0.attn_norm": (width,)}
    shapes |= {"blk.0.ffn_norm": (width,), **{f"blk.0.{name}": (width, width) for name in square}}
    if arch == "llama":
        shapes |= {"rope_factors_long": (16,), "rope_factors_short": (16,)}
    else:
        shapes |= {"token_embd_norm": (width,), "blk.0.attn_qkv": (3 * width, width)}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(1.0, 0.1, shape).astype(np.float32))
        if arch == "bloom" and name != "token_embd":
            writer.add_tensor(f"{name}.bias", np.zeros(shape[:1], np.float32))
    finish(writer)
    return path


@pytest.mark.parametrize(
    ("arch", "why"),
    [("bloom", "tokens do not just see all that came before"), ("llama", "in a long context")],
)
def test_models_that_it_cannot_serve_are_refused(
    store: Callable[..., Store],
    model_path: Callable[[str], Path],
    tmp_path: Path,
    arch: str,
    why: str,
) -> None:
    """ALiBi, whose masks are no masks, and longrope."""
    path = of_another_family(tmp_path / "model.gguf", model_path("tiny-dense"), arch)
    with pytest.raises(RuntimeError, match=why):
        store("", resident=[0], path=path)
    settings = ModelSettings(path=str(path), n_ctx=1024, n_threads=1)
    if arch == "llama":
        assert (
            pool_plan(MemoryMeter(Resolved.from_settings(settings)), PoolSettings(1024)) is None
        ), "it runs without"
    else:
        with pytest.raises(ModelError, match=why):
            load(settings, pool=PoolSettings(1024))
