"""Devices with their memory, and the heads of GGUF files, read through ggml
(ggml/include/gguf.h).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pyctl.errors import ModelError
from pyctl.llama.library.bindings import api
from pyctl.llama.library.extension import library_file, open_library
from pyctl.llama.library.library_log import forget_log_errors, last_log_error, redirect_log
from pyctl.machine.control_groups import memory_groups
from pyctl.machine.probe import meminfo
from pyctl.model_files import split_names

__all__ = [
    "TYPES",
    "Device",
    "FileHead",
    "FileTensor",
    "backend_function",
    "check_gguf",
    "count_heads",
    "devices",
    "element_bytes",
    "file_head",
    "ggml_library",
    "host_available",
    "host_total",
    "metadata_text",
    "missing_text",
    "model_files",
    "start_backends",
    "tensor_bytes",
]

CPU = 0
GPU = 1
IGPU = 2
"""ggml_backend_dev_type; higher values are accelerators, which hold no weights."""


@dataclass(frozen=True)
class Device:
    """A device of ggml.

    Attributes:
        name: ggml's name of the device.
        description: The name of the hardware.
        is_gpu: Whether llama.cpp uses it as a GPU.
        handle: A ggml_backend_dev_t.
        buffer_name: The name of its buffer type.
        buffer_type: A ggml_backend_buffer_type_t.
        free: The free bytes, None if unknown.
        total: All bytes, None if unknown.
        is_remote: Whether it is a worker's: a GPU to llama.cpp, whatever its hardware.
    """

    name: str
    description: str
    is_gpu: bool
    handle: int
    buffer_name: str
    buffer_type: int
    free: int | None
    total: int | None
    is_remote: bool = False


@cache
def start_backends() -> None:
    """Initialise llama.cpp once, with the backends next to it: without a path, ggml takes the
    current directory's.
    """
    redirect_log()
    ggml = ggml_library()
    if not ggml.ggml_backend_reg_count():
        with suppress(
            OSError
        ):  # the extension looks up functions of CUDA, which ggml would load for itself alone
            open_library("libggml-cuda.so")
        ggml.ggml_backend_load_all_from_path(os.fsencode(library_file("")))
    api.llama_backend_init()


def devices() -> tuple[Device, ...]:
    """Return all devices, GPUs in llama.cpp's order: it puts workers' first."""
    start_backends()
    ggml = ggml_library()
    all_devices = []
    for index in range(ggml.ggml_backend_dev_count()):
        handle = ggml.ggml_backend_dev_get(index)
        kind = ggml.ggml_backend_dev_type(handle)
        if kind not in (CPU, GPU, IGPU):
            continue
        free = ctypes.c_size_t()
        total = ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        if kind == CPU:
            free.value = host_available() or 0
            total.value = host_total()
        buffer_type = ggml.ggml_backend_dev_buffer_type(handle)
        all_devices.append(
            Device(
                ggml.ggml_backend_dev_name(handle).decode(),
                ggml.ggml_backend_dev_description(handle).decode("utf-8", "replace"),
                kind != CPU,
                handle,
                ggml.ggml_backend_buft_name(buffer_type).decode(),
                buffer_type,
                free.value or None,
                total.value or None,
                ggml.ggml_backend_reg_name(ggml.ggml_backend_dev_backend_reg(handle)) == b"RPC",
            )
        )
    return tuple(sorted(all_devices, key=lambda device: not device.is_remote))


def host_available() -> int | None:
    """Return the memory available without swapping in bytes, None if unknown; limits of control
    groups apply.
    """
    available = meminfo("MemAvailable")
    return (
        min(available, *(max(limit - used, 0) for limit, used in memory_groups()), available)
        if available
        else None
    )


def host_total() -> int:
    """Return the memory of the machine in bytes, 0 if unknown; limits of control groups apply."""
    return min([meminfo("MemTotal"), *(limit for limit, _ in memory_groups())])


class _Params(ctypes.Structure):
    """gguf_init_params; ``ctx`` null creates no tensors."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@cache
def ggml_library() -> Any:
    """Return llama.cpp's ggml library with the signatures used here and in `rpc`.

    It is the one that libllama uses: pip installs libraries under several names, each a separate
    file, and to load another one makes a second list of devices.
    """
    library = ctypes.CDLL(None)
    pointer = ctypes.c_void_p
    size = ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_dev_count": (size, []),
        "ggml_backend_dev_get": (pointer, [size]),
        "ggml_backend_dev_type": (ctypes.c_int, [pointer]),
        "ggml_backend_dev_name": (ctypes.c_char_p, [pointer]),
        "ggml_backend_dev_description": (ctypes.c_char_p, [pointer]),
        "ggml_backend_dev_memory": (None, [pointer, ctypes.POINTER(size), ctypes.POINTER(size)]),
        "ggml_backend_dev_buffer_type": (pointer, [pointer]),
        "ggml_backend_buft_name": (ctypes.c_char_p, [pointer]),
        "ggml_backend_dev_backend_reg": (pointer, [pointer]),
        "ggml_backend_dev_init": (pointer, [pointer, ctypes.c_char_p]),
        "ggml_backend_reg_name": (ctypes.c_char_p, [pointer]),
        "ggml_backend_reg_by_name": (pointer, [ctypes.c_char_p]),
        "ggml_backend_reg_dev_get": (pointer, [pointer, size]),
        "ggml_backend_reg_get_proc_address": (pointer, [pointer, ctypes.c_char_p]),
        "ggml_backend_register": (None, [pointer]),
        "ggml_backend_load": (pointer, [ctypes.c_char_p]),
        "ggml_backend_load_all_from_path": (None, [ctypes.c_char_p]),
        "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
        "ggml_row_size": (size, [ctypes.c_int, ctypes.c_int64]),
        "gguf_init_from_file": (pointer, [ctypes.c_char_p, _Params]),
        "gguf_free": (None, [pointer]),
        "gguf_get_n_tensors": (ctypes.c_int64, [pointer]),
        "gguf_get_tensor_name": (ctypes.c_char_p, [pointer, ctypes.c_int64]),
        "gguf_get_tensor_size": (ctypes.c_size_t, [pointer, ctypes.c_int64]),
        "gguf_get_tensor_offset": (ctypes.c_size_t, [pointer, ctypes.c_int64]),
        "gguf_get_data_offset": (ctypes.c_size_t, [pointer]),
        "gguf_find_key": (ctypes.c_int64, [pointer, ctypes.c_char_p]),
        "gguf_get_val_str": (ctypes.c_char_p, [pointer, ctypes.c_int64]),
        "gguf_get_arr_n": (ctypes.c_size_t, [pointer, ctypes.c_int64]),
        "gguf_get_arr_data": (pointer, [pointer, ctypes.c_int64]),
        "gguf_get_arr_type": (ctypes.c_int, [pointer, ctypes.c_int64]),
        "gguf_get_kv_type": (ctypes.c_int, [pointer, ctypes.c_int64]),
        "gguf_get_val_data": (pointer, [pointer, ctypes.c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


TYPES = {
    ggml_library().ggml_type_name(index).decode(): index for index in range(api.GGML_TYPE_COUNT)
}
"""ggml_type by ggml's name, in lower case."""


def element_bytes(kind: str) -> float:
    """Return the bytes of an element of the type ``kind``."""
    n = 256  # whole blocks of every type
    return float(ggml_library().ggml_row_size(TYPES[kind], n)) / n


def metadata_text(model: Any, key: str) -> str:
    """Return the value of ``key`` in the metadata of a llama_model as text, "" without one."""
    buffer = ctypes.create_string_buffer(1024)
    n = api.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if n >= 0 else ""


def backend_function(backend: bytes, name: bytes, result: Any, *arguments: Any) -> Any:
    """Return the function ``name`` that ggml's ``backend`` offers besides the common ones; None if
    it does not.
    """
    ggml = ggml_library()
    address = ggml.ggml_backend_reg_get_proc_address(ggml.ggml_backend_reg_by_name(backend), name)
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a GGUF file: ``n_bytes`` at offset ``first`` of the file."""

    name: str
    first: int
    n_bytes: int


def model_files(path: Path) -> list[Path]:
    """Return all files of the model, if ``path`` is its file or one of its parts."""
    return [path.with_name(name) for name in split_names(path.name)]


MAX_NAMED = 5


def _files_in(path: Path) -> str:
    """Return the GGUF files of a directory that was named in place of one, for an error; "" for
    none.
    """
    names = sorted(file.name for file in path.glob("*.gguf")) if path.is_dir() else []
    more = ", ..." if len(names) > MAX_NAMED else ""
    return f"; it holds {', '.join(names[:MAX_NAMED])}{more}" if names else ""


def check_gguf(path: Path, what: str = "model") -> None:
    """Raise ModelError if ``path`` cannot be read or is not a GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        way_out = _files_in(path) or (_model_hint(path) if what == "model" else "")
        raise ModelError(f"cannot read the {what} {path}: {error.strerror}{way_out}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file{_other_format(path)}")


_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", re.ASCII)


def _model_hint(path: Path) -> str:
    """Return the way to a model when ``path`` names none, for the end of an error."""
    if path.is_dir():
        return f"; to serve all models below it: --models-dir {path}"
    if _REPOSITORY.fullmatch(str(path)) and path.suffix != ".gguf" and not path.parent.exists():
        return f"; did you mean -hf {path}?"
    return "; pyctl models lists local models, -hf USER/NAME fetches one"


def _other_format(path: Path) -> str:
    """Return the way out if ``path`` is a model in a format that llama.cpp does not read, for the
    end of an error; "" otherwise.
    """
    if path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".mlx"):
        return ""
    return (
        f", and {path.suffix} files cannot be served: -hf USER/NAME-GGUF fetches a GGUF file "
        "of the model"
    )


def missing_text(path: Path) -> str:
    """Return how much of the model at ``path`` is missing, for the end of an error; "" if nothing
    is.

    The last tensor of a file ends at or before the end of the file.
    """
    for file in model_files(path):
        try:
            needed = max(
                (tensor.first + tensor.n_bytes for tensor in file_head(file).tensors), default=0
            )
            size = file.stat().st_size
        except (ModelError, OSError):
            continue
        if size < needed:
            return f"; {file.name} has {size:,} of {needed:,} bytes: fetch it again"
    return ""


@dataclass(frozen=True)
class FileHead:
    """The metadata of one GGUF file.

    Attributes:
        tensors: The tensors in the order of the file.
        arch: The architecture, empty if the file lacks it.
        n_vocab: The tokens of the tokenizer, 0 if the file lacks them.
        numbers: The integers and booleans under those keys of `NUMBERS` that the file has. The keys
            follow the architecture's name.
        kind: Model, vision encoder or adapter.
        has_template: Whether the file has a chat template.
    """

    tensors: tuple[FileTensor, ...]
    arch: str
    n_vocab: int
    numbers: Mapping[str, tuple[int, ...]]
    kind: str = "model"
    has_template: bool = False

    def has(self, tensor: str) -> bool:
        """Return whether the file has a tensor of this name."""
        return any(each.name == tensor for each in self.tensors)


NUMBERS = (
    "expert_count",
    "target_layers",
    "target_hidden_size",
    "embedding_length",
    "block_size",
    "sample_from_anchor",
    "selector_top_k",
    "attention.causal",
    "vision.patch_size",
    "vision.spatial_merge_size",
    "vision.embedding_length",
    "vision.feed_forward_length",
    "vision.attention.head_count",
)
"""Names of mixtures of experts, of draft models that read rows of the target model, and of vision
encoders.
"""

_FORMS: dict[int, Any] = {4: ctypes.c_uint32, 5: ctypes.c_int32, 7: ctypes.c_bool}
_STRING = 8
_ARRAY = 9
"""gguf_type."""


def _numbers(ggml: Any, head: Any, key: str) -> tuple[int, ...]:
    key_id = ggml.gguf_find_key(head, key.encode())
    is_array = key_id >= 0 and ggml.gguf_get_kv_type(head, key_id) == _ARRAY
    form = (
        _FORMS.get((ggml.gguf_get_arr_type if is_array else ggml.gguf_get_kv_type)(head, key_id))
        if key_id >= 0
        else None
    )
    if form is None:
        return ()
    n, data = (
        (ggml.gguf_get_arr_n, ggml.gguf_get_arr_data)
        if is_array
        else (lambda *_: 1, ggml.gguf_get_val_data)
    )
    return tuple(map(int, (form * n(head, key_id)).from_address(data(head, key_id))))


def _text(ggml: Any, head: Any, key: str) -> str:
    key_id = ggml.gguf_find_key(head, key.encode())
    is_text = (
        key_id >= 0 and ggml.gguf_get_kv_type(head, key_id) == _STRING
    )  # ggml would end the process
    return str(ggml.gguf_get_val_str(head, key_id).decode("utf-8", "replace")) if is_text else ""


def file_head(file: Path) -> FileHead:
    """Return the head of a GGUF file, which is read again once the file has changed. Raises
    ModelError.
    """
    check_gguf(file)
    status = file.stat()
    return _read_head(str(file), (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=16)
def _read_head(file: str, _status: tuple[int, ...]) -> FileHead:
    """Return the metadata of ``file``. Raises ModelError if the file cannot be read.

    The metadata have all texts of the vocabulary: reading them takes 35 ms with 250,000 tokens.
    """
    ggml = ggml_library()
    redirect_log()
    forget_log_errors()
    head = ggml.gguf_init_from_file(file.encode(), _Params(True, None))
    if not head:
        raise ModelError(
            f"cannot read the metadata of {file}: {last_log_error('ggml gave no reason')}"
        )
    try:
        data = ggml.gguf_get_data_offset(head)
        tensors = tuple(
            FileTensor(
                ggml.gguf_get_tensor_name(head, index).decode("utf-8", "replace"),
                data + ggml.gguf_get_tensor_offset(head, index),
                ggml.gguf_get_tensor_size(head, index),
            )
            for index in range(ggml.gguf_get_n_tensors(head))
        )
        tokens, *templates = (
            ggml.gguf_find_key(head, f"tokenizer.{key}".encode())
            for key in ("ggml.tokens", "chat_template", "chat_template.tool_use")
        )
        arch, kind = (_text(ggml, head, f"general.{key}") for key in ("architecture", "type"))
        kind = "vision encoder" if arch == "clip" else kind if kind == "adapter" else "model"
        numbers = {
            key: values for key in NUMBERS if (values := _numbers(ggml, head, f"{arch}.{key}"))
        }
        n_vocab = ggml.gguf_get_arr_n(head, tokens) if tokens >= 0 else 0
        return FileHead(tensors, arch, n_vocab, numbers, kind, max(templates) >= 0)
    finally:
        ggml.gguf_free(head)


def tensor_bytes(path: Path) -> Mapping[str, int]:
    """Return bytes by tensor name, over all files of a split model. Raises ModelError."""
    return {
        tensor.name: tensor.n_bytes
        for file in model_files(path)
        for tensor in file_head(file).tensors
    }


def count_heads(tensors: Iterable[str]) -> int:
    """Return the number of draft heads of the model with ``tensors``, which are names."""
    return sum(name.endswith(".nextn.eh_proj.weight") for name in tensors)
