"""python -m tools.generator --shape tiny-hybrid|tiny-moe|tiny-dense|27b|35b-a3b -o out.gguf [--nextn] [--seed N]

The shapes tiny-vision, vision-27b and vision-35b-a3b are encoders of images for such models (--mmproj). gpt-oss-20b,
gemma4-26b-a4b and qwen4exp-20b-a6b are other families.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tools.generator.families import LARGE, write_family
from tools.generator.generate import write_model
from tools.generator.shapes import SHAPES
from tools.generator.vision import VISION_SHAPES, write_encoder
from tools.generator.vocab import read_vocab


def main(argv: Sequence[str] | None = None) -> None:
    """Write one model as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tools.generator", description="Write a GGUF with random weights.")
    parser.add_argument(
        "--shape", choices=[*SHAPES, *VISION_SHAPES, *LARGE], required=True, help="which model to imitate"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="where to write it")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other weights (default 0)")
    parser.add_argument("--layers", type=int, metavar="N", help="only so many layers (default: all)")
    parser.add_argument("--nextn", action="store_true", help="with a head for drafts, as the shapes NAME-nextn have it")
    parser.add_argument("--vocab", type=Path, metavar="FILE", help="take the tokenizer from this GGUF (default: bytes)")
    args = parser.parse_args(argv)

    if args.shape in VISION_SHAPES:
        return write_encoder(args.output, VISION_SHAPES[args.shape], seed=args.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(args.output.name, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if args.shape in LARGE:
            family = LARGE[args.shape] if args.layers is None else LARGE[args.shape].of_layers(range(args.layers))
            return write_family(args.output, family, seed=args.seed, progress=progress)
        shape = SHAPES[args.shape]
        if args.layers is not None:
            shape = replace(shape, num_layers=args.layers)
        if args.nextn:
            shape = shape.with_nextn()
        vocab = None if args.vocab is None else read_vocab(args.vocab)
        write_model(args.output, shape, seed=args.seed, vocab=vocab, progress=progress)


if __name__ == "__main__":
    main()
