"""Writes GGUF files with random weights: the real architectures, tokenizer and sizes, without the
download.

Files are streamed, so the full-size shapes need disk but little memory. The container is GGUF
version 3; the metadata keys are those that llama.cpp requires for each architecture. `cached_model`
makes a file only once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from os import PathLike
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType, PoolingType

from pyctl.files.atomic_file import temp_path
from tools.generator.shapes import F32, GROUP, I64, KERNEL, Shape, Tensor, tensors
from tools.generator.vision import VisionShape, write_encoder
from tools.generator.vocab import CHATML_TEMPLATE, Vocab, byte_vocab
from tools.generator.weights import Tiles, deviation, fill, proposed

__all__ = ["add_tokenizer", "cached_model", "source_digest", "write_model", "write_tensors"]

RERANK_TEMPLATE = (
    "<|im_start|>user\nasked: {query}\ntext: {document}<|im_end|>\n<|im_start|>assistant\n"
)
"""The template of a reranker's prompts; the chat template of that name is no Jinja."""


def write_model(
    path: str | PathLike[str],
    shape: Shape,
    *,
    seed: int = 0,
    vocab: Vocab | None = None,
) -> None:
    """Write a model of `shape` to `path`, byte for byte the same for the same arguments.

    `vocab` (default: bytes) is fitted to the shape's vocabulary size. The file appears whole or not
    at all. Raises `ValueError` if the vocabulary does not fit.
    """
    vocab = (byte_vocab() if vocab is None else vocab).fitted(shape.vocab_size)
    listing = tensors(shape)
    target = Path(path)
    with temp_path(target.parent) as temporary:
        writer = GGUFWriter(temporary, shape.arch)
        _add_shape(writer, shape, seed)
        add_tokenizer(writer, vocab)
        if shape.target_layers:
            _add_reader(writer, shape, vocab)
        try:
            write_tensors(writer, listing, _content(shape, vocab, seed))
        finally:
            writer.close()
        os.replace(temporary, target)


def _add_shape(writer: GGUFWriter, shape: Shape, seed: int) -> None:
    """Write the keys of ``shape``: always those for attention, and those for recurrent layers,
    experts, classes and heads for drafts if it has them.
    """
    writer.add_name(f"{shape.name} (random weights, seed {seed})")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M if shape.quantised else LlamaFileType.ALL_F32)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_block_count(shape.num_layers + shape.num_nextn)
    if shape.num_nextn:
        writer.add_nextn_predict_layers(shape.num_nextn)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.embedding)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.rope_size)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.num_recurrent_layers:
        writer.add_rope_dimension_sections(shape.rope_sections)
        writer.add_full_attention_interval(shape.attention_interval)
        writer.add_ssm_conv_kernel(shape.conv_kernel)
        writer.add_ssm_state_size(shape.recurrent_head_size)
        writer.add_ssm_group_count(shape.num_key_heads)
        writer.add_ssm_time_step_rank(shape.num_value_heads)
        writer.add_ssm_inner_size(shape.value_width)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.num_experts_used)
        writer.add_expert_feed_forward_length(shape.feed_forward)
        writer.add_expert_shared_feed_forward_length(shape.shared_feed_forward)
    else:
        writer.add_feed_forward_length(shape.feed_forward)
    if shape.num_classes:
        writer.add_classifier_output_labels(
            [f"class {number}" for number in range(shape.num_classes)]
        )
        writer.add_pooling_type(PoolingType.RANK)
        writer.add_string("tokenizer.chat_template.rerank", RERANK_TEMPLATE)


def _add_reader(writer: GGUFWriter, shape: Shape, vocab: Vocab) -> None:
    """Write the keys of a draft model that reads layers of its target: for EAGLE-3 only the
    target's layers and width, for a model that drafts blocks more.
    """
    arch = shape.arch
    writer.add_array(f"{arch}.target_layers", list(shape.target_layers))
    if not shape.block:
        return writer.add_uint32(f"{arch}.target_hidden_size", shape.embedding)
    writer.add_uint32(f"{arch}.block_size", shape.block)
    writer.add_mask_token_id(vocab.ids["<|fim_pad|>"])
    if any(shape.rope_sections):
        writer.add_rope_dimension_sections(shape.rope_sections)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_sliding_window_pattern(
            [layer + 1 < shape.num_layers for layer in range(shape.num_layers)]
        )
    if shape.markov:
        writer.add_bool(f"{arch}.sample_from_anchor", shape.anchored)
    if shape.selector:
        sizes = {"conv_kernel_size": KERNEL, "conv_group_size": GROUP}
        for key, value in {
            **sizes,
            "selector_rank": shape.selector_rank,
            "selector_top_k": shape.selector,
        }.items():
            writer.add_uint32(f"{arch}.{key}", value)
    return None


def add_tokenizer(writer: GGUFWriter, vocab: Vocab) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    writer.add_eos_token_id(vocab.ids["<|im_end|>"])
    writer.add_pad_token_id(vocab.ids["<|vision_pad|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML_TEMPLATE)


def _content(shape: Shape, vocab: Vocab, seed: int) -> Callable[[Tensor], Iterator[memoryview]]:
    tiles = Tiles(seed)

    def pieces(tensor: Tensor) -> Iterator[memoryview]:
        if tensor.type is F32:
            yield fill(shape, tensor, vocab, seed).astype("<f4").reshape(-1).view(np.uint8).data
        elif tensor.type is I64:
            yield proposed(shape).astype("<i8").view(np.uint8).data
        else:
            yield from tiles.fill(tensor, deviation(shape, tensor))

    return pieces


def write_tensors(
    writer: GGUFWriter, listing: Sequence[Tensor], content: Callable[[Tensor], Iterator[memoryview]]
) -> None:
    """Write the keys of ``writer``, the list of tensors, and what each consists of."""
    for tensor in listing:
        writer.add_tensor_info(
            tensor.name, tensor.dims, np.dtype(np.float32), tensor.num_bytes, raw_dtype=tensor.type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # GGUFWriter.write_tensor_data needs a whole tensor in memory; its file and its alignment are
    # used directly.
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for tensor in listing:
        for piece in content(tensor):
            file.write(piece)
        writer.write_padding(file, tensor.num_bytes)
    file.flush()
    os.fsync(file.fileno())


# -- models kept on disk
# ----------------------------------------------------------------------------------


def cached_model(
    shape: Shape | VisionShape, directory: str | PathLike[str], *, seed: int = 0
) -> Path:
    """Return the model or encoder of `shape` and `seed` in `directory`; generate it there if it is
    missing.

    The file name carries a digest of the shape and of this package's source, so another generator
    makes another file. Any number of threads and processes may call this at once: each gets a whole
    file.
    """
    digest = hashlib.blake2b(f"{source_digest()} {shape!r}".encode(), digest_size=6).hexdigest()
    path = Path(directory) / f"{shape.name}-{seed}-{digest}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_encoder(path, shape, seed=seed) if isinstance(shape, VisionShape) else write_model(
            path, shape, seed=seed
        )
    return path


@cache
def source_digest() -> str:
    digest = hashlib.blake2b()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
