"""A dry run counts the memory that llama.cpp then takes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyctl.errors import ModelError
from pyctl.llama.fit import dry_runs, empty_model
from pyctl.llama.fit.dry_runs import dry_run
from pyctl.llama.library.devices import Device
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan, Usage
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.placements import experts_on_cpu
from pyctl.llama.settings.resolved import NO_DRAFTS, Resolved
from tests.model.llama.fit.stated_memory import CORE, on_gpus
from tools.generator import SHAPES, Shape, generate
from tools.generator.families import FAMILIES, cached_family
from tools.generator.shapes import tensors


def taken_by(loaded: Loaded) -> dict[str, float]:
    """Return bytes that the context took on the host, which llama.cpp counts in its buffers."""
    parts = CORE.breakdown(loaded.backend.ctx)[""]
    return dict(zip(("weights", "kv", "states", "compute"), parts, strict=True))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny-hybrid", {"n_ctx": 8192, "n_ubatch": 512}),
        (
            "tiny-hybrid",
            {"n_ctx": 65536, "n_seqs": 3, "type_k": "q8_0", "type_v": "q8_0", "n_ubatch": 64},
        ),
        ("tiny-moe", {"n_ctx": 16384, "flash_attn": "off", "n_ubatch": 256}),
        ("tiny-dense", {"n_ctx": 16384, "type_k": "f32", "n_ubatch": 128}),
        *((name, {"n_ctx": 4096, "n_seqs": 2, "n_ubatch": 64}) for name in FAMILIES),
    ],
)
def test_the_plan_is_what_llama_cpp_takes(
    model_path: Callable[[str], Path], name: str, settings: dict[str, Any]
) -> None:
    """The planned weights, rows, states and compute buffers equal, to the byte, those that
    llama.cpp allocates: the plan decides how much context fits.
    """
    announced: list[Resolved] = []
    of_model = ModelSettings(path=str(model_path(name)), n_threads=1, load_mode="none", **settings)
    loaded = load(of_model, announce=announced.append)
    taken = taken_by(loaded)
    loaded.backend.unload()
    (plan,) = [resolved.memory for resolved in announced]
    usage = plan.host.usage
    assert plan.gpus == ()
    assert {part: getattr(usage, part) for part in taken} == taken
    assert min(usage.weights, usage.kv + usage.states, usage.compute) > 0
    if shape := SHAPES.get(name):
        assert plan.row_bytes == shape.row_bytes(
            settings.get("type_k", "f16"), settings.get("type_v", "f16")
        )
        assert plan.state_bytes == shape.state_bytes


@pytest.fixture(scope="module")
def family_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("families")
    return lambda name: cached_family(FAMILIES[name], directory)


def plans(
    settings: ModelSettings, drafts: DraftSettings = NO_DRAFTS
) -> list[tuple[MemoryPlan, dict[str, int]]]:
    """Return plans for two contexts without what is free now, and the tensors that they count."""
    found = []
    with dry_run(Resolved.from_settings(settings, drafts)) as run:
        for n_ctx in (4096, 16_384):
            plan = run.plan(n_ctx)
            places = tuple(replace(place, free=None) for place in plan.places)
            found.append((replace(plan, places=places), dict(run.tensors)))
    return found


def with_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have dry runs read the texts of tokens, as loading does."""
    monkeypatch.setattr(empty_model, "without_texts", lambda resolved: resolved.model)


@pytest.mark.parametrize("name", ["tiny-hybrid-nextn", "tiny-moe", "tiny-dense", *FAMILIES])
def test_a_plan_needs_no_texts_of_tokens(
    model_path: Callable[[str], Path],
    family_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    path = family_path(name) if name in FAMILIES else model_path(name)
    settings = ModelSettings(path=str(path), n_seqs=2, n_ubatch=128, n_threads=1)
    drafts = DraftSettings(draft_types=("draft-mtp",)) if name.endswith("-nextn") else NO_DRAFTS
    quick = plans(settings, drafts)
    with_vocabulary(monkeypatch)
    assert quick == plans(settings, drafts)


@pytest.mark.parametrize(
    "metadata",
    [("qwen3.vocab_size", 5), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "llama3")],
)
def test_a_plan_needs_no_texts_of_tokens_whatever_else_is_said_of_them(
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    metadata: tuple[str, int | str],
) -> None:
    settings = ModelSettings(path=str(model_path("tiny-dense")), n_threads=1, metadata=(metadata,))
    quick = plans(settings)
    with_vocabulary(monkeypatch)
    assert quick == plans(settings)


def hollow_model(path: Path, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file of the full size with the right head and nothing in it, which takes no space on
    disk.
    """
    monkeypatch.setattr(generate, "_content", lambda *_: lambda tensor: iter(()))
    generate.write_model(path, shape)
    os.truncate(path, path.stat().st_size + sum(tensor.num_bytes for tensor in tensors(shape)))
    return path


@pytest.mark.parametrize(
    ("name", "types", "row_bytes", "state_bytes"),
    [
        ("27b", "f16", 65_536, 156_893_184),
        ("27b", "q8_0", 34_816, 156_893_184),
        ("27b", "q4_0", 18_432, 156_893_184),
        ("35b-a3b", "f16", 20_480, 65_863_680),
        ("35b-a3b", "q8_0", 10_880, 65_863_680),
        ("35b-a3b", "q4_0", 5_760, 65_863_680),
    ],
)
def test_full_size_models_are_planned_from_their_heads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    types: str,
    row_bytes: int,
    state_bytes: int,
) -> None:
    """A plan reads metadata only, so full-size files without contents give the published sizes of a
    row and a state in every KV type.
    """
    path = hollow_model(tmp_path / "m.gguf", SHAPES[name], monkeypatch)
    n_ctx = 102_400
    settings = ModelSettings(path=str(path), type_k=types, type_v=types, repack=False)
    with dry_run(Resolved.from_settings(settings)) as run:
        plan = run.plan(n_ctx)
    assert plan.row_bytes == row_bytes
    assert plan.host.usage.kv == row_bytes * n_ctx
    assert plan.state_bytes == state_bytes
    assert plan.host.usage.weights == pytest.approx(path.stat().st_size, rel=0.01)
    # Logits of one output a batch are small: it is the activations of 512 tokens that count.
    assert 100 * MIB < plan.host.usage.compute < 400 * MIB


TWO_GPUS = tuple(
    Device(f"CUDA{i}", "a GPU", True, i, f"CUDA{i}", i, 24_000 * MIB, 24_576 * MIB)
    for i in range(2)
)


@pytest.mark.parametrize("names", [("CUDA0",), ("CUDA0", ""), ("CUDA0", "CUDA1")])
def test_each_part_counts_where_llama_cpp_puts_it(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """Each part of the memory counts on the device that holds it; with everything on GPUs each
    sequence has one more of these small states, for copies within the device.
    """
    settings, n_ctx = ModelSettings(path=str(model_path("tiny-hybrid"))), 16_384
    with dry_run(Resolved.from_settings(settings)) as run:
        host = run.plan(n_ctx).host.usage
    on_gpus(monkeypatch, TWO_GPUS, *names)
    with dry_run(Resolved.from_settings(settings)) as run:
        plan = run.plan(n_ctx)
    assert [place.name for place in plan.places] == [*filter(None, names), "host"]
    # Another state of each sequence is for copies within the GPUs, which need everything there.
    states = host.states if "" in names else 2 * host.states
    wanted = Usage(host.weights, host.kv, states, host.compute)
    for place in plan.places[: len(names)]:
        parts = [getattr(place.usage, part) for part in ("weights", "kv", "states", "compute")]
        assert [len(names) * part for part in parts] == pytest.approx(
            [wanted.weights, wanted.kv, wanted.states, wanted.compute], abs=4
        )
    assert plan.gpus[0].free == 24_000 * MIB


def test_a_large_state_passes_through_a_small_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage as large as a state of 27B would take 150 MiB of the card."""
    path = hollow_model(tmp_path / "m.gguf", SHAPES["27b"], monkeypatch)
    on_gpus(monkeypatch, TWO_GPUS, "CUDA0")
    settings = ModelSettings(path=str(path), n_seqs=4, repack=False)
    with dry_run(Resolved.from_settings(settings)) as run:
        plan = run.plan(16_384)
    assert plan.state_bytes > CORE.MAX_STAGE_BYTES
    assert plan.places[0].usage.states == 4 * plan.state_bytes + CORE.MAX_STAGE_BYTES


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid-nextn", "tiny-moe", *FAMILIES])
@pytest.mark.parametrize("flash_attn", ["auto", "off"])
def test_an_estimate_is_rather_too_large(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, flash_attn: str
) -> None:
    """Without the extension the plan is an upper estimate with a warning: too small a one would end
    in an out-of-memory at load.
    """
    settings = ModelSettings(path=str(model_path(name)), n_ubatch=128, flash_attn=flash_attn)
    with dry_run(Resolved.from_settings(settings)) as run:
        counted = run.plan(4096)
    on_gpus(monkeypatch, ())
    with dry_run(Resolved.from_settings(settings)) as run:
        plan = run.plan(4096)
        with pytest.raises(ModelError, match="the extension"):
            run.pooled_layers()
    maximum = (
        1.5 if name in SHAPES else 20.0
    )  # as if there were no windows and nothing were compressed
    assert counted.host.usage.total <= plan.host.usage.total <= maximum * counted.host.usage.total
    assert plan.host.usage.weights == pytest.approx(counted.host.usage.weights, rel=0.01)
    assert next(plan.warnings(0)).startswith("without the extension, this memory is an estimate")
    assert list(counted.warnings(0)) == []


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [({}, 8), ({"n_gpu_layers": 5}, 4), ({"placements": experts_on_cpu(3)}, 8)],
)
def test_an_estimate_follows_the_placements(
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    blocks: int,
) -> None:
    """The estimate follows layers and tensors that flags keep on the CPU."""
    settings = ModelSettings(path=str(model_path("tiny-moe")), **fields)
    on_gpus(monkeypatch, TWO_GPUS)
    with dry_run(replace(Resolved.from_settings(settings), gpus=TWO_GPUS)) as run:
        plan, sizes = run.plan(4096), run.tensors
    there = (
        [name for name in sizes if not re.match(rf"blk\.[0-{7 - blocks}]\.", name)]
        if blocks < 8
        else [*sizes]
    )
    if settings.placements:
        there = [
            name for name in there if not re.match(r"blk\.[0-2]\.ffn_(up|down|gate)_exps", name)
        ]
    assert sum(place.usage.weights for place in plan.gpus) == pytest.approx(
        sum(map(sizes.get, there)), abs=1
    )
    assert sum(place.usage.kv for place in plan.gpus) == pytest.approx(
        4096 * plan.row_bytes * blocks / 8, abs=1
    )


def test_nothing_reads_what_llama_cpp_says() -> None:
    sources = {
        path.name: path.read_text("utf-8")
        for path in Path(dry_runs.__file__).parents[1].rglob("*.py")
    }
    assert [name for name, text in sources.items() if "captured_log() as" in text] == [
        "evaluation_control.py"
    ], "to log it"
    readers = ("dry_runs.py", "empty_model.py", "fitting.py")
    assert [name for name in readers if "re.compile(r" in sources[name]] == []


MTP = DraftSettings(draft_types=("draft-mtp",))


@pytest.mark.parametrize("name", ["tiny-hybrid-nextn", "tiny-moe-nextn"])
@pytest.mark.parametrize("n_draft", [1, 3])
def test_a_head_and_its_planes_are_in_the_plan(
    model_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture, name: str, n_draft: int
) -> None:
    """The plan of a model with a head counts its weights, its rows and earlier states, and still
    equals the memory that llama.cpp takes; the fingerprint is the same without, so the cache stays
    valid.
    """
    caplog.set_level(logging.INFO)
    settings = ModelSettings(
        path=str(model_path(name)),
        n_threads=1,
        n_ctx=16384,
        n_seqs=2,
        n_ubatch=256,
        load_mode="none",
    )
    drafts = replace(MTP, n_draft=n_draft, draft_type_k="f32")
    announced: list[Resolved] = []
    loaded = load(settings, None, announced.append, drafts)
    layout = loaded.backend.memory.layout
    taken = taken_by(loaded)
    loaded.backend.unload()
    (plan,) = [resolved.memory for resolved in announced]
    usage, shape = plan.host.usage, SHAPES[name]
    assert plan.n_state_history == n_draft
    assert plan.state_bytes == shape.state_bytes
    assert usage.state_history == n_draft * usage.states
    assert usage.states + usage.state_history == taken["states"]
    assert usage.weights == taken["weights"]
    assert usage.kv == taken["kv"]
    assert usage.compute == taken["compute"]
    assert "a draft head" not in caplog.text
    assert usage.drafts > 0.9 * 16384 * shape.head_size * shape.num_kv_heads * (2 + 4)
    with dry_run(Resolved.from_settings(settings)) as run:
        without = run.plan(16384)
        plain = load(settings)
    assert without.n_state_history == 0
    assert without.host.usage.state_history == 0
    assert without.host.usage.drafts == 0
    assert without.host.usage.weights < usage.weights, "the head's"
    assert without.layers == plan.layers
    assert without.row_bytes == plan.row_bytes
    assert caplog.text.count("the model has a draft head: --spec-type draft-mtp") == 1
    plain.backend.unload()
    plain.backend.load()
    assert caplog.text.count("a draft head") == 1, "once, and not again after a sleep"
    assert plain.backend.memory.layout == layout
    assert plain.info.fingerprint == loaded.info.fingerprint, (
        "what is stored stays of use, with and without"
    )
    plain.backend.unload()


def test_long_drafts_need_one_more_state(model_path: Callable[[str], Path]) -> None:
    settings = ModelSettings(path=str(model_path("tiny-hybrid")), n_seqs=3)
    with dry_run(
        Resolved.from_settings(settings, DraftSettings(draft_types=("ngram-mod",)))
    ) as run:
        plan = run.plan(4096)
    assert plan.n_state_history == 1
    assert plan.host.usage.state_history == plan.host.usage.states
    dense = replace(settings, path=str(model_path("tiny-dense")))
    with dry_run(Resolved.from_settings(dense, DraftSettings(draft_types=("cache",)))) as run:
        assert run.plan(4096).n_state_history == 0, "no states, no marks"


@pytest.mark.parametrize(
    ("name", "draft_type"),
    [
        ("tiny-dense", "draft-simple"),
        ("tiny-hybrid-head", "draft-mtp"),
        ("tiny-hybrid-eagle3", "draft-eagle3"),
        ("tiny-hybrid-dflash", "draft-dflash"),
        ("tiny-hybrid-dspark", "draft-dspark"),
    ],
)
def test_a_draft_file_is_in_the_plan(
    model_path: Callable[[str], Path], name: str, draft_type: str
) -> None:
    settings = ModelSettings(path=str(model_path("tiny-hybrid")), n_seqs=2)
    drafts = DraftSettings(draft_types=(draft_type,), draft_path=str(model_path(name)))
    with dry_run(Resolved.from_settings(settings, drafts)) as run:
        small, large = run.plan(4096).host.usage, run.plan(8192).host.usage
    weights = Path(drafts.draft_path).stat().st_size
    rows = 4096 * SHAPES[name].row_bytes("f16", "f16")
    assert small.drafts > 0.9 * weights + rows
    assert rows <= large.drafts - small.drafts <= 3 * rows, "the mask of its attention grows, too"
    with dry_run(Resolved.from_settings(settings)) as run:
        assert small.kv == run.plan(4096).host.usage.kv


def test_a_model_without_a_head_is_refused_before_it_is_loaded(
    model_path: Callable[[str], Path],
) -> None:
    with pytest.raises(
        ModelError, match=r"has no head for --spec-type draft-mtp: it needs one nextn block"
    ):
        load(ModelSettings(path=str(model_path("tiny-hybrid"))), drafts=MTP)
