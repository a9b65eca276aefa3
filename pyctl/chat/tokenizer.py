"""The tokenizer that chat needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Tokenizer"]


class Tokenizer(Protocol):
    """A translator of text to token ids and back. Thread-safe."""

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Return the ids of ``text``. ``add_special`` adds BOS and EOS where the model needs them;
        without ``parse_special`` the text of a control token is ordinary text.
        """
        ...

    def detokenize(self, tokens: Sequence[int], *, special: bool = True) -> bytes:
        """Return the pieces of ``tokens`` joined; special tokens are empty unless ``special``."""
        ...

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """Return the bytes that ``token`` stands for, possibly a part of a character."""
        ...

    @property
    def bos(self) -> int:
        """Id of the beginning-of-sequence token, -1 when there is none."""
        ...

    @property
    def eos(self) -> int:
        """Id of the end-of-sequence token, -1 when there is none."""
        ...

    @property
    def add_bos(self) -> bool:
        """True if the model needs BOS before every prompt."""
        ...

    def special_tokens(self) -> dict[str, int]:
        """Return the ids of all control and user-defined tokens by text."""
        ...

    def fim_tokens(self) -> dict[str, int]:
        """Return the tokens for filling gaps that the model has, by name: pre, suf, mid, rep,
        sep.
        """
        ...
