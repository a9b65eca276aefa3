"""Vocabularies and the chat template of generated models.

A vocabulary is a byte-level one of our own, or copied out of an existing file. Both use GPT-2's
alphabet, in which each byte is written as one visible character, and Qwen's special tokens. The
template is ChatML with tools and without reasoning; rendering more messages only ever appends,
which is what makes prefixes of a conversation reusable.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from os import PathLike

from gguf import TokenType

from pyctl.llama.library.extension import open_library

__all__ = [
    "BYTE_ALPHABET",
    "CHATML_TEMPLATE",
    "SPECIAL_TOKENS",
    "InitParams",
    "Vocab",
    "byte_vocab",
    "ggml",
    "read_vocab",
    "token_bytes",
]

# -- vocabulary
# ----------------------------------------------------------------------------------

# The order and the kinds of the real vocabulary: control tokens never appear in a reply's text, the
# others do.
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
    """Tokens by id, with what llama.cpp's "gpt2" tokenizer needs of them.

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
        """Return this vocabulary with all special tokens, filled up to `size` tokens.

        Trailing placeholders give way first. The filling are words that no text is tokenised to, so
        that a random model with more rows than known tokens still prints something. Raises
        `ValueError` if `size` is too small.
        """
        end = len(self.tokens)
        while end and _PLACEHOLDER.fullmatch(self.tokens[end - 1]):
            end -= 1
        tokens = list(self.tokens[:end])
        types = list(self.types[:end])
        for token, kind in SPECIAL_TOKENS.items():
            if token not in self.ids:
                tokens.append(token)
                types.append(kind)
        if len(tokens) > size:
            raise ValueError(
                f"vocabulary needs {len(tokens)} tokens, the shape has room for {size}"
            )
        for i in range(len(tokens), size):
            tokens.append(f"{BYTE_ALPHABET[ord(' ')]}w{i}")
            types.append(TokenType.NORMAL)
        return replace(self, tokens=tuple(tokens), types=tuple(types))


def _byte_alphabet() -> str:
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return "".join(
        chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)
    )


BYTE_ALPHABET = _byte_alphabet()
"""Character of each byte in GPT-2's vocabularies: visible Latin-1 stands for itself, the rest
starts at U+0100.
"""

_BYTE_OF = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}


def token_bytes(token: str) -> bytes:
    """Return the bytes that a token in the byte alphabet stands for; plain UTF-8 if it is not
    written in that alphabet.
    """
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def byte_vocab() -> Vocab:
    """Return a vocabulary of one token per byte, with the ids that the real vocabulary gives them,
    then the special tokens.
    """
    tokens = sorted(BYTE_ALPHABET)
    # llama.cpp needs at least one merge; single bytes never spell these two words.
    merges = ("<|im_start|> <|im_end|>",)
    empty = Vocab(tuple(tokens), (TokenType.NORMAL,) * len(tokens), merges)
    return empty.fitted(len(tokens) + len(SPECIAL_TOKENS))


class InitParams(ctypes.Structure):
    """`gguf_init_params` of ggml's gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@cache
def ggml() -> ctypes.CDLL:
    """Return ggml's own reader of GGUF files: gguf's takes seconds for a large vocabulary."""
    library = open_library("libggml-base.so")
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, InitParams]
    library.gguf_find_key.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.gguf_find_key.restype = ctypes.c_int64
    library.gguf_get_arr_str.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t]
    for name in ("gguf_get_val_str", "gguf_get_arr_n", "gguf_get_arr_data"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_int64]
    for name in ("gguf_init_from_file", "gguf_get_arr_data"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("gguf_get_val_str", "gguf_get_arr_str", "ggml_get_name"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in ("gguf_free", "ggml_get_name"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.gguf_get_arr_n.restype = ctypes.c_size_t
    return library


def read_vocab(path: str | PathLike[str]) -> Vocab:
    """Return the vocabulary of an existing GGUF file, which may hold no tensors. Raises
    `ValueError` if it is not "gpt2".
    """
    file = ggml().gguf_init_from_file(os.fsencode(path), InitParams(True, None))
    if not file:
        raise ValueError(f"{path} is not a GGUF file")

    def key(name: str) -> int:
        if (found := int(ggml().gguf_find_key(file, f"tokenizer.ggml.{name}".encode()))) < 0:
            raise ValueError(f"{path} has no tokenizer.ggml.{name}")
        return found

    def strings(name: str) -> tuple[str, ...]:
        at = key(name)
        return tuple(
            ggml().gguf_get_arr_str(file, at, i).decode()
            for i in range(ggml().gguf_get_arr_n(file, at))
        )

    try:
        if (model := ggml().gguf_get_val_str(file, key("model")).decode()) != "gpt2":
            raise ValueError(f"{path} has a tokenizer of type {model!r}; only 'gpt2' is supported")
        tokens = strings("tokens")
        types = (ctypes.c_int32 * len(tokens)).from_address(
            ggml().gguf_get_arr_data(file, key("token_type"))
        )
        pre = ggml().gguf_get_val_str(file, key("pre")).decode()
        return Vocab(tokens, tuple(map(TokenType, types)), strings("merges"), pre)
    finally:
        ggml().gguf_free(file)


# -- template
# ----------------------------------------------------------------------------------

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
