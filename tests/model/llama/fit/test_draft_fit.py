"""Drafts by default: the memory that they may take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pyctl.errors import ModelError
from pyctl.llama.fit import draft_fit, dry_runs, fitting
from pyctl.llama.fit.draft_fit import DraftChoice
from pyctl.llama.fit.dry_runs import DryRun, MemoryMeter
from pyctl.llama.library.devices import Device
from pyctl.llama.loader import load
from pyctl.llama.settings.draft_settings import AUTOMATIC, PRIVATE, DraftSettings
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan, Place, Usage
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved

AUTO = DraftSettings(AUTOMATIC, n_draft=2, draft_type_k="q8_0")
NONE = replace(AUTO, draft_types=())

GPU = Device("CUDA0", "a GPU", True, 0, "CUDA0", 0, 24_000 * MIB, 24_000 * MIB)

Fit = Callable[..., DraftSettings]


class Run:
    """A model of 15,000 MiB, 0.1 MiB of KV a token, and states of 150 MiB on a GPU, of which 23,800
    MiB are free.
    """

    n_ctx_train = 262_144
    n_layers = 64
    tensors: ClassVar[dict[str, int]] = {}

    def __init__(
        self,
        settings: ModelSettings,
        drafts: DraftSettings,
        free: int,
        states_on_host: int,
        *,
        states: bool,
    ) -> None:
        self._settings = settings
        self._drafts = drafts
        self._free = free
        self._on_host = states_on_host
        self._has_states = states

    def plan(self, n_ctx: int) -> MemoryPlan:
        """Return the plan of a context of ``n_ctx`` tokens with these drafts."""
        n_seqs = self._settings.n_seqs
        n_draft = self._drafts.n_draft if self._drafts.draft_types else 0
        states = 150 * n_seqs * MIB
        has_head = self._drafts.has("draft-mtp")
        n_state_history = n_draft * has_head + self._drafts.has("cache")
        gpu = Usage(
            15_000 * MIB,
            n_ctx * MIB // 16,
            states,
            500 * MIB,
            n_state_history * states,
            700 * MIB * has_head,
        )
        host = Place("host", False, Usage(states=self._on_host * MIB), 64_000 * MIB)
        return MemoryPlan(
            n_ctx,
            n_seqs,
            MIB / 16,
            150 * MIB,
            (Place("CUDA0", True, gpu, self._free * MIB, self._settings.fit_target[0] * MIB), host),
            n_state_history=n_state_history * self._has_states,
            n_ctx_train=self.n_ctx_train,
        )


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> Fit:
    """fitted(free, n_seqs=...) -> the drafts of a model with a head on a GPU with so many MiB."""

    def run_with(
        free: int = 23_800,
        drafts: DraftSettings = AUTO,
        *,
        heads: int = 1,
        on_host: int = 0,
        fails: int = 99,
        states: bool = True,
        **fields: Any,
    ) -> DraftSettings:
        """Return the fitted drafts; fitting them once more must change nothing."""

        @contextmanager
        def stub(resolved: Resolved, *_: object) -> Iterator[Run]:
            if resolved.drafts.draft_types and resolved.drafts.n_draft >= fails:
                raise ModelError("no memory for the states")
            yield Run(resolved.model, resolved.drafts, free, on_host, states=states)

        monkeypatch.setattr(dry_runs, "dry_run", stub)
        monkeypatch.setattr(Resolved, "tensors", {})
        monkeypatch.setattr(draft_fit, "count_heads", lambda _: heads)
        settings = ModelSettings(path="m.gguf", **{"n_seqs": 4, **fields})
        resolved = Resolved(settings, drafts, gpus=(GPU,))
        found = fitting.fit_all(resolved)
        again = fitting.fit_all(replace(resolved, drafts=found.drafts))
        assert found.model == again.model
        assert found.plan == again.plan
        return found.drafts

    return run_with


def found(drafts: DraftSettings) -> str:
    """Return the sources, with the tokens of a draft of the head."""
    assert replace(drafts, draft_types=AUTOMATIC, n_draft=2) == AUTO, "all else stays as it was"
    return ",".join(
        f"head {drafts.n_draft}" if name == "draft-mtp" else name for name in drafts.draft_types
    )


@pytest.mark.parametrize(
    ("free", "fields", "expected"),
    [
        # 65,536 tokens take 4,096 MiB, all but drafts 21,220; `cache` and a token of the head 600
        # each, the head 700.
        (23_800, {}, "head 2,cache"),
        (23_719, {}, "head 2"),
        (23_119, {}, "head 1"),
        (22_519, {}, "cache"),
        (21_819, {}, ""),
        (22_519, {"n_seqs": 2}, "head 2"),
        (23_800, {"n_ctx": 80_000}, "head 1"),
        (23_800, {"n_ctx": 100_000}, ""),
        (21_000, {"n_ctx": 4096}, "head 2,cache"),
        (23_800, {"on_host": 1}, ""),
        (23_800, {"heads": 0}, "cache"),
        (23_800, {"heads": 2}, "cache"),
        (21_819, {"heads": 0, "states": False}, "cache"),
        (23_800, {"fails": 2}, "head 1,cache"),
        (23_800, {"drafts": replace(AUTO, draft_types=PRIVATE)}, "head 2"),
        (23_800, {"drafts": replace(AUTO, draft_types=PRIVATE), "heads": 0}, ""),
        (23_800, {"drafts": replace(AUTO, n_draft=0)}, ""),
    ],
)
def test_what_drafts_as_enough_context_leaves_room(
    fitted: Fit, free: int, fields: dict[str, Any], expected: str
) -> None:
    drafts = fitted(free, **fields)
    assert found(replace(drafts, n_draft=drafts.n_draft or 2)) == expected


def test_other_drafts_stay_as_they_are(fitted: Fit) -> None:
    for drafts in (DraftSettings(), DraftSettings(draft_types=("draft-mtp",))):
        assert fitted(drafts=drafts) is drafts


def test_the_log_says_what_drafts_or_why_nothing_does(
    fitted: Fit, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the drafts by default in one line, or the reason against them with a remedy;
    drafts that start in silence could not be turned off.
    """
    caplog.set_level(logging.INFO)
    fitted()
    fitted(heads=0)
    fitted(20_000)
    fitted(fails=1)
    assert [each for each in caplog.messages if "drafts" in each] == [
        "drafts by default: --spec-type draft-mtp,cache, none turns them off; "
        "the model's head drafts up to 2 tokens a step; drafts take 2,500 MiB",
        "drafts by default: --spec-type cache, none turns them off; drafts take 600 MiB",
        (
            "no drafts by default: 65,536 tokens of context do not fit with them; -np 1 or -ctk "
            "q8_0 "
            "-ctv q8_0 makes room"
        ),
        "no drafts by default: no memory for the states",
    ]


def test_the_memory_of_a_head_includes_its_block_rows_and_states() -> None:
    """A head's bytes are its block, its rows and buffers, and earlier states; the trunk's tensors
    and states are not.
    """
    tensors = {
        "blk.0.attn_q.weight": 5,
        "blk.1.attn_q.weight": 7,
        "blk.1.nextn.eh_proj.weight": 11,
        "output.weight": 13,
    }
    usage = Usage(weights=100, kv=200, states=300, compute=400, state_history=17, drafts=19)
    plan = MemoryPlan(256, 1, 1.0, 0, (Place("CUDA0", True, usage, 1000),))
    assert draft_fit._head_weights(tensors) == 7 + 11
    assert draft_fit._draft_bytes(plan) == 17 + 19


def test_without_a_gpu_nothing_drafts_by_default(
    model_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = str(model_path("tiny-hybrid-nextn"))
    loaded = load(ModelSettings(path=path, n_ctx=1024, n_threads=1, devices=("none",)), drafts=AUTO)
    loaded.backend.unload()
    assert loaded.drafts == NONE
    assert loaded.backend.facts.draft_type == ""
    assert "the model has a draft head: --spec-type draft-mtp enables it" in caplog.text


def test_a_head_that_is_chosen_drafts(
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A head that fitting has chosen is loaded and drafts, and its memory is planned in a single
    dry run: a second one would lengthen every start.
    """
    choose_drafts = fitting.choose_drafts
    fitted = dry_runs.fitting_context

    def choose_as_on_gpu(meter: MemoryMeter) -> DraftChoice:
        return choose_drafts(MemoryMeter(replace(meter.resolved, gpus=(GPU,)), meter.vision))

    monkeypatch.setattr(fitting, "choose_drafts", choose_as_on_gpu)

    def without_host(*given: Any) -> MemoryPlan:
        plan = fitted(*given)
        places = [
            replace(place, usage=Usage()) if not place.is_gpu else place for place in plan.places
        ]
        return replace(plan, places=tuple(places))

    monkeypatch.setattr(dry_runs, "fitting_context", without_host)
    settings = ModelSettings(path=str(model_path("tiny-hybrid-nextn")), n_ctx=1024, n_threads=1)
    runs = list[DraftSettings]()
    dry_run = dry_runs.dry_run

    def counted(resolved: Resolved, *rest: Any) -> AbstractContextManager[DryRun]:
        runs.append(resolved.drafts)
        return dry_run(resolved, *rest)

    monkeypatch.setattr(dry_runs, "dry_run", counted)
    loaded = load(settings, drafts=AUTO)
    loaded.backend.unload()
    assert runs == [loaded.drafts], "the memory is planned once"
    assert loaded.drafts == replace(AUTO, draft_types=("draft-mtp", "cache"))
    assert loaded.backend.facts.draft_type == "draft-mtp"
