"""The hint in errors about words that are close to a known one."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the closest of ``known``, "" if none is close.

    A flag that is the beginning of others means the shortest of them.
    """
    from difflib import get_close_matches  # only now: mistakes are rare

    names = sorted(known, key=len)
    begun = [name for name in names if word.startswith("--") and name.startswith(f"{word}-")]
    near = begun or get_close_matches(word, names, n=1, cutoff=0.65)
    return f"; did you mean {near[0]}?" if near else ""
