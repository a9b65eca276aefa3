"""Models without weights: their numbers, and those of their contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pyctl.errors import ModelError
from pyctl.llama.fit.dry_runs import dry_run
from pyctl.llama.fit.empty_model import empty_model
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved
from tools.generator import SHAPES

ModelPath = Callable[[str], Path]


@pytest.fixture
def resolved(model_path: ModelPath) -> Resolved:
    path = str(model_path("tiny-hybrid-nextn"))
    return Resolved.from_settings(
        ModelSettings(path=path, n_seqs=2), DraftSettings(("draft-mtp",), n_draft=3)
    )


def test_a_head_counts_where_it_is_used(resolved: Resolved) -> None:
    with (
        empty_model(resolved, with_head=True) as whole,
        empty_model(resolved, with_head=False) as plain,
    ):
        assert whole.n_layers == plain.n_layers
        assert set(plain.tensors) < set(whole.tensors) == set(resolved.tensors)
        assert {name.split(".")[1] for name in set(whole.tensors) - set(plain.tensors)} == {
            str(whole.n_layers - 1)
        }
        assert whole.metadata("general.architecture") == whole.file_head.arch
        assert whole.metadata("no.such.key") == ""


def test_contexts_cost_what_their_size_needs(resolved: Resolved) -> None:
    shape = SHAPES["tiny-hybrid-nextn"]
    with empty_model(resolved, with_head=True) as model:
        with model.context(1000) as ctx:
            small = model.cost(ctx)
        with model.context(2048) as ctx:
            large = model.cost(ctx)
            with model.head_context(resolved.head, ctx, 2048) as head_ctx:
                head = model.cost(head_ctx)
    assert small.n_cells == 1024
    assert large.n_cells == head.n_cells == 2048
    assert small.n_states == 4
    assert head.n_states == 1
    kv = [sum(parts[1] for parts in cost.parts.values()) for cost in (small, large)]
    assert kv == [n * shape.row_bytes("f16", "f16") for n in (1024, 2048)]
    assert 0 < sum(parts[1] for parts in head.parts.values()) < kv[1]


def test_a_model_without_a_head_is_refused(model_path: ModelPath, resolved: Resolved) -> None:
    plain = replace(resolved.model, path=str(model_path("tiny-hybrid")))
    opened = dry_run(replace(resolved, model=plain))
    with pytest.raises(ModelError, match="has no head"), opened:
        pass
