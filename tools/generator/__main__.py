"""python -m tools.generator --shape tiny-hybrid|tiny-moe|tiny-dense|27b|35b-a3b -o out.gguf [--seed
N]

Shapes NAME-nextn have a head for drafts. tiny-vision, vision-27b and vision-35b-a3b are encoders of
images for such models (--mmproj). gpt-oss-20b, gemma4-26b-a4b and qwen4exp-20b-a6b are other
families.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools.generator.families import LARGE, write_family
from tools.generator.generate import write_model
from tools.generator.shapes import SHAPES
from tools.generator.vision import VISION_SHAPES, write_encoder


def main(argv: Sequence[str] | None = None) -> None:
    """Write the model of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.generator", description="Write a GGUF with random weights."
    )
    shapes = [*SHAPES, *VISION_SHAPES, *LARGE]
    parser.add_argument("--shape", choices=shapes, required=True, help="which model to imitate")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="where to write it"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another seed, other weights (default 0)"
    )
    args = parser.parse_args(argv)
    if args.shape in VISION_SHAPES:
        write_encoder(args.output, VISION_SHAPES[args.shape], seed=args.seed)
    elif args.shape in LARGE:
        write_family(args.output, LARGE[args.shape], seed=args.seed)
    else:
        write_model(args.output, SHAPES[args.shape], seed=args.seed)


if __name__ == "__main__":
    main()
