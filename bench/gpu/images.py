"""Images on a GPU: whether an encoder is bit-reproducible, its time, and the time of a question
about an image.

    python -m bench.gpu.images MODEL [--encoder FILE] [--llama-server BINARY] [--parts encode bits
    ask]

MODEL is a file of Qwen's shape; without ``--encoder`` one of random weights, of the real shape, is
written next to it. ``encode`` loads both in this process: bits of the rows when they are made
again, and milliseconds by size. ``bits`` compares logits after images of several sizes with a cold
run's: cold again, restored, rewound, and after another image in their place. ``ask`` starts servers
and sends a conversation with an image of 1920 x 1080 pixels: new, with another question, after
another conversation, and after a restart. `bench.gpu.memory` measures the memory of both.
"""

from __future__ import annotations

import argparse
import base64
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu.machine import describe
from bench.gpu.servers import Server, llama_server, pyctl, weights_of
from pyctl.files.image_file import ImageFile
from pyctl.llama.images.image_encoder import ImageRows
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.vision_settings import VisionSettings
from pyctl.prompt import ImageSpan, Tokens, as_tokens
from tools.generator import VISION_SHAPES, write_encoder

SIZES = ((640, 480), (1024, 768), (1920, 1080), (4000, 3000))
BITS_SIZES = ((64, 64), (320, 256), (640, 480), (1024, 768), (300, 1200), (1920, 1080))
FLAGS = ("-ngl", "99", "-fa", "on")
N_REPLY = 16
PARTS = ("encode", "bits", "ask")
N_TEXT = (700, 40)
"""Tokens before and after an image."""


def bitmap(width: int, height: int, seed: int) -> bytes:
    """Return a BMP file of smooth random colours."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 40 + 1, width // 40 + 1, 3), np.uint8)
    pixels = np.repeat(np.repeat(coarse, 40, 0), 40, 1)[:height, :width]
    row = -(-3 * width // 4) * 4
    rows = np.zeros((height, row), np.uint8)
    rows[:, : 3 * width] = pixels.reshape(height, -1)
    head = struct.pack("<2sIHHI", b"BM", 54 + rows.size, 0, 0, 54)
    return (
        head
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, rows.size, 0, 0, 0, 0)
        + rows.tobytes()
    )


def encode(model: Path, encoder: Path) -> None:
    """Print the lines of ``encode``."""
    settings = ModelSettings(path=str(model), n_ctx=8192, flash_attn="on", fit=False)
    loaded = load(settings, vision=VisionSettings(str(encoder)))
    images = loaded.images
    assert images is not None
    print(
        "| image | tokens | decoded, ms | encoded, ms | equal bits again | evaluated, ms "
        "|\n|---|---|---|---|---|---|"
    )
    for width, height in SIZES:
        began = time.perf_counter()
        picture = images.picture(ImageFile.parse(bitmap(width, height, width)))
        decoded = (time.perf_counter() - began) * 1e3
        rows = []
        times = []
        for _ in range(4):
            images.rows = ImageRows()
            began = time.perf_counter()
            images.encode(picture)
            times.append((time.perf_counter() - began) * 1e3)
            rows.append(images.encoded_rows(picture, 0, picture.n_tokens))
        same = all(np.array_equal(each, rows[0]) for each in rows) and bool(
            np.isfinite(rows[0]).all()
        )
        loaded.backend.memory.clear(0)
        began = time.perf_counter()
        step = loaded.backend.facts.n_ubatch
        for first in range(0, picture.n_tokens, step):
            tokens = picture.tokens[first : first + step]
            loaded.backend.evaluate(0, tokens, first, output=False, picture=picture)
        loaded.backend.memory.save_state(0, picture.n_tokens)
        loaded.backend.memory.synchronize()
        evaluated = (time.perf_counter() - began) * 1e3
        # The first encoding decodes the file again if another thread has taken its pixels: the
        # least counts.
        cells = [
            f"{width} x {height}",
            picture.n_tokens,
            f"{decoded:,.0f}",
            f"{min(times):,.0f}",
            same,
        ]
        print(f"| {' | '.join(map(str, cells))} | {evaluated:,.0f} |", flush=True)
    loaded.backend.unload()


class Talk:
    """Text, an image, and text, on sequence 0."""

    def __init__(self, backend: LlamaBackend, picture: ImageSpan) -> None:
        random = np.random.default_rng(1)
        self._backend = backend
        self._texts = [as_tokens(random.integers(0, 200, n)) for n in N_TEXT]
        self._picture = replace(picture, start=N_TEXT[0])
        self.start = self._picture.start
        self.end = self._picture.end

    def head(self) -> None:
        """Evaluate the text before the image, in an empty sequence."""
        self._backend.memory.clear(0)
        self._text(self._texts[0], 0)

    def image(self) -> None:
        """Evaluate the image, after it."""
        picture = self._picture
        step = self._backend.facts.n_ubatch
        for first in range(0, picture.n_tokens, step):
            tokens = picture.tokens[first : first + step]
            self._backend.evaluate(0, tokens, self.start + first, output=False, picture=picture)

    def tail(self) -> NDArray[np.float32]:
        """Evaluate the text after the image; return its logits, shape (n_vocab,)."""
        self._text(self._texts[1], self.end)
        return np.array(self._backend.logits(0))

    def _text(self, tokens: Tokens, start: int) -> None:
        for first in range(0, tokens.size, self._backend.facts.n_ubatch):
            self._backend.evaluate(
                0, tokens[first : first + self._backend.facts.n_ubatch], start + first
            )


def bits(
    model: Path, encoder: Path, kv: str, sizes: Sequence[tuple[int, int]] = BITS_SIZES
) -> None:
    """Print the lines of ``bits`` for one type of K and V, for images of these ``sizes``."""
    settings = ModelSettings(
        path=str(model), n_ctx=8192, flash_attn="on", fit=False, type_k=kv, type_v=kv
    )
    loaded = load(settings, vision=VisionSettings(str(encoder)))
    backend = loaded.backend
    images = loaded.images
    assert images is not None
    for width, height in sizes:
        talk, other = (
            Talk(backend, images.picture(ImageFile.parse(bitmap(width, height, seed))))
            for seed in (1, 2)
        )
        equal = 0
        n = talk.end
        talk.head()
        before = (
            backend.memory.save_rows(0, 0, talk.start),
            backend.memory.save_state(0, talk.start),
        )
        talk.image()
        behind = backend.memory.save_rows(0, talk.start, n), backend.memory.save_state(0, n)
        backend.memory.synchronize()
        cold = talk.tail()
        backend.memory.rewind(0, n)
        backend.memory.restore(0, n, (), behind[1])
        equal += np.array_equal(talk.tail(), cold)  # rewound
        images.rows = ImageRows()
        talk.head()
        talk.image()
        equal += np.array_equal(talk.tail(), cold)  # cold, encoded again
        backend.memory.clear(0)
        backend.memory.restore(0, 0, [(before[0], 0, talk.start)])
        backend.memory.restore(0, talk.start, (), before[1])
        other.image()
        branch = other.tail()
        backend.memory.rewind(0, talk.start)
        backend.memory.restore(0, talk.start, (), before[1])
        talk.image()
        equal += np.array_equal(talk.tail(), cold)  # evaluated again in the other's place
        backend.memory.clear(0)
        backend.memory.restore(0, 0, [(before[0], 0, talk.start), (behind[0], talk.start, n)])
        backend.memory.restore(0, n, (), behind[1])
        equal += np.array_equal(talk.tail(), cold)  # restored
        other.head()
        other.image()
        equal += np.array_equal(other.tail(), branch)  # the other, cold
        seen = bool(np.isfinite(cold).all()) and not np.array_equal(branch, cold)
        print(
            f"| {kv} | {width} x {height} | {n - talk.start:,} | {equal} of 5 | {seen} |",
            flush=True,
        )
    backend.memory.clear(0)
    backend.unload()


def conversation(name: str, question: str, seed: int, n_words: int) -> list[dict[str, Any]]:
    """Return a conversation of some text, an image, and a question about it."""
    random = np.random.default_rng(seed)
    text = " ".join(f"{name}{n}" for n in random.integers(0, 10**4, n_words))
    url = "data:image/bmp;base64," + base64.b64encode(bitmap(1920, 1080, seed)).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return [{"role": "system", "content": text}, {"role": "user", "content": parts}]


def ask(server: Server, name: str, n_words: int) -> None:
    """Print the lines of one server."""
    first = "What is in this picture?"
    other = "Which colours does it have?"

    def row(way: str, messages: list[dict[str, Any]]) -> None:
        reply = server.request(messages, N_REPLY)
        source = reply.timings.get("source", "")
        print(
            f"| {name} | {way} | {reply.first_ms:,.0f} | {reply.cached:,} | {reply.evaluated:,} | "
            f"{source} |",
            flush=True,
        )

    with server:
        server.request([{"role": "user", "content": "hello"}], 4)
        row("new", conversation("a", first, 1, n_words))
        row("same image, next question", conversation("a", other, 1, n_words))
        row("another conversation", conversation("b", first, 2, n_words))
        row("and back", conversation("a", other, 1, n_words))
        time.sleep(2)  # snapshots on their way to disk
    with server:
        row("after a restart", conversation("a", other, 1, n_words))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.images", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--encoder", type=Path, metavar="FILE")
    parser.add_argument(
        "--shape", choices=VISION_SHAPES, default="vision-27b", help="shape of a written encoder"
    )
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--words", type=int, default=3500, help="words of text before the image (4 tokens each)"
    )
    parser.add_argument("--flags", default=" ".join(FLAGS), help="flags of both servers")
    options = parser.parse_args(argv)
    encoder = options.encoder or options.model.parent / f"{options.shape}.gguf"
    if not encoder.exists():
        write_encoder(encoder, VISION_SHAPES[options.shape])
    print(
        *(f"- {name}: {value}" for name, value in describe(weights_of(options.model.stem)).items()),
        "",
        sep="\n",
    )
    if "encode" in options.parts:
        encode(options.model, encoder)
    if "bits" in options.parts:
        print(
            "\n| KV | image | tokens | logits equal to the cold run's | another image changes "
            "them |"
        )
        print("|---|---|---|---|---|")
        for kv in ("f16", "q8_0"):
            bits(options.model, encoder, kv)
    if "ask" not in options.parts:
        return
    flags = [
        "-m",
        str(options.model),
        "--mmproj",
        str(encoder),
        "-c",
        "65536",
        "-np",
        "1",
        *options.flags.split(),
    ]
    print(
        "\n| server | request | first token, ms | cached | evaluated | from "
        "|\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as place:
        ask(pyctl(flags, Path(place) / "kv", Path(place) / "pyctl.log"), "pyctl", options.words)
        if options.llama_server:
            log = Path(place) / "llama.log"
            ask(llama_server(options.llama_server, flags, log), "llama-server", options.words)


if __name__ == "__main__":
    main()
