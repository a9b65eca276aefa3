"""What makes a tiny random model babble in words: letters follow letters, and most replies end after a while.

The first channels of the embedding are reserved and no layer writes to them. One is a constant, which gives weights
that have no bias of their own one; the others say what kind of character a token ends in. The output matrix reads
from these a preference for the kind that follows, on top of its random part, which is where the context speaks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import TokenType

from tools.generator.vocab import Vocab, token_bytes

__all__ = ["CONSTANT", "NUM_RESERVED", "bias", "embed", "predict"]

VOWEL, CONSONANT, SPACE, STOP, OTHER, END, NEVER = range(7)

NUM_RESERVED = 1 + 5
CONSTANT = 0

# Logit of the next token's first character by the last character of the token before.
#   vowel  consonant space  stop  other   end  never
_FOLLOWS = np.array(
    [
        [0.0, 3.0, 4.5, 1.5, -5.0, -0.5, -14.0],  # vowel
        [4.5, 0.5, 2.0, 0.0, -5.0, -3.0, -14.0],  # consonant
        [3.0, 3.5, -6.0, -6.0, -5.0, -6.0, -14.0],  # space
        [-3.0, -3.0, 7.0, -6.0, -6.0, 5.5, -14.0],  # stop
        [3.0, 3.5, -2.0, -6.0, -6.0, -6.0, -14.0],  # other: a special token, so also the beginning of a reply
    ]
)

# Value of a reserved channel, and what is left of it after the last norm (measured: the other channels grow).
_LEVEL = 2.0
_NORMED = 1.35


def embed(vocab: Vocab) -> npt.NDArray[np.float32]:
    """The reserved channels of the token embedding, [tokens, NUM_RESERVED]."""
    channels = np.zeros((len(vocab), NUM_RESERVED), np.float32)
    channels[:, CONSTANT] = _LEVEL
    for row, (token, kind) in enumerate(zip(vocab.tokens, vocab.types, strict=True)):
        last = OTHER if kind is not TokenType.NORMAL else _kind(token_bytes(token)[-1])
        channels[row, 1 + last] = _LEVEL
    return channels


def predict(vocab: Vocab) -> npt.NDArray[np.float32]:
    """The reserved columns of the output matrix, [tokens, NUM_RESERVED]."""
    first = np.array([_first(token, kind) for token, kind in zip(vocab.tokens, vocab.types, strict=True)])
    columns = np.zeros((len(vocab), NUM_RESERVED), np.float32)
    columns[:, 1:] = _FOLLOWS.T[first] / _NORMED
    return columns


def bias(value: Any) -> Any:
    """Weight in the `CONSTANT` column that adds about `value` to a product with a normed activation."""
    return np.asarray(value) / _NORMED


def _first(token: str, kind: TokenType) -> int:
    if token == "<|im_end|>":
        return END
    text = token_bytes(token)
    if kind is not TokenType.NORMAL or not all(0x20 <= byte < 0x7F for byte in text):
        return NEVER
    return _kind(text[0])


def _kind(byte: int) -> int:
    char = chr(byte)
    if char in "aeiou":
        return VOWEL
    if "a" <= char <= "z":
        return CONSONANT
    return SPACE if char == " " else STOP if char in ".,!?" else OTHER
