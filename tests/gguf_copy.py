"""Copies of a GGUF file with other metadata, or in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tools.generator import finish

__all__ = ["copy_with"]


def copy_with(
    source: Path,
    target: Path,
    metadata: Mapping[str, Any],
    without: tuple[str, ...] = (),
    *,
    order: Callable[[str], int] = lambda name: 0,
) -> Path:
    """Write ``source`` to ``target`` with more ``metadata``, and without some keys; return
    ``target``.

    Numbers are written as 32-bit floats and integers. Tensors are sorted by ``order`` of their
    names.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if (
            name.startswith("GGUF.")
            or name == "general.architecture"
            or name in {*without, *metadata}
        ):
            continue
        kinds = field.types
        writer.add_key_value(
            name, field.contents(), kinds[0], sub_type=kinds[1] if len(kinds) > 1 else None
        )
    for name, value in metadata.items():
        writer.add_key_value(name, value, _type_of(value), sub_type=GGUFValueType.INT32)
    for tensor in sorted(reader.tensors, key=lambda tensor: order(tensor.name)):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return target


def _type_of(value: object) -> GGUFValueType:
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.INT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
        list: GGUFValueType.ARRAY,
    }
    return kinds[type(value)]
