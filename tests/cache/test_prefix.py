"""Prefixes are named by what they hold, whatever order they are asked in."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pyctl.cache.prefix import prefixes
from pyctl.prompt import as_tokens


def test_one_pass_equals_hashing_each_prefix() -> None:
    tokens = as_tokens(np.arange(1000))
    named = prefixes(tokens, [999, 1, 17, 500])
    assert [prefix.n for prefix in named] == [1, 17, 500, 999]
    for prefix in named:
        data = np.arange(prefix.n, dtype="<i4").tobytes()
        assert prefix.digest == hashlib.blake2b(data, digest_size=16).digest()


@pytest.mark.parametrize("length", [0, -1, 11])
def test_lengths_outside_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="not a length"):
        prefixes(as_tokens(range(10)), [length])
