"""Images on a GPU: whether an encoder gives the same bits again, what it costs, and what a question about one costs.

    python -m bench.gpu.images MODEL [--encoder FILE] [--llama-server BINARY] [--parts encode ask]

MODEL is a file of Qwen's shape; without ``--encoder`` one of random weights, of the real shape, is written beside it.
``encode`` loads both in this process: bits of the rows when they are made again, milliseconds by size, and what the
device holds against the plan. ``ask`` starts servers and sends a conversation with an image of 1920 x 1080 pixels: new,
with another question, after another conversation, and after a restart.
"""

from __future__ import annotations

import argparse
import base64
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.machine import describe, vram_mib
from bench.gpu.servers import Server, llama_server, pyctl
from pyctl.engine.llama import MemoryPlan, load
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.vision.vision_settings import VisionSettings
from pyctl.image_file import ImageFile
from tools.generator import VISION_SHAPES, write_encoder

SIZES = ((640, 480), (1024, 768), (1920, 1080), (4000, 3000))
FLAGS = ("-ngl", "99", "-fa", "on")
N_REPLY = 16


def bitmap(width: int, height: int, seed: int) -> bytes:
    """A BMP file of smooth random colours."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 40 + 1, width // 40 + 1, 3), np.uint8)
    pixels = np.repeat(np.repeat(coarse, 40, 0), 40, 1)[:height, :width]
    row = -(-3 * width // 4) * 4
    rows = np.zeros((height, row), np.uint8)
    rows[:, : 3 * width] = pixels.reshape(height, -1)
    head = struct.pack("<2sIHHI", b"BM", 54 + rows.size, 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, rows.size, 0, 0, 0, 0) + rows.tobytes()


def encode(model: Path, encoder: Path) -> None:
    """The lines of ``encode``."""
    plans: list[MemoryPlan] = []
    before = vram_mib() or 0.0
    settings = ModelSettings(path=str(model), n_ctx=8192, flash_attn="on", fit=False)
    loaded = load(settings, announce=plans.append, vision=VisionSettings(str(encoder)))
    images = loaded.images
    assert images is not None
    planned = sum(place.usage.total for place in plans[0].gpus) / 2**20
    vision = sum(place.usage.vision for place in plans[0].places) / 2**20
    held = (vram_mib() or 0.0) - before
    print(f"device: {held:,.0f} MiB held, {planned:,.0f} planned, {vision:,.0f} of these for the encoder\n")
    print(
        "| image | tokens | decoded, ms | encoded, ms | equal bits again | evaluated, ms |\n|---|---|---|---|---|---|"
    )
    for width, height in SIZES:
        began = time.perf_counter()
        picture = images.picture(ImageFile.of(bitmap(width, height, width)))
        decoded = (time.perf_counter() - began) * 1e3
        rows, times = [], []
        for _ in range(4):
            images.rows.clear()
            began = time.perf_counter()
            images.encode(picture)
            times.append((time.perf_counter() - began) * 1e3)
            rows.append(images.rows_of(picture, 0, picture.n_tokens))
        same = all(np.array_equal(each, rows[0]) for each in rows) and bool(np.isfinite(rows[0]).all())
        loaded.backend.clear(0)
        began, step = time.perf_counter(), loaded.backend.n_ubatch
        for first in range(0, picture.n_tokens, step):
            loaded.backend.evaluate_picture(0, picture, first, min(first + step, picture.n_tokens))
        loaded.backend.save_state(0, picture.n_tokens)
        loaded.backend.synchronize()
        evaluated = (time.perf_counter() - began) * 1e3
        # The first encoding decodes the file again if another thread has taken its pixels: the least counts.
        cells = [f"{width} x {height}", picture.n_tokens, f"{decoded:,.0f}", f"{min(times):,.0f}", same]
        print(f"| {' | '.join(map(str, cells))} | {evaluated:,.0f} |", flush=True)
    loaded.backend.unload()


def conversation(name: str, question: str, seed: int, n_words: int) -> list[dict[str, Any]]:
    """Some text, an image, and a question about it."""
    random = np.random.default_rng(seed)
    text = " ".join(f"{name}{n}" for n in random.integers(0, 10**4, n_words))
    url = "data:image/bmp;base64," + base64.b64encode(bitmap(1920, 1080, seed)).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return [{"role": "system", "content": text}, {"role": "user", "content": parts}]


def ask(server: Server, name: str, n_words: int) -> None:
    """The lines of one server."""
    first, other = "What is in this picture?", "Which colours does it have?"

    def row(way: str, messages: list[dict[str, Any]]) -> None:
        reply = server.ask(messages, N_REPLY)
        source = reply.timings.get("source", "")
        print(
            f"| {name} | {way} | {reply.first_ms:,.0f} | {reply.cached:,} | {reply.evaluated:,} | {source} |",
            flush=True,
        )

    with server:
        server.ask([{"role": "user", "content": "hello"}], 4)
        row("new", conversation("a", first, 1, n_words))
        row("same image, next question", conversation("a", other, 1, n_words))
        row("another conversation", conversation("b", first, 2, n_words))
        row("and back", conversation("a", other, 1, n_words))
        time.sleep(2)  # what is on its way to disk
    with server:
        row("after a restart", conversation("a", other, 1, n_words))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.images", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--encoder", type=Path, metavar="FILE")
    parser.add_argument("--shape", choices=VISION_SHAPES, default="vision-27b", help="of the encoder that is written")
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--parts", nargs="+", choices=("encode", "ask"), default=["encode", "ask"])
    parser.add_argument("--words", type=int, default=3500, help="words of text before the image (4 tokens each)")
    parser.add_argument("--flags", default=" ".join(FLAGS), help="of both servers")
    options = parser.parse_args(argv)
    encoder = options.encoder or options.model.parent / f"{options.shape}.gguf"
    if not encoder.exists():
        write_encoder(encoder, VISION_SHAPES[options.shape])
    print(f"{options.model.name}, {encoder.name}; {describe()}\n")
    if "encode" in options.parts:
        encode(options.model, encoder)
    if "ask" not in options.parts:
        return
    flags = ["-m", str(options.model), "--mmproj", str(encoder), "-c", "65536", "-np", "1", *options.flags.split()]
    print("\n| server | request | first token, ms | cached | evaluated | from |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        ask(pyctl(flags, Path(place) / "kv", Path(place) / "pyctl.log"), "pyctl", options.words)
        if options.llama_server:
            log = Path(place) / "llama.log"
            ask(llama_server(options.llama_server, flags, log), "llama-server", options.words)


if __name__ == "__main__":
    main()
