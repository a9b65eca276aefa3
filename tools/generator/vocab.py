"""Vocabularies for generated models: a byte-level one of our own, or one copied out of an existing GGUF file.

Both use GPT-2's alphabet, in which each byte is written as one visible character, and Qwen's special tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any

from gguf import TokenType

from tools.generator.metadata import read_metadata

__all__ = ["BYTE_ALPHABET", "SPECIAL_TOKENS", "Vocab", "byte_vocab", "read_vocab", "token_bytes"]

# The order and the kinds of the real vocabulary: control tokens never appear in a reply's text, the others do.
SPECIAL_TOKENS = {
    "<|endoftext|>": TokenType.CONTROL,
    "<|im_start|>": TokenType.CONTROL,
    "<|im_end|>": TokenType.CONTROL,
    "<|object_ref_start|>": TokenType.CONTROL,
    "<|object_ref_end|>": TokenType.CONTROL,
    "<|box_start|>": TokenType.CONTROL,
    "<|box_end|>": TokenType.CONTROL,
    "<|quad_start|>": TokenType.CONTROL,
    "<|quad_end|>": TokenType.CONTROL,
    "<|vision_start|>": TokenType.CONTROL,
    "<|vision_end|>": TokenType.CONTROL,
    "<|vision_pad|>": TokenType.CONTROL,
    "<|image_pad|>": TokenType.CONTROL,
    "<|video_pad|>": TokenType.CONTROL,
    "<tool_call>": TokenType.USER_DEFINED,
    "</tool_call>": TokenType.USER_DEFINED,
    "<|fim_prefix|>": TokenType.CONTROL,
    "<|fim_middle|>": TokenType.CONTROL,
    "<|fim_suffix|>": TokenType.CONTROL,
    "<|fim_pad|>": TokenType.CONTROL,
    "<|repo_name|>": TokenType.CONTROL,
    "<|file_sep|>": TokenType.CONTROL,
    "<tool_response>": TokenType.USER_DEFINED,
    "</tool_response>": TokenType.USER_DEFINED,
    "<think>": TokenType.USER_DEFINED,
    "</think>": TokenType.USER_DEFINED,
}

_PLACEHOLDER = re.compile(r"\[PAD\d+\]")


@dataclass(frozen=True)
class Vocab:
    """Tokens by id, with what llama.cpp's "gpt2" tokenizer needs to know about them.

    `tokens` are in the byte alphabet except for the special ones, which are plain text. There is no
    beginning-of-sequence token, as in the real models.
    """

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[str, ...]
    pre: str = "qwen35"

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token text to id."""
        return {token: i for i, token in enumerate(self.tokens)}

    def fitted(self, size: int) -> Vocab:
        """This vocabulary with all special tokens, filled up to `size` tokens.

        Trailing placeholders give way first. The filling are words that no text is tokenised to, so that a random
        model with more rows than known tokens still prints something. Raises `ValueError` if `size` is too small.
        """
        end = len(self.tokens)
        while end and _PLACEHOLDER.fullmatch(self.tokens[end - 1]):
            end -= 1
        tokens, types = list(self.tokens[:end]), list(self.types[:end])
        for token, kind in SPECIAL_TOKENS.items():
            if token not in self.ids:
                tokens.append(token)
                types.append(kind)
        if len(tokens) > size:
            raise ValueError(f"vocabulary needs {len(tokens)} tokens, the shape has room for {size}")
        for i in range(len(tokens), size):
            tokens.append(f"{BYTE_ALPHABET[ord(' ')]}w{i}")
            types.append(TokenType.NORMAL)
        return replace(self, tokens=tuple(tokens), types=tuple(types))


def _byte_alphabet() -> str:
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return "".join(chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
"""Character of each byte in GPT-2's vocabularies: visible Latin-1 stands for itself, the rest begins at U+0100."""

_BYTE_OF = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}


def token_bytes(token: str) -> bytes:
    """The bytes that a token in the byte alphabet stands for; plain UTF-8 if it is not written in that alphabet."""
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def byte_vocab() -> Vocab:
    """One token per byte, with the ids that the real vocabulary gives them, then the special tokens."""
    tokens = sorted(BYTE_ALPHABET)
    # llama.cpp wants at least one merge; single bytes never spell these two words.
    merges = ("<|im_start|> <|im_end|>",)
    empty = Vocab(tuple(tokens), (TokenType.NORMAL,) * len(tokens), merges)
    return empty.fitted(len(tokens) + len(SPECIAL_TOKENS))


def read_vocab(path: str | PathLike[str]) -> Vocab:
    """The vocabulary of an existing GGUF file, which may hold no tensors. Raises `ValueError` if it is not "gpt2"."""
    metadata = read_metadata(path)

    def content(key: str) -> Any:
        if (value := metadata.get(f"tokenizer.ggml.{key}")) is None:
            raise ValueError(f"{path} has no tokenizer.ggml.{key}")
        return value

    if (model := content("model")) != "gpt2":
        raise ValueError(f"{path} has a tokenizer of type {model!r}; only 'gpt2' is supported")
    return Vocab(
        tokens=tuple(content("tokens")),
        types=tuple(TokenType(kind) for kind in content("token_type")),
        merges=tuple(content("merges")),
        pre=content("pre"),
    )
