"""Writes a trained network and its tokenizer as a GGUF file that llama.cpp loads as `qwen35`.

    python -m tools.training.export DIR -o pyctl/models/builtin.gguf

with the network.pt and the tokenizer.json that train.py left in DIR; train.py itself does this, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType, TokenType
from tokenizers import Tokenizer

from tools.training.network import Attention, Network, Sizes
from tools.training.tokens import SPECIAL, merges

__all__ = ["TEMPLATE", "write_gguf"]

TEMPLATE = Path(__file__).with_name("template.jinja")
_CONTEXT = 262_144


def write_gguf(path: Path, network: Network, tokenizer: Tokenizer, *, half: bool = True) -> None:
    """Write to `path`: matrices as f16 (f32 if not `half`), norms and what llama.cpp wants so as f32."""
    writer = GGUFWriter(path, "qwen35")
    _add_sizes(writer, network, half)
    _add_tokenizer(writer, tokenizer)
    for key, tensor, matrix in _tensors(network):
        values = tensor.detach().float().cpu().numpy()
        writer.add_tensor(key, np.ascontiguousarray(values.astype(np.float16) if matrix and half else values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(network: Network) -> Iterator[tuple[str, Any, bool]]:
    yield "token_embd.weight", network.embedding, True
    yield "output_norm.weight", network.norm.weight, False
    for i, block in enumerate(network.blocks):
        head, mixer = f"blk.{i}.", block.mixer
        yield head + "attn_norm.weight", block.mixer_norm.weight, False
        yield head + "post_attention_norm.weight", block.norm.weight, False
        yield head + "ffn_gate.weight", block.gate.weight, True
        yield head + "ffn_up.weight", block.up.weight, True
        yield head + "ffn_down.weight", block.down.weight, True
        if isinstance(mixer, Attention):
            yield head + "attn_q.weight", mixer.q.weight, True
            yield head + "attn_k.weight", mixer.k.weight, True
            yield head + "attn_v.weight", mixer.v.weight, True
            yield head + "attn_q_norm.weight", mixer.q_norm.weight, False
            yield head + "attn_k_norm.weight", mixer.k_norm.weight, False
            yield head + "attn_output.weight", mixer.out.weight, True
        else:
            yield head + "attn_qkv.weight", mixer.qkv.weight, True
            yield head + "attn_gate.weight", mixer.gate.weight, True
            yield head + "ssm_conv1d.weight", mixer.conv, False
            yield head + "ssm_dt.bias", mixer.dt, False
            yield head + "ssm_a", -mixer.a_log.exp(), False
            yield head + "ssm_alpha.weight", mixer.alpha.weight, True
            yield head + "ssm_beta.weight", mixer.beta.weight, True
            yield head + "ssm_norm.weight", mixer.norm.weight, False
            yield head + "ssm_out.weight", mixer.out.weight, True


def _add_sizes(writer: GGUFWriter, network: Network, half: bool) -> None:
    sizes = network.sizes
    inner = sizes.recurrent_heads * sizes.recurrent_head
    writer.add_name("pyctl built-in")
    writer.add_license("MIT")
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if half else LlamaFileType.ALL_F32)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_block_count(sizes.layers)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(sizes.width)
    writer.add_feed_forward_length(sizes.feed_forward)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head)
    writer.add_value_length(sizes.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(sizes.rope)
    writer.add_rope_freq_base(sizes.rope_base)
    # Positions of text are the same in all sections; they need only cover the rotated pairs.
    writer.add_rope_dimension_sections((3, 3, 2, 0))
    writer.add_full_attention_interval(sizes.interval)
    writer.add_ssm_conv_kernel(sizes.conv_kernel)
    writer.add_ssm_state_size(sizes.recurrent_head)
    writer.add_ssm_group_count(sizes.recurrent_heads)
    writer.add_ssm_time_step_rank(sizes.recurrent_heads)
    writer.add_ssm_inner_size(inner)


def _add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    kinds = [TokenType.NORMAL] * len(tokens)
    for text in SPECIAL:
        visible = SPECIAL.index(text) >= SPECIAL.index("<tool_call>")
        kinds[tokenizer.token_to_id(text)] = TokenType.USER_DEFINED if visible else TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges(tokenizer))
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path, metavar="DIR")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    network = Network(Sizes())
    network.load_state_dict(torch.load(args.trained / "network.pt", map_location="cpu", weights_only=True))
    write_gguf(args.output, network, Tokenizer.from_file(str(args.trained / "tokenizer.json")))


if __name__ == "__main__":
    main()
