"""How well a network recalls held-out facts: the share of questions whose whole answer it would write, greedily."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from tools.training.dialogue import needles
from tools.training.network import Network
from tools.training.tokens import assemble

__all__ = ["recall"]


@torch.no_grad()
def recall(
    network: Network,
    tokenizer: Tokenizer,
    device: torch.device,
    tokens: int,
    *,
    conversations: int,
    count: int,
    seed: int,
) -> dict[str, Any]:
    """Share of right answers over `conversations` of about `tokens` tokens with `count` facts each, and some mistakes.

    An answer is right if every token of it, the end mark included, is the likeliest one.
    """
    right = asked = 0
    wrong: list[str] = []
    by_kind: dict[str, list[int]] = {}
    lengths = []
    for number in range(conversations):
        messages, questions = needles(Random(f"{seed} recall {tokens} {number}"), tokens, count)
        ids, _, ranges = assemble(tokenizer, messages)
        lengths.append(len(ids))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = network(torch.from_numpy(ids)[None].to(device))[0]
        for question in questions:
            start, end = ranges[question.index]
            guess = network.logits(hidden[start - 1 : end - 1].float()).argmax(-1).tolist()
            hit = guess == ids[start:end].tolist()
            asked += 1
            right += hit
            by_kind.setdefault(question.fact.kind.name, []).append(hit)
            if not hit and len(wrong) < 4:
                wrong.append(f"{tokenizer.decode(ids[start:end].tolist())} | {tokenizer.decode(guess)}")
    return {
        "tokens": sum(lengths) // len(lengths),
        "asked": asked,
        "right": right,
        "score": right / asked,
        "by_kind": {kind: sum(hits) / len(hits) for kind, hits in sorted(by_kind.items())},
        "wrong": wrong,
    }
