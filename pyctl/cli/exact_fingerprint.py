"""The fingerprint of a model whose replies are exact."""

from __future__ import annotations

import hashlib

from pyctl.llama.loader import Loaded

__all__ = ["exact_fingerprint"]


def exact_fingerprint(loaded: Loaded) -> str:
    """Return the fingerprint of a model with --exact: other servers also write rows that they
    evaluated together with other sequences.
    """
    text = f"{loaded.info.fingerprint} exact{loaded.split_mode}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
