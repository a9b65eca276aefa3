"""Loads a model without its weights, to learn from llama.cpp itself how much memory it will take.

llama.cpp decides where each layer goes and computes the size of every buffer without allocating it (only recurrent
states are allocated), and says so in its log, which is read here; its log is that of the pinned release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as api

from pyctl.config import ModelSettings
from pyctl.engine.llama.devices import devices, host_available
from pyctl.engine.llama.log import captured, last_error
from pyctl.engine.llama.params import LOAD_MODES, ModelParams, context_params
from pyctl.engine.llama.plan import MIB, MemoryPlan, Place, Usage
from pyctl.engine.llama.weights import tensor_bytes
from pyctl.errors import ModelError

__all__ = ["DryRun", "dry_run"]

HOST = "host"

LAYER = re.compile(r"load_tensors: layer +(\d+) assigned to device ([^ ,]+)")
IGNORED = re.compile(r"model has unused tensor (\S+) ")
KV_LAYER = re.compile(r"llama_kv_cache\w*: layer +\d+: dev = (\S+)")
KV_SIZE = re.compile(r"llama_kv_cache\w*: size = +([\d.]+) MiB \( *(\d+) cells")
STATES = re.compile(r"(\S+) RS buffer size = +([\d.]+) MiB")
COMPUTE = re.compile(r"(\S+) compute buffer size = +([\d.]+) MiB")


class DryRun:
    """A model without weights; ``n_layers`` and ``n_ctx_train`` are the file's, ``tensors`` bytes by name."""

    def __init__(self, model: Any, settings: ModelSettings, log: list[str]) -> None:
        self._model = model
        self._settings = settings
        self._gpus = tuple(device for device in devices() if device.is_gpu)
        self.n_ctx_train = int(api.llama_model_n_ctx_train(model))
        self.n_layers = int(api.llama_model_n_layer(model))
        ignored = {match[1] for line in log if (match := IGNORED.search(line))}
        sizes = tensor_bytes(Path(settings.path))
        self.tensors: Mapping[str, int] = {name: size for name, size in sizes.items() if name not in ignored}
        self._weights = self._placed({int(m[1]): m[2] for line in log if (m := LAYER.search(line))})

    def plan(self, n_ctx: int) -> MemoryPlan:
        """The memory for a context of ``n_ctx`` tokens. Raises ModelError if no such context can be made."""
        params = context_params(self._settings, n_ctx)
        with captured() as log:
            ctx = api.llama_init_from_model(self._model, params)
        if not ctx:
            raise ModelError(f"cannot make the context: {last_error('llama.cpp gave no reason')}")
        n_cells = int(api.llama_n_ctx(ctx))
        api.llama_free(ctx)
        kv, states, compute = self._kv(log), self._sizes(STATES, log), self._sizes(COMPUTE, log)
        n_seqs = self._settings.n_seqs
        state_bytes = sum(states.values()) // n_seqs
        if len(states) == 1 and kv.keys() == states.keys() != {HOST}:
            # The extension copies a state within the GPU before it copies it to the host.
            states = {place: size + state_bytes for place, size in states.items()}
        free = {device.name: device.free for device in self._gpus}
        places = []
        for name in (*free, HOST):
            usage = Usage(*(part.get(name, 0) for part in (self._weights, kv, states, compute)))
            if usage.total or name == HOST:
                places.append(Place(name, name != HOST, usage, free[name] if name != HOST else host_available()))
        return MemoryPlan(n_cells, n_seqs, sum(kv.values()) / n_cells, state_bytes, tuple(places))

    def _place(self, name: str) -> str:
        """Where something is that llama.cpp says to be on a device or in a buffer type called ``name``."""
        return next((gpu.name for gpu in self._gpus if name in (gpu.name, gpu.buffer_name)), HOST)

    def _placed(self, layers: Mapping[int, str]) -> dict[str, int]:
        """Bytes of weights by place. The last of ``layers`` is the output; what is in no layer is on the host."""
        output = self._place(layers[max(layers)]) if layers else HOST
        sums: dict[str, int] = {}
        for name, size in self.tensors.items():
            layer = re.match(r"blk\.(\d+)\.", name)
            if layer is not None:
                place = self._place(layers.get(int(layer[1]), HOST))
            else:
                place = output if name.startswith(("output", "cls")) else HOST
            for pattern, buffer in self._settings.placements:
                if re.search(pattern, name):
                    place = self._place(buffer)
                    break
            sums[place] = sums.get(place, 0) + size
        if "output.weight" not in self.tensors and output != HOST:
            # The embeddings serve as output, too, and are there twice.
            sums[output] = sums.get(output, 0) + self.tensors.get("token_embd.weight", 0)
        return sums

    def _kv(self, log: list[str]) -> dict[str, int]:
        """Bytes of K and V by place: each cache is spread evenly over its layers."""
        sums: dict[str, int] = {}
        layers: list[str] = []
        for line in log:
            if match := KV_LAYER.search(line):
                layers.append(self._place(match[1]))
            elif match := KV_SIZE.search(line):
                for place in layers:
                    sums[place] = sums.get(place, 0) + int(float(match[1]) * MIB / len(layers))
                layers = []
        return sums

    def _sizes(self, pattern: re.Pattern[str], log: list[str]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for line in log:
            if match := pattern.search(line):
                place = self._place(match[1])
                sums[place] = sums.get(place, 0) + int(float(match[2]) * MIB)
        return sums


@contextmanager
def dry_run(settings: ModelSettings) -> Iterator[DryRun]:
    """The model of ``settings`` without its weights. Raises ModelError as loading it would."""
    params = ModelParams(settings)
    params.struct.no_alloc = True
    params.struct.load_mode = LOAD_MODES["none"]
    with captured() as log:
        model = api.llama_model_load_from_file(settings.path.encode(), params.struct)
    if not model:
        raise ModelError(f"cannot load the model {settings.path}: {last_error('llama.cpp gave no reason')}")
    try:
        yield DryRun(model, settings, log)
    finally:
        with captured():
            api.llama_model_free(model)
