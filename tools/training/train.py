"""Train the built-in model: python -m tools.training.train --out DIR [--start FILE] [--seconds 400 | --steps N]

Writes builtin.gguf, tokenizer.json, recall.json and train.log to DIR. The data follow from the seed; so do the first
weights, unless --start names a GGUF file that has them. How many steps fit is a matter of the machine, unless --steps
says so. Needs torch, tokenizers and gguf.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tools.training.batches import Batches
from tools.training.export import read_gguf, stored_tokenizer, write_gguf
from tools.training.network import Network, Sizes
from tools.training.recall import recall
from tools.training.tokens import train_tokenizer

# From which share of the training on batches of which length are drawn, and how often.
_LENGTHS = (
    (0.0, {512: 0.5, 2048: 0.3, 16384: 0.2}),
    (0.5, {512: 0.4, 2048: 0.3, 16384: 0.3}),
)
_TO_TRUNK = 0.1
"""Share of the head's gradient that reaches the trunk."""
_WARM_UP = 0.02
_LAST_RATE = 0.02
_REPORT = 15.0
"""Seconds between two lines of the log."""
_FINAL = (
    (1024, 64, 8, False),
    (1024, 64, 8, True),
    (4096, 40, 16, False),
    (4096, 20, 16, True),
    (16384, 16, 32, False),
    (65536, 3, 32, False),
)
"""Tokens, conversations and questions of the last examinations, and whether they are paraphrased."""
_EXAM = 140.0
"""Seconds between two short examinations."""


class Log:
    """Lines on the terminal and in a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:7.1f} {text}"
        print(line, flush=True)
        print(line, file=self._file, flush=True)


class Progress:
    """How far the training is, from 0 to 1, by steps or by the clock."""

    def __init__(self, seconds: float, steps: int | None) -> None:
        self._seconds, self._steps = seconds, steps
        self._began: float | None = None
        self.step = 0

    def begin(self) -> None:
        self._began = time.monotonic()

    @property
    def share(self) -> float:
        if self._began is None:
            return 0.0
        if self._steps is not None:
            return min(1.0, self.step / self._steps)
        return min(1.0, (time.monotonic() - self._began) / self._seconds)


def rate(share: float) -> float:
    """Learning rate, relative to the highest: a short rise, then a cosine."""
    if share < _WARM_UP:
        return max(share / _WARM_UP, 0.01)
    return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP))) / 2


def optimiser_of(network: Network, highest: float) -> torch.optim.Optimizer:
    """AdamW that lets only matrices decay."""
    matrices = [
        p for name, p in network.named_parameters() if p.dim() == 2 and not name.endswith(("embedding", "conv"))
    ]
    decaying = {id(p) for p in matrices}
    others = [p for p in network.parameters() if id(p) not in decaying]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=highest, betas=(0.9, 0.95), fused=True)


def loss_of(network: Network, ids: Tensor, weights: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What to make small, and the mean cross entropy over the assistant's tokens: trunk, first and second draft.

    The trunk's loss is weighted over all tokens; the head's is over the assistant's, after the trunk's states and after
    its own.
    """
    inputs, targets = ids[:, :-1], ids[:, 1:]
    hidden = network(inputs, positions)
    precise = torch.bfloat16 if ids.is_cuda else torch.float32
    logits = network.logits(hidden.to(precise)).float()
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
    spoken = weights == 1
    loss, parts = (each * weights).sum() / weights.sum(), [each.detach()[spoken].mean()]
    state = hidden.detach() + _TO_TRUNK * (hidden - hidden.detach())
    for _ in range(2):
        state = network.drafts(inputs, state, positions)
        logits = functional.linear(state[spoken].to(precise), network.embedding.detach()).float()
        draft = functional.cross_entropy(logits, targets[spoken])
        loss = loss + draft / 2
        parts.append(draft.detach())
    return loss, parts


def gradients(network: Network, ids: Tensor, weights: Tensor, positions: Tensor, pieces: int) -> Tensor:
    """Add the gradients of a batch, taken in `pieces` of equal size, and give its three losses."""
    parts = []
    for piece in zip(*(x.chunk(pieces) for x in (ids, weights, positions)), strict=True):
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            loss, means = loss_of(network, *piece)
        (loss / pieces).backward()
        parts.append(torch.stack(means))
    return torch.stack(parts).mean(0)


def plan(progress: Progress, args: argparse.Namespace) -> Callable[[int], tuple[int, int]]:
    """Rows and length of the batch of a number."""

    def shape(number: int) -> tuple[int, int]:
        # By the clock the batches that are being made belong to a moment not far from now.
        share = number / args.steps if args.steps is not None else progress.share
        mixture = [mix for since, mix in _LENGTHS if since <= share][-1]
        (length,) = Random(f"{args.seed} length {number}").choices(list(mixture), list(mixture.values()))
        length = min(length, args.longest)
        return max(1, args.batch_tokens // length), length

    return shape


def train(
    network: Network,
    tokenizer: Tokenizer,
    device: torch.device,
    batches: Batches,
    progress: Progress,
    args: argparse.Namespace,
    log: Log,
) -> None:
    optimiser = optimiser_of(network, args.rate)
    plain = Network(network.sizes).to(device)  # never compiled: examinations have many lengths
    if args.compile:
        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.recompile_limit = 64
        for block in network.blocks:
            block.compile(dynamic=False)
    log(f"{sum(p.numel() for p in network.parameters())} parameters on {device}, compiled: {args.compile}")
    reported = examined = time.monotonic()
    trunk = [p for name, p in network.named_parameters() if not name.startswith("head.")]
    losses: dict[int, list[Tensor]] = {}
    pieces = 1
    tokens = waited = 0.0
    progress.begin()
    while (share := progress.share) < 1:
        began = time.monotonic()
        length, arrays = batches.next()
        waited += time.monotonic() - began
        ids, weights, positions = (
            torch.from_numpy(arrays[key]).to(device, non_blocking=True) for key in ("ids", "weights", "positions")
        )
        for group in optimiser.param_groups:
            group["lr"] = args.rate * rate(share)
        while True:
            try:
                parts = gradients(network, ids.long(), weights, positions, min(pieces, len(ids)))
                break
            except torch.OutOfMemoryError:
                if pieces >= len(ids):
                    raise
                optimiser.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                pieces *= 2
                log(f"too little memory: batches in {pieces} pieces")
        torch.nn.utils.clip_grad_norm_(trunk, 1.0)
        torch.nn.utils.clip_grad_norm_(network.head.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.setdefault(length, []).append(parts)
        tokens += weights.numel()
        progress.step += 1
        now = time.monotonic()
        if now - reported > _REPORT:
            means = {n: [round(x, 4) for x in torch.stack(some).mean(0).tolist()] for n, some in sorted(losses.items())}
            speed = tokens / (time.monotonic() - reported)
            log(f"{share:5.1%} step {progress.step} loss {means} {speed:,.0f} tokens/s, waited {waited:.1f} s")
            losses, tokens, waited, reported = {}, 0.0, 0.0, time.monotonic()
        if now - examined > _EXAM:
            plain.load_state_dict(network.state_dict())
            write_gguf(args.out / "builtin.gguf", plain, tokenizer)
            for size, other in ((1024, False), (1024, True), (4096, False)):
                score = recall(
                    plain, tokenizer, device, size, conversations=8, count=8, seed=args.seed, paraphrased=other
                )
                log(f"{score['name']}: {score['score']:.1%}, {score['drafts']} drafts; wrong: {score['wrong'][:2]}")
            examined = time.monotonic()
    log(f"trained {progress.step} steps")


def examine(network: Network, tokenizer: Tokenizer, device: torch.device, args: argparse.Namespace, log: Log) -> None:
    results = []
    for tokens, conversations, count, paraphrased in _FINAL:
        if tokens > 4 * args.longest:
            continue
        began = time.monotonic()
        sizes: dict[str, Any] = {"conversations": conversations, "count": count, "paraphrased": paraphrased}
        try:
            result = recall(network, tokenizer, device, tokens, seed=args.seed + 1, **sizes)
        except torch.OutOfMemoryError as error:
            log(f"no examination at {tokens}: {error}")
            continue
        results.append(result)
        spent = time.monotonic() - began
        log(f"{result['name']}: {result['score']:.2%} of {result['asked']}, {result['drafts']} drafts ({spent:.0f} s)")
        log(f"  {result['by_kind']}; wrong: {result['wrong']}")
        (args.out / "recall.json").write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--start", type=Path, metavar="FILE", help="a GGUF file with the first weights, and the vocabulary"
    )
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--longest", type=int, default=16_384)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--compile", action="store_true", help="faster steps after a minute or two of compiling")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "train.log")
    log(f"{vars(args)}")

    tokenizer = stored_tokenizer(args.start) if args.start else None
    tokenizer = tokenizer or train_tokenizer(args.seed)
    tokenizer.save(str(args.out / "tokenizer.json"))
    log("has a tokenizer")
    progress = Progress(args.seconds, args.steps)
    batches = Batches(tokenizer, args.seed, args.workers, plan(progress, args))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    network = Network(Sizes())
    if args.start:
        read_gguf(args.start, network, tokenizer)
    network.to(device)
    train(network, tokenizer, device, batches, progress, args, log)
    batches.close()
    plain = Network(network.sizes).to(device)
    plain.load_state_dict(network.state_dict())
    write_gguf(args.out / "builtin.gguf", plain, tokenizer)
    log("wrote builtin.gguf")
    examine(plain, tokenizer, device, args, log)


if __name__ == "__main__":
    main()
