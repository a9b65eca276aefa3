"""Training batches, made by worker processes ahead of time. A batch depends on the seed, its number and its length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from random import Random

import numpy as np
from tokenizers import Tokenizer

from tools.training.dialogue import conversation
from tools.training.tokens import assemble

__all__ = ["Batches", "make_batch"]

_AHEAD = 3
"""Batches under way per worker."""
_LONGEST_JUMP = 49_152
_SHORT = 512

_tokenizer: Tokenizer | None = None


def _start(content: str) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.from_str(content)


def make_batch(tokenizer: Tokenizer, seed: int, number: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """`ids` [rows, length + 1], the loss `weights` of the targets and the `positions` of the inputs [rows, length].

    Some rows leap ahead in position here and there, as if thousands of tokens lay between: what was told must be found
    at distances that no training sequence has. Some rows of the shortest batches hold a short conversation alone.
    """
    random = Random(f"{seed} batch {number}")
    ids = np.full((rows, length + 1), tokenizer.token_to_id("<|endoftext|>"), np.int64)
    weights = np.zeros((rows, length + 1), np.float32)
    positions = np.tile(np.arange(length), (rows, 1))
    for row in range(rows):
        filled = 0
        short = length <= _SHORT and random.random() < 0.35
        while filled <= length:
            tokens = random.choice((16, 40, 80, 160, 320)) if short else length - filled + 64
            part, weight, _ = assemble(tokenizer, conversation(random, tokens))
            part, weight = part[: length + 1 - filled], weight[: length + 1 - filled]
            ids[row, filled : filled + len(part)] = part
            weights[row, filled : filled + len(part)] = weight
            filled = length + 1 if short else filled + len(part)
        if random.random() < 0.4:
            for _ in range(random.choice((1, 1, 2, 3))):
                positions[row, random.randrange(length) :] += int(_LONGEST_JUMP ** random.random())
    return {"ids": ids.astype(np.int16), "weights": weights[:, 1:], "positions": positions}


def _work(seed: int, number: int, rows: int, length: int) -> tuple[int, dict[str, np.ndarray]]:
    assert _tokenizer is not None
    return length, make_batch(_tokenizer, seed, number, rows, length)


class Batches:
    """Batches in order; `shape` says how many rows of what length the next one to be made shall have.

    The workers are forked, so make this before anything has started a GPU or threads.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, workers: int, shape: Callable[[int], tuple[int, int]]) -> None:
        self._pool = ProcessPoolExecutor(workers, get_context("fork"), _start, (tokenizer.to_str(),))
        self._seed, self._shape = seed, shape
        self._number = 0
        self._ahead: deque[Future[tuple[int, dict[str, np.ndarray]]]] = deque()
        self._most = workers * _AHEAD
        self._fill()

    def next(self) -> tuple[int, dict[str, np.ndarray]]:
        """The length and the arrays of the next batch."""
        self._fill()
        return self._ahead.popleft().result()

    def _fill(self) -> None:
        while len(self._ahead) < self._most:
            self._ahead.append(self._pool.submit(_work, self._seed, self._number, *self._shape(self._number)))
            self._number += 1

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
