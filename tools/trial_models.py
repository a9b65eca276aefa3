"""python -m tools.trial_models: write pyctl/model_files/trial, on which `pyctl setup --llama-cpp`
tries a release.

At least one for each class of memory that `library::parts_of` takes apart, and one with a head for
drafts. Every weight of a matrix is one of two values, so that a file takes a bit for each.
"""

from __future__ import annotations

import lzma
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tools.generator import SHAPES, finish
from tools.generator.families import write_family
from tools.generator.generate import write_model
from tools.generator.zoo import ZOO

OUTPUT = Path(__file__).resolve().parents[1] / "pyctl" / "model_files" / "trial"

OPTIONAL = (".scale", ".input_scale", "attn_q.bias", "attn_k.bias", "attn_v.bias")
"""Ends of the names of tensors that a release may lack."""


def write_small(source: Path, target: Path) -> None:
    """Write the model ``source`` as ``target``, compressed, without optional tensors."""
    reader = GGUFReader(source)
    writer = GGUFWriter(
        target.with_suffix(""), str(reader.fields["general.architecture"].contents())
    )
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            element = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        if not tensor.name.endswith(OPTIONAL):
            is_matrix = len(tensor.shape) > 1
            data = np.sign(tensor.data) * np.std(tensor.data) if is_matrix else tensor.data
            writer.add_tensor(tensor.name, data.astype(tensor.data.dtype))
    finish(writer)
    target.write_bytes(
        lzma.compress(target.with_suffix("").read_bytes(), preset=9 | lzma.PRESET_EXTREME)
    )
    target.with_suffix("").unlink()


FAMILY_OF = {
    "llama_kv_cache-moe": "tiny-qwen3moe",
    "llama_kv_cache_dsa": "tiny-deepseek32",
    "llama_kv_cache_dsa_iswa": "tiny-dots3note",
    "llama_kv_cache_dsv4": "tiny-deepseek4",
    "llama_kv_cache_iswa": "tiny-gemma3",
    "llama_kv_cache_msa": "tiny-minimax-m3",
    "llama_memory_hybrid_idx": "tiny-qwen4exp",
    "llama_memory_hybrid_idx-pools": "tiny-glm5-next",
    "llama_memory_hybrid_iswa": "tiny-lfm2-window",
    "llama_memory_recurrent": "tiny-mamba2",
    "llama_memory_recurrent-shift": "tiny-rwkv7",
}
"""Families by the names of their files: the class of memory, and after a hyphen a difference to
others of it.
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        made = {
            each: Path(name) / f"{each}.gguf"
            for each in ("llama_kv_cache", "llama_memory_hybrid-drafts")
        }
        write_model(made["llama_kv_cache"], SHAPES["tiny-dense"])
        write_model(made["llama_memory_hybrid-drafts"], SHAPES["tiny-hybrid-nextn"])
        for each, family in FAMILY_OF.items():
            made[each] = Path(name) / f"{each}.gguf"
            write_family(made[each], ZOO[family])
        for each, path in made.items():
            write_small(path, OUTPUT / f"{each}.gguf.xz")


if __name__ == "__main__":
    main()
