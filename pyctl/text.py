"""What chat, engine and server need of text alike."""

from __future__ import annotations

import secrets
import string

__all__ = ["overlap", "random_id"]

_LETTERS = string.digits + string.ascii_letters


def overlap(text: str, word: str) -> int:
    """Length of the longest proper beginning of ``word`` that ends ``text``."""
    for size in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0


def random_id(size: int = 32) -> str:
    """So many random letters and digits; 32 is how llama-server names replies and calls."""
    return "".join(secrets.choice(_LETTERS) for _ in range(size))
