"""Memory plans: the required memory by place, before allocation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from pyctl.engine.pool_plan import PoolPlan

__all__ = ["MemoryPlan", "Place", "Usage"]

MIB = 2**20


@dataclass(frozen=True)
class Usage:
    """The bytes of a model at one place.

    Attributes:
        weights: Bytes of weights.
        kv: Bytes of K and V of the whole context.
        states: Bytes of recurrent states.
        compute: Bytes of compute buffers.
        state_history: Bytes of the states of earlier tokens, and of marks.
        drafts: Bytes of the draft model, except the weights of a head in the model's file.
        vision: Approximate bytes of the vision encoder.
    """

    weights: int = 0
    kv: int = 0
    states: int = 0
    compute: int = 0
    state_history: int = 0
    drafts: int = 0
    vision: int = 0

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(getattr(self, item.name) for item in fields(Usage))

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            *(getattr(self, item.name) + getattr(other, item.name) for item in fields(Usage))
        )


@dataclass(frozen=True)
class Place:
    """The memory of a GPU or of the host.

    Attributes:
        name: The name of the device.
        is_gpu: Whether it is a GPU.
        usage: The bytes that the model takes there.
        free: The free bytes before allocation, None if unknown.
        margin: The bytes that are to stay free.
        is_mapped: Whether the weights are pages of a file, which the system may drop.
    """

    name: str
    is_gpu: bool
    usage: Usage
    free: int | None
    margin: int = 0
    is_mapped: bool = False

    @property
    def missing(self) -> int:
        """The missing bytes if the margin is to stay free, 0 if all fits; mapped weights do not
        count.
        """
        return self.shortage(self.margin, mapped=self.is_mapped)

    def shortage(self, margin: int = 0, *, mapped: bool = False) -> int:
        """Return the missing bytes if ``margin`` is to stay free, 0 if all fits. ``mapped`` weights
        do not count.
        """
        if self.free is None:
            return 0
        return max(self.usage.total - (self.usage.weights if mapped else 0) + margin - self.free, 0)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a model by place.

    Attributes:
        n_ctx: The tokens of the context.
        n_seqs: The number of sequences.
        row_bytes: The bytes of K and V of one token.
        state_bytes: The bytes of one state of a sequence.
        places: The places, the host last.
        layers: llama.cpp's names of the layers' devices, the output last.
        n_state_history: The states of each sequence in addition to the last: planes, and a mark if
            drafts may be longer.
        pool: The division of K and V between a device and the host, None without a pool.
        n_ctx_train: The tokens of the model's own context.
        is_estimate: Whether the plan comes only from the model's file.
        n_layer_bytes: The average bytes of the weights of a layer.
        n_draft_layer_bytes: The same in a draft file, 0 without one.
    """

    n_ctx: int
    n_seqs: int
    row_bytes: float
    state_bytes: int
    places: tuple[Place, ...]
    layers: tuple[str, ...] = ()
    n_state_history: int = 0
    pool: PoolPlan | None = None
    n_ctx_train: int = 0
    is_estimate: bool = False
    n_layer_bytes: int = 0
    n_draft_layer_bytes: int = 0

    @property
    def host(self) -> Place:
        """The host's memory."""
        return self.places[-1]

    @property
    def gpus(self) -> tuple[Place, ...]:
        """The GPUs' memories."""
        return self.places[:-1]

    @property
    def gpus_missing(self) -> int:
        """The bytes that the GPUs lack, with their margins."""
        return sum(place.missing for place in self.gpus)

    @property
    def fits(self) -> bool:
        """True if no place lacks bytes, with the margins."""
        return not any(place.missing for place in self.places)

    @property
    def n_gpu_layers(self) -> int:
        """The number of ``layers`` that are on GPUs."""
        gpus = {place.name for place in self.gpus}
        return sum(name in gpus for name in self.layers)

    def lines(self, cache_bytes: int | None = None) -> Iterator[str]:
        """Yield a table. ``cache_bytes`` is the limit of the prefix cache in RAM, None for none."""
        kv = [place.usage.kv for place in self.places]
        n_streamed = 0
        n_layers = 0
        streamed_bytes = 0
        if self.pool is not None:
            n_streamed = self.pool.n_streamed
            n_layers = self.pool.n_layers
            streamed_bytes = self.pool.host_bytes
            kv[-1] -= streamed_bytes
        sequences = "1 sequence" if self.n_seqs == 1 else f"{self.n_seqs} sequences"
        rows = [
            ("weights", [place.usage.weights for place in self.places]),
            (f"KV of {self.n_ctx:,} tokens, {self.row_bytes / 1024:.1f} KiB each", kv),
            (
                f"KV of {n_streamed} of {n_layers} layers, streamed",
                [0 for _ in self.gpus] + [streamed_bytes],
            ),
            (f"state of {sequences}", [place.usage.states for place in self.places]),
            (
                f"{self.n_state_history} rollback states of each",
                [place.usage.state_history for place in self.places],
            ),
            ("draft model", [place.usage.drafts for place in self.places]),
            ("vision encoder", [place.usage.vision for place in self.places]),
            ("compute buffers", [place.usage.compute for place in self.places]),
            ("prefix cache, at most (--cache-ram)", [0 for _ in self.gpus] + [cache_bytes or 0]),
        ]
        rows = [(title, values) for title, values in rows if any(values)]
        total = [sum(values) for values in zip(*(values for _, values in rows), strict=True)]
        width = max(len(title) for title, _ in rows)
        yield f"{'MiB':{width}}" + "".join(f"  {place.name:>10}" for place in self.places)
        for title, values in (*rows, ("total", total)):
            yield f"{title:{width}}" + "".join(f"  {_mib(value):>10}" for value in values)
        free = ["?" if place.free is None else _mib(place.free) for place in self.places]
        yield f"{'free now':{width}}" + "".join(f"  {value:>10}" for value in free)
        if self.pool is not None and self.gpus:
            yield from self.pool.lines()

    def warnings(self, cache_bytes: int | None = None) -> Iterator[str]:
        """Yield warnings about missing memory, with flags that help."""
        if self.is_estimate:
            yield (
                "without the extension, this memory is an estimate from the model's file, and "
                "rather too large"
            )
        for place in self.gpus:
            if missing := place.shortage():
                flags = "a smaller -c, -ctk q8_0 -ctv q8_0, --n-cpu-moe (experts) or a smaller -ngl"
                if place.usage.state_history or place.usage.drafts:
                    flags = f"--spec-type none, {flags}"
                if place.usage.vision:
                    flags = f"a smaller --image-max-tokens, --no-mmproj-offload, {flags}"
                yield f"{place.name} has {_mib(missing)} MiB too little; to fix it: {flags}"
        host = self.host
        if missing := host.shortage():
            yield (
                f"the host has {_mib(missing)} MiB of memory too little; to fix it: a "
                "smaller model or -c"
            )
        elif host.free is not None:
            left = host.free - host.usage.total
            if cache_bytes is None:
                yield f"--cache-ram -1 sets no limit; {_mib(left)} MiB are left for it"
            elif cache_bytes > left:
                yield (
                    f"the prefix cache may grow to {_mib(cache_bytes)} MiB, {_mib(left)} MiB are "
                    "left; "
                    f"to fix it: --cache-ram {max(left // MIB // 2, 0)}"
                )


def _mib(value: int) -> str:
    return f"{-(-value // MIB):,}" if value else "-"
