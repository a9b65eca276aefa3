"""Memory plans on GPUs, next to the memory that a load takes.

    DIR/python -m bench.gpu.memory MODEL [MODEL ...] [--encoder FILE]

A row is one device of one load, in MiB: the plan, of it what llama.cpp counts in its buffers after
the load, and what a GPU holds more than before. The exit status is 1 if llama.cpp counts other
weights, K and V or compute buffers than the plan, or a device holds more than the plan and `SLACK`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.gpu.machine import describe
from bench.gpu.servers import weights_of
from pyctl.llama.fit import breakdown
from pyctl.llama.library.devices import count_heads, devices, tensor_bytes
from pyctl.llama.loader import load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.placements import experts_on_cpu
from pyctl.llama.settings.vision_settings import VisionSettings

SLACK = 512 * 2**20
"""Bytes that a device's library takes for kernels and handles, which no plan counts."""


def measured(
    settings: ModelSettings, drafts: DraftSettings, vision: VisionSettings | None = None
) -> bool:
    """Load a model, print its rows, and return whether the plan was right. SystemExit without the
    extension.
    """
    before = {
        device.name: device.free or 0 for device in devices()
    }  # itself takes the memory that a process needs on a GPU
    loaded = load(settings, drafts=drafts, vision=vision)
    if breakdown.core is None:
        raise SystemExit("the extension is missing: see pyctl --version")
    counted = breakdown.core.breakdown(loaded.backend.ctx)
    right = True
    free = {device.name: device.free or 0 for device in devices()}
    for place in loaded.resolved.memory.places:
        weights, kv, states, compute = counted.get(place.name if place.is_gpu else "", (0, 0, 0, 0))
        usage = place.usage
        held = before[place.name] - free[place.name] if place.is_gpu else 0
        fits = (usage.weights, usage.kv, usage.compute) == (
            weights,
            kv,
            compute,
        ) and held <= usage.total + SLACK
        sums = (usage.total, weights + kv + states + compute, held)
        cells = (Path(settings.path).stem, place.name, *(f"{each / 2**20:,.0f}" for each in sums))
        print(f"| {' | '.join(cells)} | {'' if fits else 'wrong'} |", flush=True)
        right &= fits
    loaded.backend.unload()
    return right


def main() -> None:
    """Print MiB planned, counted by llama.cpp and held on the device, a row per model, setting and
    device. Exit with 1 if a plan was wrong.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--encoder", type=Path, help="of images, for all models")
    options = parser.parse_args()
    head = describe(", ".join(weights_of(model.stem) for model in options.models))
    print("\n".join(f"- {name}: {value}" for name, value in head.items()))
    print("\n| model | device | planned | counted | held | |\n|---|---|---|---|---|---|")
    right = True
    for model in options.models:
        plain = ModelSettings(path=str(model), n_ctx=16_384, load_mode="none")
        small = replace(plain, n_seqs=4, type_k="q8_0", type_v="q8_0")
        for settings in (
            plain,
            small,
            replace(plain, placements=experts_on_cpu(4)),
            replace(plain, n_gpu_layers=12),
        ):
            right &= measured(settings, DraftSettings())
        if options.encoder:
            right &= measured(plain, DraftSettings(), VisionSettings(str(options.encoder)))
        if count_heads(tensor_bytes(model)):
            right &= measured(plain, DraftSettings(draft_types=("draft-mtp",)))
    sys.exit(not right)


if __name__ == "__main__":
    main()
