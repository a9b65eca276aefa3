"""A vocabulary of bytes and chosen special tokens, and small chat templates of several families."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pyctl.chat.chat_format import ChatFormat, ChatRequest, PreparedChat


class ByteTokenizer:
    """A tokenizer with one token per byte (its value), then ``specials`` from 256 on; it counts the
    text that it was given.
    """

    def __init__(
        self, specials: Sequence[str], *, bos: str = "", eos: str = "", add_bos: bool = False
    ) -> None:
        self._specials = {text: 256 + index for index, text in enumerate(specials)}
        self._pieces = {token: text.encode() for text, token in self._specials.items()}
        self._split = re.compile(
            "(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")"
        )
        self.bos = self._specials.get(bos, -1)
        self.eos = self._specials.get(eos, -1)
        self.add_bos = add_bos
        self.n_chars = 0

    @property
    def n_vocab(self) -> int:
        return 256 + len(self._specials)

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        self.n_chars += len(text)
        tokens = [self.bos] if add_special and self.add_bos else []
        parts = self._split.split(text) if parse_special and self._specials else [text]
        for index, part in enumerate(parts):
            tokens += [self._specials[part]] if index % 2 else part.encode()
        return tokens

    def piece(self, token: int, *, special: bool = True) -> bytes:
        if token < 256:
            return bytes([token])
        return self._pieces[token] if special else b""

    def detokenize(self, tokens: Sequence[int], *, special: bool = True) -> bytes:
        return b"".join(self.piece(token, special=special) for token in tokens)

    def fim_tokens(self) -> dict[str, int]:
        specials = self.special_tokens()
        return {
            name: specials[f"<|fim_{name}|>"]
            for name in ("pre", "suf", "mid")
            if f"<|fim_{name}|>" in specials
        }

    def special_tokens(self) -> dict[str, int]:
        return dict(self._specials)


CHATML_SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)


def chatml_tokenizer() -> ByteTokenizer:
    return ByteTokenizer(CHATML_SPECIALS, eos="<|im_end|>")


def prepare(chat: ChatFormat, messages: Any, **fields: Any) -> PreparedChat:
    """Return the result of ``chat`` for a request with these members."""
    return chat.prepare(ChatRequest(messages, **fields))


def told(turn: PreparedChat, sampled: str) -> dict[str, Any]:
    """Return the message of a reply that was sampled letter by letter."""
    messages: list[dict[str, Any]] = []
    splitter = turn.splitter(messages.append)
    splitter.feed(sampled, list(sampled.encode()))
    splitter.finish()
    return messages[0]


CHATML = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Takes everything but content parts."""

THINKING = """\
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{- raise_exception('system must come first') -}}{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}
{{- '<think>\\n' + (m.reasoning_content or '') | trim + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{{- '<think>\\n' if enable_thinking is not defined or enable_thinking else '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
"""
"""Like Qwen's: a generation header that opens a reasoning block, no system message inside."""

LLAMA3 = """\
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

GEMMA = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('no system role') -}}{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

MISTRAL = """\
{{- bos_token -}}
{%- for m in messages -%}
{{- '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token -}}
{%- endfor -%}
"""

ROLE_TOKENS = """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token -}}
"""

PLAIN = "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}"

PARTS_ONLY = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
"""
