"""What only a process of its own can measure: copies against pinned ones, logits, and memory taken from others.

    python -m bench.gpu.inside kv|exact MODEL TOKENS...     # one JSON object per line
    python -m bench.gpu.inside ballast MIB                  # leaves MIB of device memory free until stdin closes

measure.py runs it.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MIB = 2**20


def kv(model: str, sizes: list[int]) -> None:
    from bench.kv import rates
    from pyctl.engine.llama import load, reserve_pinned
    from pyctl.engine.model_settings import ModelSettings

    reserve_pinned(None)
    loaded = load(ModelSettings(path=model, n_ctx=max(sizes) + 64, flash_attn="on"))
    for n in sizes:
        for found in rates(loaded.backend, n):
            say(
                what=found.what, tokens=n, mb=found.size / 1e6, copy_out=found.copy_out, copy_in=found.copy_in,
                out=found.out, out_share=found.out / found.copy_out, back=found.back,
                back_share=found.back / found.copy_in,
            )  # fmt: skip
    loaded.backend.unload()


def exact(model: str, sizes: list[int]) -> None:
    from bench.exact import COLUMNS, differences

    for (kind, flash), found in differences(model, sizes[0], 512, -1):
        say(kv=kind, flash=flash, tokens=sizes[0], differences=dict(zip(COLUMNS, map(float, found), strict=True)))


def ballast(left_mib: int) -> None:
    from bench.cuda import open_device

    device = open_device()
    if device is None:
        raise SystemExit("no GPU")
    with ExitStack() as held:
        size = device.free() - left_mib * MIB
        if size < 0:
            raise SystemExit(f"only {device.free() // MIB} MiB are free")
        held.enter_context(device.memory(size))
        say(free_mib=device.free() / MIB)
        sys.stdin.read()


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "ballast":
        ballast(int(arguments[0]))
    else:
        {"kv": kv, "exact": exact}[command](arguments[0], [int(n) for n in arguments[1:]])


if __name__ == "__main__":
    main()
