"""Models whose batches of any width agree to four digits and more, on any CPU: all of them in f32, rows included.

With f16, which of two tokens is likelier now and then depends on the width of a batch, and on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter

F32_ROWS: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
"""Settings for such a model; flash attention computes with f16."""


def in_f32(source: Path, path: Path) -> Path:
    """The model of ``source``, which is not quantised, at ``path``."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=inner[0] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
