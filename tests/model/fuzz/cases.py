"""The number of cases that the fuzzers try, and their seed: PYCTL_FUZZ=10000 PYCTL_FUZZ_SEED=7
pytest -s tests/model/fuzz

Without PYCTL_FUZZ the cases are the same ones each time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, seed, settings

__all__ = ["N_CASES", "fuzzed"]

F = TypeVar("F", bound=Callable[..., Any])

_CHOSEN = os.environ.get("PYCTL_FUZZ")

N_CASES = int(_CHOSEN or 40)

_SEED = int(os.environ.get("PYCTL_FUZZ_SEED") or (secrets.randbits(32) if _CHOSEN else 0))


def fuzzed(test: F) -> F:
    """Decorate ``test`` to try `N_CASES` cases, and print the seed."""
    print(f"PYCTL_FUZZ_SEED={_SEED} for {test.__module__}.{test.__name__}, {N_CASES} cases")
    chosen = settings(
        max_examples=N_CASES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    found: F = pytest.mark.timeout(max(300, N_CASES))(seed(_SEED)(chosen(test)))
    return found
