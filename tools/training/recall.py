"""How well a network recalls held-out facts: the share of questions whose whole answer it would write, greedily."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from tools.training.needles import needles
from tools.training.network import Network
from tools.training.tokens import assemble

__all__ = ["recall"]

_DRAFTS = 3


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
    paraphrased: bool = False,
) -> dict[str, Any]:
    """Share of right answers over `conversations` of about `tokens` tokens with `count` facts each, and some mistakes.

    An answer is right if every token of it, the end mark included, is the likeliest one. `drafts` are the shares of the
    answers' tokens that the head would draft first, second and third. `paraphrased`: as `needles` has it.
    """
    right = asked = 0
    wrong: list[str] = []
    by_kind: dict[str, list[int]] = {}
    lengths = []
    drafted = torch.zeros(_DRAFTS)
    answered = 0
    for number in range(conversations):
        messages, questions = needles(
            Random(f"{seed} recall {tokens} {number}"), tokens, count, paraphrased=paraphrased
        )
        ids, _, ranges = assemble(tokenizer, messages)
        lengths.append(len(ids))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            rows = torch.from_numpy(ids)[None].to(device)
            states = [network(rows)]
            for _ in range(_DRAFTS):
                states.append(network.drafts(rows, states[-1]))
        hidden = states[0][0]
        for question in questions:
            start, end = ranges[question.index]
            guess = network.logits(hidden[start - 1 : end - 1].float()).argmax(-1).tolist()
            hit = guess == ids[start:end].tolist()
            answered += end - start
            for place, state in enumerate(states[1:]):
                draft = network.logits(state[0, start - 1 : end - 1].float()).argmax(-1)
                drafted[place] += (draft.cpu() == torch.from_numpy(ids[start:end])).sum()
            asked += 1
            right += hit
            by_kind.setdefault(question.fact.kind.name, []).append(hit)
            if not hit and len(wrong) < 4:
                wrong.append(f"{tokenizer.decode(ids[start:end].tolist())} | {tokenizer.decode(guess)}")
    average = sum(lengths) // len(lengths)
    return {
        "name": f"recall{' in other words' if paraphrased else ''} at {average}",
        "drafts": [round(share, 4) for share in (drafted / answered).tolist()],
        "tokens": average,
        "asked": asked,
        "right": right,
        "score": right / asked,
        "by_kind": {kind: sum(hits) / len(hits) for kind, hits in sorted(by_kind.items())},
        "wrong": wrong,
    }
