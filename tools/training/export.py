"""A trained network and its tokenizer as a GGUF file that llama.cpp loads as `qwen35`, and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_VERSION, GGUFReader, GGUFWriter, LlamaFileType, TokenType
from tokenizers import Tokenizer, models

from tools.training.network import Attention, Network
from tools.training.tokens import SPECIAL, VOCAB_SIZE, merges, tokenizer_of

__all__ = ["TEMPLATE", "read_gguf", "stored_tokenizer", "write_gguf"]

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


def stored_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a file, if its vocabulary is as large as that of today."""
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    return tokenizer_of(tokens, fields["tokenizer.ggml.merges"].contents()) if len(tokens) == VOCAB_SIZE else None


@torch.no_grad()
def read_gguf(path: Path, network: Network, tokenizer: Tokenizer) -> None:
    """Begin with the weights of a file that may have another vocabulary, wider feed-forward layers or no head.

    A token that the file does not have begins as the mean of what the file makes of its text; of a wider layer the
    strongest neurons are taken.
    """
    reader = GGUFReader(path)
    stored = {tensor.name: torch.from_numpy(np.array(tensor.data, np.float32)) for tensor in reader.tensors}
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    pairs = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    numbers = {token: number for number, token in enumerate(tokens)}
    pieces = models.BPE(numbers, pairs)
    rows = stored.pop("token_embd.weight")
    for number in range(tokenizer.get_vocab_size()):
        text = tokenizer.id_to_token(number)
        own = [numbers[text]] if text in numbers else [token.id for token in pieces.tokenize(text)]
        network.embedding[number] = rows[own].mean(0)
    for key, tensor, _ in _tensors(network):
        if key not in stored:
            continue
        values = stored[key]
        if values.shape != tensor.shape:
            prefix = key.rpartition("ffn_")[0] + "ffn_"
            gate, up, down = (stored[f"{prefix}{part}.weight"] for part in ("gate", "up", "down"))
            strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
            kept = strength.topk(network.sizes.feed_forward).indices.sort().values
            values = values[:, kept] if key.endswith("ffn_down.weight") else values[kept]
        if key.endswith("ssm_a"):
            network.blocks[int(key.split(".")[1])].mixer.a_log.copy_((-values).log())
        else:
            tensor.copy_(values)


def _tensors(network: Network) -> Iterator[tuple[str, Any, bool]]:
    yield "token_embd.weight", network.embedding, True
    yield "output_norm.weight", network.norm.weight, False
    for i, block in enumerate(network.blocks):
        yield from _block(f"blk.{i}.", block)
    prefix, head = f"blk.{len(network.blocks)}.", network.head
    yield from _block(prefix, head.block)
    yield prefix + "nextn.eh_proj.weight", head.join.weight, True
    yield prefix + "nextn.enorm.weight", head.token_norm.weight, False
    yield prefix + "nextn.hnorm.weight", head.hidden_norm.weight, False
    yield prefix + "nextn.shared_head_norm.weight", head.norm.weight, False


def _block(prefix: str, block: Any) -> Iterator[tuple[str, Any, bool]]:
    mixer = block.mixer
    yield prefix + "attn_norm.weight", block.mixer_norm.weight, False
    yield prefix + "post_attention_norm.weight", block.norm.weight, False
    yield prefix + "ffn_gate.weight", block.gate.weight, True
    yield prefix + "ffn_up.weight", block.up.weight, True
    yield prefix + "ffn_down.weight", block.down.weight, True
    if isinstance(mixer, Attention):
        yield prefix + "attn_q.weight", mixer.q.weight, True
        yield prefix + "attn_k.weight", mixer.k.weight, True
        yield prefix + "attn_v.weight", mixer.v.weight, True
        yield prefix + "attn_q_norm.weight", mixer.q_norm.weight, False
        yield prefix + "attn_k_norm.weight", mixer.k_norm.weight, False
        yield prefix + "attn_output.weight", mixer.out.weight, True
    else:
        yield prefix + "attn_qkv.weight", mixer.qkv.weight, True
        yield prefix + "attn_gate.weight", mixer.gate.weight, True
        yield prefix + "ssm_conv1d.weight", mixer.conv, False
        yield prefix + "ssm_dt.bias", mixer.dt, False
        yield prefix + "ssm_a", -mixer.a_log.exp(), False
        yield prefix + "ssm_alpha.weight", mixer.alpha.weight, True
        yield prefix + "ssm_beta.weight", mixer.beta.weight, True
        yield prefix + "ssm_norm.weight", mixer.norm.weight, False
        yield prefix + "ssm_out.weight", mixer.out.weight, True


def _add_sizes(writer: GGUFWriter, network: Network, half: bool) -> None:
    sizes = network.sizes
    inner = sizes.recurrent_heads * sizes.recurrent_head
    writer.add_name("pyctl built-in")
    writer.add_license("MIT")
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if half else LlamaFileType.ALL_F32)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_block_count(sizes.layers + 1)
    writer.add_nextn_predict_layers(1)
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
