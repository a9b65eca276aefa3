"""Image encoders with random weights, as separate GGUF files ("mmproj"): the encoder of Qwen3-VL
and Qwen3.6.

Patches of 16 by 16 pixels pass a transformer; four neighbours at a time become one token of the
text model. Tensors and metadata have the names that libmtmd looks up for the projector type
`qwen3vl_merger`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from os import PathLike, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, LlamaFileType
from numpy.typing import NDArray

from pyctl.files.atomic_file import temp_path
from tools.generator.shapes import QWEN36_27B, QWEN36_35B_A3B, TINY_HYBRID

__all__ = ["VISION_SHAPES", "VisionShape", "finish", "write_encoder"]

CHANNELS = 3
MERGE = 2


@dataclass(frozen=True)
class VisionShape:
    """Dimensions of an encoder for a text model of width ``projection``; pixels for ``patch`` and
    ``image_size``.
    """

    name: str
    projection: int
    num_layers: int
    embedding: int
    feed_forward: int
    num_heads: int
    image_size: int
    patch: int = 16


TINY_VISION = VisionShape("tiny-vision", TINY_HYBRID.embedding, 2, 32, 64, 2, 64)
VISION_27B = VisionShape("vision-27b", QWEN36_27B.embedding, 27, 1152, 4304, 16, 768)
VISION_35B_A3B = VisionShape("vision-35b-a3b", QWEN36_35B_A3B.embedding, 27, 1152, 4304, 16, 768)

VISION_SHAPES = {shape.name: shape for shape in (TINY_VISION, VISION_27B, VISION_35B_A3B)}


def write_encoder(path: str | PathLike[str], shape: VisionShape, *, seed: int = 0) -> None:
    """Write an encoder of ``shape`` to ``path``, byte for byte the same for the same arguments,
    whole or not at all.
    """
    target = Path(path)
    with temp_path(target.parent) as temporary:
        writer = GGUFWriter(temporary, "clip")
        _add_metadata(writer, shape, seed)
        for name, dims in _tensors(shape).items():
            writer.add_tensor(name, _values(name, dims, seed))
        finish(writer)
        replace(temporary, target)


def finish(writer: GGUFWriter) -> None:
    """Write the keys and tensors that were added to ``writer``, and close it."""
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_metadata(writer: GGUFWriter, shape: VisionShape, seed: int) -> None:
    """Write the keys of an image encoder of llama.cpp's projector "qwen3vl_merger"."""
    writer.add_name(f"{shape.name} (random weights, seed {seed})")
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_vision_use_gelu(True)
    writer.add_vision_projection_dim(shape.projection)
    writer.add_vision_image_size(shape.image_size)
    writer.add_vision_patch_size(shape.patch)
    writer.add_vision_embedding_length(shape.embedding)
    writer.add_vision_feed_forward_length(shape.feed_forward)
    writer.add_vision_block_count(shape.num_layers)
    writer.add_vision_head_count(shape.num_heads)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_image_mean([0.5] * CHANNELS)
    writer.add_vision_image_std([0.5] * CHANNELS)
    writer.add_vision_spatial_merge_size(MERGE)
    writer.add_vision_is_deepstack_layers([False] * shape.num_layers)


def _tensors(shape: VisionShape) -> dict[str, tuple[int, ...]]:
    """Return name and dimensions of each tensor, as numpy has them."""
    width = shape.embedding
    merged = shape.embedding * MERGE**2
    found: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (width, CHANNELS, shape.patch, shape.patch),
        "v.patch_embd.weight.1": (width, CHANNELS, shape.patch, shape.patch),
        "v.patch_embd.bias": (width,),
        "v.position_embd.weight": ((shape.image_size // shape.patch) ** 2, width),
    }
    matrices = {
        **{f"v.blk.{i}.attn_qkv": (3 * width, width) for i in range(shape.num_layers)},
        **{f"v.blk.{i}.attn_out": (width, width) for i in range(shape.num_layers)},
        **{f"v.blk.{i}.ffn_up": (shape.feed_forward, width) for i in range(shape.num_layers)},
        **{f"v.blk.{i}.ffn_down": (width, shape.feed_forward) for i in range(shape.num_layers)},
        "mm.0": (merged, merged),
        "mm.2": (shape.projection, merged),
    }
    norms = ["v.post_ln", *(f"v.blk.{i}.ln{j}" for i in range(shape.num_layers) for j in (1, 2))]
    for name, dims in [*matrices.items(), *((name, (width,)) for name in norms)]:
        found[f"{name}.weight"] = dims
        found[f"{name}.bias"] = dims[:1]
    return found


def _values(name: str, dims: tuple[int, ...], seed: int) -> NDArray[Any]:
    """Return random values by which activations stay of order one; matrices in half precision,
    vectors and positions not.
    """
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(
        dims, np.float32
    )
    if name == "v.position_embd.weight":
        values *= 0.3
    elif len(dims) == 1:
        values *= 0.1
        values += name.endswith(("ln1.weight", "ln2.weight", "post_ln.weight"))
    else:
        values /= np.sqrt(np.prod(dims[1:]))
        return values.astype(np.float16)
    return values
