"""Tiny models with random weights of every architecture of llama.cpp that generates text and needs
only metadata.

Most architectures read what they need of `EVERY_KEY` and ignore the rest; `OWN_KEYS` has what the
others need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tools.generator import families
from tools.generator.families import FAMILIES, Family, Value

__all__ = ["ZOO"]

EVERY_KEY: Mapping[str, Value] = {
    **families.EXPERTS,
    **families.INDEXER,
    **families.HYPER,
    **families.SLIDING,
    **families.HEADS,
    **families.ROPE,
    **families.DELTA,
    "attention.clamp_kqv": 1.0,
    "attention.group_norm_epsilon": 1e-5,
    "attention.group_norm_groups": 8,
    "attention.indexer.key_length": 32,
    "attention.kv_lora_rank": 64,
    "attention.max_alibi_bias": 8.0,
    "attention.q_lora_rank": 32,
    "attention.scale": 0.17,
    "attention.sliding_window_pattern": 2,
    "embedding_scale": 1.0,
    "expert_chunk_feed_forward_length": 32,
    "expert_group_scale": 1.0,
    "expert_latent_length": 32,
    "experts_per_group": 1,
    "full_attention_interval": 2,
    "interleave_moe_layer_step": 2,
    "kda.head_dim": 32,
    "logit_scale": 1.0,
    "rescale_every_n_layers": 0,
    "residual_scale": 1.0,
    "rope.dimension_sections": (8, 4, 4, 0),
    "shortconv.l_cache": 3,
    "swiglu_clamp_exp": 10.0,
    "time_decay_extra_dim": 16,
    "time_mix_extra_dim": 16,
    "token_shift_count": 2,
    "use_parallel_residual": False,
    "wkv.head_size": 32,
}

PLAIN = """
afmoe arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chatglm codeshell cohere2 cohere2moe
command-r dbrx deci deepseek deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone exaone-moe exaone4
falcon falcon-h1 gemma gemma2 gemma3n glm4 glm4moe gpt2 gptneox granite granitemoe grok grovemoe
hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais jais2 laguna maincoder mamba mellum
minicpm minicpm3 minimax-01 minimax-m2 mistral3 mpt muse-glimmer nanbeige nemotron olmo olmo2 olmoe
openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo3 qwen qwen2 qwen2moe qwen2vl
qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe refact seed_oss smallthinker smollm3
stablelm starcoder starcoder2 talkie xverse
"""
"""Architectures that need nothing more."""

ALTERNATE: Mapping[str, Value] = {"attention.sliding_window_pattern": (1, 0, 1, 0)}

GATED: Mapping[str, Value] = {
    **families.LATENT,
    "attention.head_count_kv": (0, 1, 0, 1),
    **families.GATE,
}
"""Every other layer has attention over a latent; the others are recurrent, with a gate."""

OWN_KEYS: Mapping[str, Mapping[str, Value]] = {
    "apertus": {"xielu.alpha_n": 1.0, "xielu.alpha_p": 1.0, "xielu.beta": 1.0, "xielu.eps": 1e-7},
    "arwkv7": {**families.RWKV, "attention.head_count_kv": 0, "token_shift_count": 1},
    "bailingmoe3": GATED,
    "gemma4": {
        **ALTERNATE,
        "attention.key_length_swa": 32,
        "attention.shared_kv_layers": 0,
        "attention.value_length_swa": 32,
        "embedding_length_per_layer_input": 16,
    },
    "glm-dsa": {**families.LATENT, "attention.indexer.key_length": 128},
    "granite_swa": ALTERNATE,
    "granitehybrid": families.HALF,
    "hrm_text": {"block_count": 6, "hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
    "hy_v4": {
        **families.LATENT,
        "attention.indexer.key_length": 128,
        "attention.indexer.types": (1, 0, 1, 0),
        "hyper_connection.magnitude": 2.0,
    },
    "jamba": families.HALF,
    "kimi-k3": {
        **GATED,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "attn_res.block_size": 12,
    },
    "kimi-linear": GATED,
    "lfm2moe": families.HALF,
    "maple": ALTERNATE,
    "mimo2": ALTERNATE,
    "mistral4": families.LATENT,
    "nemotron_h_moe": {**families.FEW, "feed_forward_length": (0, 0, 0, 96)},
    "plamo2": {**families.HALF, "ssm.group_count": 0},
    "rwkv6": {
        key: families.RWKV[key]
        for key in ("embedding_length", "attention.head_count", "wkv.head_size")
    },
    "spark2_5": ALTERNATE,
    "step35": ALTERNATE,
}


def published(name: str, window: int, head: int) -> Family:
    """Return a family with a window and heads of the sizes that published models have."""
    keys = {
        **FAMILIES[name].keys,
        "embedding_length": 256,
        "attention.head_count": 4,
        "attention.sliding_window": window,
        "attention.key_length": head,
        "attention.value_length": head,
    }
    return replace(FAMILIES[name], name=f"{name}-{window}", keys=keys)


WINDOWS = (("tiny-gemma3", 512, 128), ("tiny-gemma3", 1024, 256), ("tiny-gpt-oss", 128, 64))
"""Family, tokens of its window, and elements of its heads."""

ZOO: Mapping[str, Family] = {
    **FAMILIES,
    **{f"tiny-{arch}": Family(f"tiny-{arch}", arch, keys=EVERY_KEY) for arch in PLAIN.split()},
    **{
        f"tiny-{arch}": Family(f"tiny-{arch}", arch, keys={**EVERY_KEY, **keys})
        for arch, keys in OWN_KEYS.items()
    },
    **{f"{name}-{window}": published(name, window, head) for name, window, head in WINDOWS},
}
"""All of them, by name: FAMILIES', the others in the order of their names, and published windows.
"""
