"""A tokenizer that remembers the tokens of every piece of text it has seen."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from sys import getsizeof

import numpy as np

from pyctl.chat.tokenizer import Tokenizer
from pyctl.prompt import Tokens, as_tokens
from pyctl.settings.limit import limit

__all__ = ["CachedTokenizer", "readable"]


DEFAULT_MEMO_BYTES = limit(
    64 << 20, "texts with remembered tokens", "the oldest are forgotten", "memory", "bytes"
)

"""The memory for some 8 million tokens of English: many conversations of 100K tokens."""

_ENTRY_BYTES = 200

"""Size of the containers around one remembered piece, roughly."""


def readable(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of ``tokens`` for display: special tokens shown, broken characters replaced,
    images named.
    """
    if min(tokens, default=0) >= 0:
        return tokenizer.detokenize(tokens).decode("utf-8", "replace")
    runs = ((is_image, list(run)) for is_image, run in groupby(tokens, key=lambda token: token < 0))
    return "".join(
        f"[image: {len(run)} tokens]" if is_image else readable(tokenizer, run)
        for is_image, run in runs
    )


class CachedTokenizer:
    """A memory of tokenised text; `tokenize` gives exactly ``tokenizer.tokenize(text,
    parse_special=True)``, as an array. Thread-safe.

    Pieces are forgotten, the longest unused first, when they take more than ``max_bytes``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        specials: Mapping[str, int],
        max_bytes: int = DEFAULT_MEMO_BYTES,
        *,
        usual: Collection[str] | None = None,
    ) -> None:
        """Take ``specials``, the tokenizer's special tokens; text is split at the ``usual`` ones of
        them, None for all.

        Gemma 3 has 6,414, most of them unused. It takes half a second to judge them all.
        """
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        candidates = specials if usual is None else usual
        self._separators = {
            text: as_tokens([specials[text]])
            for text in candidates
            if _is_separator(text, tokenizer, specials)
        }
        self._split = (
            re.compile(f"({_any_of(sorted(self._separators))})") if self._separators else None
        )
        self._lock = threading.Lock()  # guards the two below
        self._memo: OrderedDict[str, Tokens] = OrderedDict()
        self._n_bytes = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of all remembered pieces."""
        return self._n_bytes

    def tokenize(self, text: str) -> Tokens:
        """Return the token ids of ``text``, shape (n,), without BOS."""
        pieces = self._split.split(text) if self._split is not None else [text]
        remembered: list[Tokens | None] = []
        with self._lock:
            memo = self._memo
            for index, piece in enumerate(pieces):
                if index % 2:  # every second piece is a separator
                    remembered.append(self._separators[piece])
                elif piece:
                    tokens = memo.get(piece)
                    if tokens is not None:
                        memo.move_to_end(piece)
                    remembered.append(tokens)
                else:
                    remembered.append(_NOTHING)
        parts = [
            self._add(pieces[i]) if tokens is None else tokens
            for i, tokens in enumerate(remembered)
        ]
        return np.concatenate(parts)

    def _add(self, piece: str) -> Tokens:
        tokens = as_tokens(self._tokenizer.tokenize(piece, add_special=False, parse_special=True))
        with self._lock:
            if piece not in self._memo:
                self._memo[piece] = tokens
                self._n_bytes += _charge(piece, tokens)
            while self._n_bytes > self._max_bytes:
                old, old_tokens = self._memo.popitem(last=False)
                self._n_bytes -= _charge(old, old_tokens)
        return tokens


_NOTHING = as_tokens([])


def _charge(piece: str, tokens: Tokens) -> int:
    return getsizeof(piece) + tokens.nbytes + _ENTRY_BYTES


def _is_separator(text: str, tokenizer: Tokenizer, specials: Mapping[str, int]) -> bool:
    """Return whether text can be split at the special token ``text`` without changing a token.

    llama.cpp looks for special tokens one after the other, so one that overlaps with another cannot
    be judged alone. Some vocabularies also let a token swallow the blanks next to it. Both kinds
    stay inside the pieces.
    """
    if not text.strip() or _overlaps_any(text, specials):
        return False
    before, after = map(tokenizer.tokenize, ("a \n", " \n a"))
    token = specials[text]
    tokens = tokenizer.tokenize(f"a \n{text}{text} \n a")
    return tokens == [*before, token, token, *after]


def _overlaps_any(text: str, others: Iterable[str]) -> bool:
    """Return whether a part of ``text`` can belong to an occurrence of one of ``others``."""
    starts = tuple(text[:size] for size in range(1, len(text)))
    ends = tuple(text[size:] for size in range(1, len(text)))
    for other in others:
        if other == text:
            continue
        if other in text or text in other:
            return True
        if other.endswith(starts) or other.startswith(ends):
            return True
    return False


def _any_of(texts: Sequence[str]) -> str:
    """Return a pattern for any of ``texts``, which are sorted and none the beginning of another;
    shared beginnings are tried once.
    """
    branches = []
    for first, group in groupby(texts, key=lambda text: text[0]):
        rests = [text[1:] for text in group]
        branches.append(
            re.escape(first) + (re.escape(rests[0]) if len(rests) == 1 else _any_of(rests))
        )
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
