"""The interface between engine and model: all backends have all of it, with the same parameters."""

from __future__ import annotations

import inspect
from types import FunctionType

import pytest

from pyctl.cache.ports import SequenceMemory
from pyctl.engine.backend import (
    Backend,
    BackendFacts,
    Control,
    Evaluator,
    Placement,
    SequenceTokens,
    VerifyOutputs,
    Vocabulary,
)
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.memory.context_memory import ContextMemory
from tests.fake import FakeBackend

PORTS: dict[type, tuple[type, ...]] = {
    Backend: (FakeBackend, LlamaBackend),
    Evaluator: (FakeBackend, LlamaBackend),
    SequenceMemory: (FakeBackend, ContextMemory),
    Vocabulary: (FakeBackend,),
    Control: (FakeBackend,),
}
"""Each protocol, and the classes that keep it."""


def methods(port: type) -> list[str]:
    return [
        name
        for name, member in vars(port).items()
        if isinstance(member, FunctionType) and not name.startswith("_")
    ]


def parameters(owner: type, name: str) -> list[tuple[str, object]]:
    """Return the names and kinds of the parameters of a method."""
    found = inspect.signature(getattr(owner, name)).parameters.values()
    return [(parameter.name, parameter.kind) for parameter in found]


@pytest.mark.parametrize(
    ("port", "owner"),
    [(port, owner) for port, owners in PORTS.items() for owner in owners],
    ids=lambda value: value.__name__,
)
def test_each_method_takes_the_parameters_of_the_protocol(port: type, owner: type) -> None:
    for name in methods(port):
        assert parameters(owner, name) == parameters(port, name), name


@pytest.mark.parametrize(
    ("tokens", "n_sure", "n_drafts"), [((1,), 1, 0), ((1, 2, 3), 1, 2), ((1, 2, 3), 3, 0)]
)
def test_the_tokens_after_the_sure_ones_are_drafts(
    tokens: tuple[int, ...], n_sure: int, n_drafts: int
) -> None:
    assert SequenceTokens(0, tokens, 0, n_sure).n_drafts == n_drafts


def test_by_default_nothing_is_drafted_and_nothing_is_taken_back() -> None:
    facts = BackendFacts(n_ctx=1, n_cells=1, n_seqs=1, n_ubatch=1, n_outputs=1)
    assert facts.n_rollback == 0
    assert facts.max_drafts == 0
    assert facts.draft_type == ""
    assert VerifyOutputs(0).drafts == ()


def test_by_default_all_is_in_half_precision_on_the_cpu() -> None:
    placement = Placement()
    assert placement.type_k == placement.type_v == "f16"
    assert placement.n_gpu_layers == 0
