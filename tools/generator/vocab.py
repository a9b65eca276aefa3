"""Vocabularies and the chat template of generated models, and what the metadata of a GGUF file says.

A vocabulary is a byte-level one of our own, or copied out of an existing file. Both use GPT-2's alphabet, in which each
byte is written as one visible character, and Qwen's special tokens. The template is ChatML with tools and without
reasoning; rendering more messages only ever appends, which is what makes prefixes of a conversation reusable.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGUFValueType, TokenType

__all__ = [
    "BYTE_ALPHABET",
    "CHATML_TEMPLATE",
    "SPECIAL_TOKENS",
    "Vocab",
    "byte_vocab",
    "read_metadata",
    "read_vocab",
    "token_bytes",
]

# -- vocabulary --------------------------------------------------------------------------------------------------------

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


# -- template ----------------------------------------------------------------------------------------------------------

CHATML_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}{{- part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools or has_system -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if has_system -%}{{- text(messages[0].content) -}}{%- endif -%}
  {%- if tools -%}
    {{- '\\n\\n' if has_system -}}
    {{- 'Functions you may call, one JSON object per line:' -}}
    {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- '\\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {%- set arguments = function.arguments -%}
      {{- '\\n' if message.content or not loop.first -}}
      {{- '<tool_call>\\n{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
      {{- arguments if arguments is string else arguments | tojson -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


# -- metadata of a file ------------------------------------------------------------------------------------------------

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


def read_metadata(path: str | PathLike[str]) -> dict[str, Any]:
    """All key-value pairs, arrays as lists. Raises `ValueError` for a file that is not GGUF or is cut off.

    `gguf.GGUFReader` makes an array of each string, which takes seconds for a large vocabulary; this takes a fraction
    of one. It knows versions 2 and 3, little-endian, as ggml's docs/gguf.md says.
    """
    with Path(path).open("rb") as file:
        cursor = _Cursor(file)
        try:
            magic, version, _, count = cursor.unpack("4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"{path} is not a GGUF file of version 2 or 3")
            return {cursor.string(): cursor.value(*cursor.unpack("I")) for _ in range(count)}
        except (EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


class _Cursor:
    """Values one after the other from the start of a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}")))

    def string(self) -> str:
        (length,) = self.unpack("Q")
        return self._take(length).decode()

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            element, count = self.unpack("IQ")
            if element in _SCALARS:
                return list(self.unpack(f"{count}{_SCALARS[element]}"))
            return [self.value(element) for _ in range(count)]
        if kind in _SCALARS:
            return self.unpack(_SCALARS[GGUFValueType(kind)])[0]
        raise ValueError(f"unknown type {kind} of a GGUF value")

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("it ends in the middle of its metadata")
        return data
