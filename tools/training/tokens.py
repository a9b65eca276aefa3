"""The byte-level BPE vocabulary, trained on the dialogues themselves, and dialogues as token ids.

The pre-tokenizer is that of Qwen3.5, which llama.cpp knows as "qwen35".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from tools.training.dialogue import Message, conversation

__all__ = ["SPECIAL", "VOCAB_SIZE", "assemble", "merges", "tokenizer_of", "train_tokenizer"]

VOCAB_SIZE = 2560
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Control tokens, then those that are part of a reply's text, from `<tool_call>` on."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ASSISTANT_WEIGHT, OTHER_WEIGHT = 1.0, 0.05


def train_tokenizer(seed: int, chars: int = 12_000_000) -> Tokenizer:
    """A tokenizer of `VOCAB_SIZE` tokens; the special ones have the last ids."""
    random = Random(f"{seed} tokenizer")

    def corpus() -> Iterator[str]:
        left = chars
        while left > 0:
            for message in conversation(random, 1024):
                left -= len(message.text)
                yield f"{message.role}\n{message.thought or ''}\n{message.text}"

    tokenizer = _tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = VOCAB_SIZE - len(SPECIAL)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {size}")
    _add_special(tokenizer)
    return tokenizer


def tokenizer_of(tokens: list[str], pairs: list[str]) -> Tokenizer:
    """The tokenizer with these tokens, in their order, and `merges`."""
    numbers = {token: number for number, token in enumerate(tokens) if token not in SPECIAL}
    tokenizer = _tokenizer(models.BPE(numbers, [tuple(pair.split(" ")) for pair in pairs]))
    _add_special(tokenizer)
    return tokenizer


def _add_special(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])


def _tokenizer(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def merges(tokenizer: Tokenizer) -> list[str]:
    """The merges, each as two tokens with a space between."""
    listing = json.loads(tokenizer.to_str())["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in listing]


def assemble(tokenizer: Tokenizer, messages: list[Message]) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Token ids, the loss weight of each as a target, and the range of each message's text with its end mark."""
    start, end, newline = (tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>", "Ċ"))
    texts = []
    for message in messages:
        thought = "" if message.thought is None else f"<think>\n{message.thought}\n</think>\n\n"
        texts += [message.role, thought + message.text]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    ids: list[int] = []
    weights: list[float] = []
    ranges = []
    for i, message in enumerate(messages):
        role, text = encoded[2 * i], encoded[2 * i + 1]
        ids += [start, *role, newline]
        weights += [OTHER_WEIGHT] * (len(role) + 2)
        ranges.append((len(ids), len(ids) + len(text) + 1))
        ids += [*text, end, newline]
        weight = ASSISTANT_WEIGHT if message.role == "assistant" else OTHER_WEIGHT
        weights += [weight] * (len(text) + 1) + [OTHER_WEIGHT]
    return np.array(ids, np.int64), np.array(weights, np.float32), ranges
