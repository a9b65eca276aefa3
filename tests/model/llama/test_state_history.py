"""Planes of recurrent cells: plain steps go without them, and no bit depends on that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyctl.engine.backend import SequenceTokens
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.llama.memory import rollbacks
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.prompt import as_tokens

N_MAX = 3
N_PROMPT = 40
ROUNDS = 3
N_PLAIN = 12
"""Plain steps of a round, more than those that still write planes."""

HYBRIDS = ("tiny-hybrid-nextn", "tiny-moe-nextn")


@pytest.fixture
def drafting(open_model: Callable[..., Loaded]) -> Callable[[str], LlamaBackend]:
    """drafting("tiny-hybrid-nextn") -> a backend with a head, all sequences empty."""
    drafts = DraftSettings(draft_types=("draft-mtp",), n_draft=N_MAX)
    return lambda name: open_model(name, n_ctx=512, drafts=drafts).backend


def decode(backend: LlamaBackend, position: int, n_tokens: int) -> int:
    """Evaluate a sure token and drafts, ``n_tokens`` together; return the digest of all their
    logits.
    """
    tokens = tuple(20 + (7 * (position + i)) % 200 for i in range(n_tokens))
    backend.decode([SequenceTokens(0, tokens, position)])
    return hash(tuple(backend.logits_digest(i) for i in range(n_tokens)))


def prepare(backend: LlamaBackend) -> int:
    """Evaluate a prompt in sequence 0; return its tokens."""
    backend.memory.clear(0)
    backend.evaluate(0, as_tokens([20 + 3 * i for i in range(N_PROMPT)]), 0)
    return N_PROMPT


def digests(backend: LlamaBackend) -> list[int]:
    """Return the digests of plain steps and of drafts that are rolled back in turns."""
    position = prepare(backend)
    found = []
    for i in range(ROUNDS):
        for _ in range(N_PLAIN):
            found.append(decode(backend, position, 1))
            position += 1
        found.append(decode(backend, position, 1 + N_MAX))
        position = backend.memory.rollback(0, position + 1 + i)
    return found


@pytest.mark.parametrize("n_steps", [0, rollbacks.PLAIN_STEPS], ids=["none", "as set"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_bits_are_the_same_without_planes(
    drafting: Callable[[str], LlamaBackend],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    n_steps: int,
) -> None:
    backend = drafting(name)
    monkeypatch.setattr(rollbacks, "PLAIN_STEPS", N_PLAIN)
    expected = digests(backend)
    monkeypatch.setattr(rollbacks, "PLAIN_STEPS", n_steps)
    assert digests(backend) == expected


@pytest.mark.parametrize("name", HYBRIDS)
def test_an_evaluation_without_planes_cannot_be_taken_back(
    drafting: Callable[[str], LlamaBackend], name: str
) -> None:
    """The extension's switch has an effect, so that the other tests can fail."""
    backend = drafting(name)

    def after_rollback(*, keeps: bool) -> int:
        position = prepare(backend)
        decode(backend, position, 2)  # another graph, which writes planes
        backend.memory.rollback(0, position + 1)
        position += 1
        backend.memory.kv.keep_history(keeps)
        tokens = tuple(range(60, 61 + N_MAX))
        # By the context itself: `decode` would have the planes written.
        n, outputs = backend.batch.fill_all([SequenceTokens(0, tokens, position)])
        backend.memory.cells.reserve(n)
        backend._evaluate([], n)
        backend.outputs.set(outputs)
        backend.memory.kv.keep_history(True)
        backend.memory.kv.cut(0, position + 1)
        return decode(backend, position + 1, 1)

    assert after_rollback(keeps=False) != after_rollback(keeps=True)
