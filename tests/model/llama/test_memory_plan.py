"""The memory plan before a model is loaded equals the memory that llama.cpp then takes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyctl.engine.draft.draft_settings import DraftSettings
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.placements import experts_on_cpu
from pyctl.errors import ModelError
from pyctl.llama import MemoryPlan, dry_runs, fit, load
from pyctl.llama.devices import Device
from pyctl.llama.dry_runs import dry_run
from pyctl.llama.fit import fit_settings
from pyctl.llama.library import redirect_log
from pyctl.llama.memory import MIB, Place, Usage
from tools.generator import SHAPES, Shape, generate
from tools.generator.families import FAMILIES, cached_family
from tools.generator.shapes import tensors

redirect_log()  # sizes are read in what llama.cpp says, whichever test is the first


def taken_by(lines: list[str]) -> dict[str, float]:
    """Bytes of the buffers that llama.cpp took, by what they are for; it plans those for computing more than once."""
    taken = dict.fromkeys(("model", "KV", "RS", "compute"), 0.0)
    for line in lines:
        if match := re.search(r"(?:(model|KV|RS) buffer size =|(compute) buffer size is) +([\d.]+) MiB", line):
            taken[match[1] or match[2]] += float(match[3]) * MIB
    return taken


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny-hybrid", {"n_ctx": 8192, "n_ubatch": 512}),
        ("tiny-hybrid", {"n_ctx": 65536, "n_seqs": 3, "type_k": "q8_0", "type_v": "q8_0", "n_ubatch": 64}),
        ("tiny-moe", {"n_ctx": 16384, "flash_attn": "off", "n_ubatch": 256}),
        ("tiny-dense", {"n_ctx": 16384, "type_k": "f32", "n_ubatch": 128}),
    ],
)
def test_the_plan_is_what_llama_cpp_takes(
    model_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture, name: str, settings: dict[str, Any]
) -> None:
    caplog.set_level(logging.DEBUG, "llama.cpp")
    plans: list[MemoryPlan] = []
    loaded = load(ModelSettings(path=str(model_path(name)), n_threads=1, **settings), announce=plans.append)
    loaded.backend.unload()
    taken = taken_by(caplog.messages)
    (plan,) = plans
    usage = plan.host.usage
    assert plan.gpus == ()
    assert usage.weights == pytest.approx(taken["model"], rel=0.03)
    assert usage.kv == pytest.approx(taken["KV"], rel=0.01)
    assert usage.states == pytest.approx(taken["RS"], rel=0.01)
    assert usage.compute == pytest.approx(taken["compute"], rel=0.01)
    assert min(usage.weights, usage.kv, usage.compute) > 0
    shape = SHAPES[name]
    row_bytes = shape.row_bytes(settings.get("type_k", "f16"), settings.get("type_v", "f16"))
    assert plan.row_bytes == pytest.approx(row_bytes, rel=0.01)
    assert plan.state_bytes == pytest.approx(shape.state_bytes, abs=MIB / 100)


@pytest.fixture(scope="module")
def family_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("families")
    return lambda name: cached_family(FAMILIES[name], directory)


def plans(settings: ModelSettings, drafts: DraftSettings) -> list[tuple[MemoryPlan, dict[str, int]]]:
    """Plans for two contexts without what is free now, and the tensors that they count."""
    found = []
    with dry_run(settings, drafts) as run:
        for n_ctx in (4096, 16_384):
            plan = run.plan(n_ctx)
            places = tuple(replace(place, free=None) for place in plan.places)
            found.append((replace(plan, places=places), dict(run.tensors)))
    return found


def with_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have dry runs read the texts of tokens, as loading does."""
    params = dry_runs.ModelParams
    monkeypatch.setattr(dry_runs, "ModelParams", lambda *args, with_vocabulary, **more: params(*args, **more))


@pytest.mark.parametrize("name", ["tiny-hybrid-nextn", "tiny-moe", "tiny-dense", *FAMILIES])
def test_a_plan_needs_no_texts_of_tokens(
    model_path: Callable[[str], Path], family_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = family_path(name) if name in FAMILIES else model_path(name)
    settings = ModelSettings(path=str(path), n_seqs=2, n_ubatch=128, n_threads=1)
    drafts = DraftSettings(draft_types=("draft-mtp",)) if name.endswith("-nextn") else dry_runs.NO_DRAFTS
    quick = plans(settings, drafts)
    with_vocabulary(monkeypatch)
    assert quick == plans(settings, drafts)


@pytest.mark.parametrize(
    "metadata", [("qwen3.vocab_size", 5), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "llama3")]
)
def test_a_plan_needs_no_texts_of_tokens_whatever_else_is_said_of_them(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, metadata: tuple[str, int | str]
) -> None:
    settings = ModelSettings(path=str(model_path("tiny-dense")), n_threads=1, metadata=(metadata,))
    quick = plans(settings, dry_runs.NO_DRAFTS)
    with_vocabulary(monkeypatch)
    assert quick == plans(settings, dry_runs.NO_DRAFTS)


def hollow_model(path: Path, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the full size with the right head and nothing in it, which takes no space on disk."""
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, types: str, row_bytes: int, state_bytes: int
) -> None:
    path = hollow_model(tmp_path / "m.gguf", SHAPES[name], monkeypatch)
    n_ctx = 102_400
    with dry_run(ModelSettings(path=str(path), type_k=types, type_v=types)) as run:
        plan = run.plan(n_ctx)
    assert round(plan.row_bytes) == row_bytes
    assert plan.host.usage.kv == row_bytes * n_ctx
    assert plan.state_bytes == pytest.approx(state_bytes, abs=MIB / 100)
    assert plan.host.usage.weights == pytest.approx(path.stat().st_size, rel=0.01)
    # Logits of one output a batch are small: it is the activations of 512 tokens that count.
    assert 100 * MIB < plan.host.usage.compute < 400 * MIB


def rename(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[Device, ...], layer: re.Pattern[str], places: str, buffers: str
) -> None:
    """As if there were ``gpus``: changes names in the log of llama.cpp.

    A device behind ``layer`` becomes ``places``, or one of these in turn, that of other buffers ``buffers``.
    """
    captured, names = dry_runs.captured_log, places.split("|")

    @contextmanager
    def renamed() -> Iterator[list[str]]:
        with captured() as lines:
            yield lines
        index = 0
        for at, line in enumerate(lines):
            if layer.search(line):
                lines[at], index = layer.sub(rf"\1{names[index % len(names)]}", line), index + 1
            elif "CPU RS buffer" in line and len(names) > 1:  # llama.cpp has one for each device
                size = float(line.split("=")[1].split()[0]) / len(names)
                lines[at] = f"{names[0]} RS buffer size = {size:.4f} MiB"
                lines.append(f"{names[1]} RS buffer size = {size:.4f} MiB")
            else:
                lines[at] = re.sub("CPU (RS buffer|compute)", rf"{buffers} \1", line)

    monkeypatch.setattr(dry_runs, "captured_log", renamed)
    monkeypatch.setattr(dry_runs, "devices", lambda: gpus)


@pytest.mark.parametrize("first", [0, 4])
def test_each_layer_counts_where_llama_cpp_puts_it(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """As if there were a GPU with the layers from ``first`` on: only the names in llama.cpp's log are changed."""
    path, n_ctx = model_path("tiny-hybrid"), 16_384
    with dry_run(ModelSettings(path=str(path))) as run:
        host = run.plan(n_ctx).host.usage
        sizes = dict(run.tensors)
    layer = re.compile(rf"(layer +[{first}-8](?: assigned to device|: dev =) )CPU")
    gpu = Device("CUDA0", "a GPU", True, 0, "CUDA0", 0, 24_000 * MIB, 24_576 * MIB)
    rename(monkeypatch, (gpu,), layer, "CUDA0", "CUDA0")
    with dry_run(ModelSettings(path=str(path), placements=((r"blk\.5\.ffn", "CPU"),))) as run:
        plan = run.plan(n_ctx)
    (place,) = plan.gpus
    moved = [name for name in sizes if re.match(rf"blk\.[{first}-7]\.|output", name) and "blk.5.ffn" not in name]
    assert place.usage.weights == sum(sizes[name] for name in moved)
    assert plan.host.usage.weights == sum(sizes.values()) - place.usage.weights
    assert place.usage.kv == pytest.approx(host.kv * (1.0 if first == 0 else 0.5), abs=8)
    # A second state is for copies within the GPU, which need everything there.
    assert place.usage.states == host.states * (2 if first == 0 else 1)
    assert place.usage.compute == host.compute
    assert (place.name, place.free) == ("CUDA0", 24_000 * MIB)


TWO_GPUS = tuple(Device(f"CUDA{i}", "a GPU", True, i, f"CUDA{i}", i, 24_000 * MIB, 24_576 * MIB) for i in range(2))

ALL_LAYERS = re.compile(r"(layer +\d(?: assigned to device|: dev =) )CPU")


def test_each_gpu_has_a_second_copy_of_its_states(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, n_ctx = model_path("tiny-hybrid"), 16_384
    with dry_run(ModelSettings(path=str(path))) as run:
        host = run.plan(n_ctx).host.usage
    rename(monkeypatch, TWO_GPUS, ALL_LAYERS, "CUDA0|CUDA1", "CUDA0")
    with dry_run(ModelSettings(path=str(path))) as run:
        plan = run.plan(n_ctx)
    assert [place.usage.states for place in plan.gpus] == pytest.approx([host.states] * 2, rel=0.02)


@pytest.mark.parametrize(("split", "shares"), [((), (0.5, 0.5)), ((3.0, 1.0), (0.75, 0.25))])
def test_what_all_gpus_share_is_no_memory_of_the_host(
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    split: tuple[float, ...],
    shares: tuple[float, ...],
) -> None:
    path, n_ctx = model_path("tiny-hybrid"), 16_384
    with dry_run(ModelSettings(path=str(path))) as run:
        before = run.plan(n_ctx).host.usage
    rename(monkeypatch, TWO_GPUS, ALL_LAYERS, "Meta(CUDA0,CUDA1)", "Meta(CUDA0,CUDA1)")
    # llama.cpp itself finds no GPU here.
    settings = ModelSettings(path=str(path))
    with dry_run(settings) as run:
        run._settings = replace(settings, split_mode="tensor", tensor_split=split)
        plan = run.plan(n_ctx)
    assert (plan.host.usage.kv, plan.host.usage.states) == (0, 0)
    for place, share in zip(plan.gpus, shares, strict=True):
        assert place.usage.kv == pytest.approx(before.kv * share, rel=0.01)
        assert place.usage.states == pytest.approx(before.states * share, rel=0.01), "no second copy of them"
        assert place.usage.weights > 0


GPU_LAYERS = 33


class Run:
    """A model of 32 layers with 100 MiB of experts and 20 MiB of others in each, 0.1 MiB of KV a token, on one GPU."""

    n_ctx_train = 65_536
    n_layers = 32

    def __init__(self, settings: ModelSettings, free: int, host: int) -> None:
        self.settings, self.free, self.host = settings, free, host
        self.tensors = {f"blk.{i}.ffn_up_exps.weight": 100 * MIB for i in range(32)}
        self.tensors |= {f"blk.{i}.attn_q.weight": 20 * MIB for i in range(32)}

    def plan(self, n_ctx: int) -> MemoryPlan:
        on_gpu = min(self.settings.n_gpu_layers - 1, 32) if self.settings.n_gpu_layers >= 0 else 32
        experts = max(on_gpu - len(self.settings.placements), 0)
        weights = (on_gpu * 20 + experts * 100) * MIB
        kv = n_ctx * MIB // 10
        gpu = Usage(weights, kv * on_gpu // 32, 0, 500 * MIB)
        host = Usage(32 * 120 * MIB - weights, kv - kv * on_gpu // 32, 0, 10 * MIB)
        places = (Place("CUDA0", True, gpu, self.free), Place("host", False, host, self.host))
        return MemoryPlan(n_ctx, 1, MIB / 10, 0, places)


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ModelSettings, MemoryPlan]]:
    """fitting(free MiB, field=...) -> settings and plan for a GPU with that much free memory."""

    def run_with(free: int, host: int = 64_000, **fields: Any) -> tuple[ModelSettings, MemoryPlan]:
        @contextmanager
        def stub(settings: ModelSettings, *_: object) -> Iterator[Run]:
            yield Run(settings, free * MIB, host * MIB)

        monkeypatch.setattr(fit, "dry_run", stub)
        return fit_settings(ModelSettings(path="m.gguf", **fields))

    return run_with


def test_what_fits_stays_as_it_is(fitting: Callable[..., tuple[ModelSettings, MemoryPlan]]) -> None:
    settings, plan = fitting(24_000)
    assert settings == ModelSettings(path="m.gguf", n_ctx=65_536)
    assert list(plan.warnings(8192 * MIB)) == []


def test_an_open_context_shrinks_first(fitting: Callable[..., tuple[ModelSettings, MemoryPlan]]) -> None:
    settings, plan = fitting(8_000)
    assert settings.n_gpu_layers == -1
    assert settings.placements == ()
    # 8000 free - 1024 margin - 3840 weights - 500 computing, at 0.1 a token
    assert 26_360 - 512 < settings.n_ctx <= 26_360
    assert settings.n_ctx % 256 == 0
    assert plan.n_ctx == settings.n_ctx
    assert fitting(8_000, fit_target=(2048,))[0].n_ctx < settings.n_ctx - 10_000
    assert fitting(8_000, fit=False)[0].n_ctx == 65_536


def test_then_experts_leave_the_gpu(fitting: Callable[..., tuple[ModelSettings, MemoryPlan]]) -> None:
    settings, plan = fitting(5_000, n_ctx=8192)
    assert settings.placements == experts_on_cpu(12)  # 1183 MiB too much
    assert plan.gpus[0].shortage(1024 * MIB) == 0
    assert 4096 <= fitting(5_000)[0].n_ctx < 8192


def test_then_layers_leave_the_gpu(fitting: Callable[..., tuple[ModelSettings, MemoryPlan]]) -> None:
    settings, plan = fitting(2_000, n_ctx=8192)
    assert 0 < settings.n_gpu_layers < GPU_LAYERS
    assert plan.gpus[0].shortage(1024 * MIB) == 0


@pytest.mark.parametrize("fields", [{"n_gpu_layers": 99}, {"fit": False}, {"tensor_split": (1.0,)}])
def test_what_the_user_has_placed_stays_with_a_warning(
    fitting: Callable[..., tuple[ModelSettings, MemoryPlan]], fields: dict[str, Any]
) -> None:
    settings, plan = fitting(4_000, n_ctx=8192, **fields)
    assert settings == ModelSettings(path="m.gguf", n_ctx=8192, **fields)
    (warning,) = plan.warnings(8192 * MIB)
    assert warning.startswith("CUDA0 has 1,160 MiB too little; what would help: a smaller -c")


def test_a_context_that_the_host_cannot_hold_is_refused(
    fitting: Callable[..., tuple[ModelSettings, MemoryPlan]],
) -> None:
    with pytest.raises(ModelError, match=r"65536 tokens need about .* MiB; try a smaller --ctx-size"):
        fitting(4_000, 1_000, n_ctx=65_536, n_gpu_layers=1)


def test_warnings_about_the_host() -> None:
    place = Place("host", False, Usage(1000 * MIB, 500 * MIB), 2000 * MIB)
    plan = MemoryPlan(4096, 1, 1.0, 0, (place,))
    assert list(plan.warnings(400 * MIB)) == []
    (large,) = plan.warnings(800 * MIB)
    assert large.startswith("the prefix cache may grow to 800 MiB, 500 MiB are left; what would help: --cache-ram 250")
    assert "no limit" in next(plan.warnings(None))
    (short,) = replace(plan, places=(replace(place, free=1400 * MIB),)).warnings(0)
    assert short.startswith("the host has 100 MiB of memory too little")


def test_the_table_adds_up() -> None:
    gpu = Place("CUDA0", True, Usage(15_000 * MIB, 3_400 * MIB, 300 * MIB, 500 * MIB), 24_000 * MIB)
    host = Place("host", False, Usage(680 * MIB, 0, 0, 30 * MIB), None)
    lines = list(MemoryPlan(102_400, 1, 34_816.0, 150 * MIB, (gpu, host)).lines(8192 * MIB))
    assert [line.split()[-2:] for line in lines] == [
        ["CUDA0", "host"],
        ["15,000", "680"],
        ["3,400", "-"],
        ["300", "-"],
        ["500", "30"],
        ["-", "8,192"],
        ["19,200", "8,902"],
        ["24,000", "?"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_the_table_shows_what_drafting_takes() -> None:
    gpu = Place(
        "CUDA0", True, Usage(15_000 * MIB, 3_400 * MIB, 600 * MIB, 500 * MIB, 1_800 * MIB, 700 * MIB), 21_000 * MIB
    )
    host = Place("host", False, Usage(), 64_000 * MIB)
    plan = MemoryPlan(102_400, 4, 34_816.0, 150 * MIB, (gpu, host), (), 3)
    lines = list(plan.lines(0))
    assert [line.split()[-2] for line in lines] == [
        "CUDA0",
        "15,000",
        "3,400",
        "600",
        "1,800",
        "700",
        "500",
        "22,000",
        "21,000",
    ]
    assert lines[4].startswith("3 earlier states of each")
    (short,) = plan.warnings(0)
    assert short.startswith("CUDA0 has 1,000 MiB too little; what would help: --spec-type none, ")


MTP = DraftSettings(draft_types=("draft-mtp",))


@pytest.mark.parametrize("name", ["tiny-hybrid-nextn", "tiny-moe-nextn"])
@pytest.mark.parametrize("n_draft", [1, 3])
def test_a_head_and_its_planes_are_in_the_plan(
    model_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture, name: str, n_draft: int
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "llama.cpp")
    settings = ModelSettings(path=str(model_path(name)), n_threads=1, n_ctx=16384, n_seqs=2, n_ubatch=256)
    drafts = replace(MTP, n_draft=n_draft, draft_type_k="f32")
    plans: list[MemoryPlan] = []
    loaded = load(settings, None, plans.append, drafts)
    layout = loaded.backend.memory.layout
    loaded.backend.unload()
    taken = taken_by(caplog.messages)
    (plan,) = plans
    usage, shape = plan.host.usage, SHAPES[name]
    assert plan.n_planes == n_draft
    assert plan.state_bytes == pytest.approx(shape.state_bytes, abs=MIB / 50)
    assert usage.planes == pytest.approx(n_draft * usage.states, rel=0.01)
    assert usage.states + usage.planes == pytest.approx(taken["RS"], rel=0.01)
    assert usage.weights == pytest.approx(taken["model"], rel=0.03)
    assert usage.total == pytest.approx(sum(taken.values()), rel=0.03)
    assert "a draft head" not in caplog.text
    assert usage.drafts > 0.9 * 16384 * shape.head_size * shape.num_kv_heads * (2 + 4)
    with dry_run(settings) as run:
        without = run.plan(16384)
        plain = load(settings)
    assert (without.n_planes, without.host.usage.planes, without.host.usage.drafts) == (0, 0, 0)
    assert without.host.usage.weights < usage.weights, "the head's"
    assert (without.layers, without.row_bytes) == (plan.layers, plan.row_bytes)
    assert caplog.text.count("the model has a draft head: --spec-type draft-mtp") == 1
    plain.backend.unload()
    plain.backend.load()
    assert caplog.text.count("a draft head") == 1, "once, and not again after a sleep"
    assert plain.backend.memory.layout == layout
    assert plain.info.fingerprint == loaded.info.fingerprint, "what is stored stays of use, with and without"
    plain.backend.unload()


def test_long_drafts_need_one_more_state(model_path: Callable[[str], Path]) -> None:
    settings = ModelSettings(path=str(model_path("tiny-hybrid")), n_seqs=3)
    with dry_run(settings, DraftSettings(draft_types=("ngram-mod",))) as run:
        plan = run.plan(4096)
    assert plan.n_planes == 1
    assert plan.host.usage.planes == plan.host.usage.states
    with dry_run(replace(settings, path=str(model_path("tiny-dense"))), DraftSettings(draft_types=("cache",))) as run:
        assert run.plan(4096).n_planes == 0, "no states, no marks"


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
def test_a_draft_file_is_in_the_plan(model_path: Callable[[str], Path], name: str, draft_type: str) -> None:
    settings = ModelSettings(path=str(model_path("tiny-hybrid")), n_seqs=2)
    drafts = DraftSettings(draft_types=(draft_type,), draft_path=str(model_path(name)))
    with dry_run(settings, drafts) as run:
        small, large = run.plan(4096).host.usage, run.plan(8192).host.usage
    weights = Path(drafts.draft_path).stat().st_size
    rows = 4096 * SHAPES[name].row_bytes("f16", "f16")
    assert small.drafts > 0.9 * weights + rows
    assert rows <= large.drafts - small.drafts <= 3 * rows, "the mask of its attention grows, too"
    with dry_run(settings) as run:
        assert small.kv == run.plan(4096).host.usage.kv


def test_a_context_that_is_left_open_leaves_room_for_drafting(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(model_path("tiny-hybrid-nextn"))
    with dry_run(ModelSettings(path=path), MTP) as run:
        free = run.plan(run.n_ctx_train // 2).host.usage.total
        most = run.n_ctx_train
    monkeypatch.setattr(dry_runs, "host_available", lambda: free)
    settings = ModelSettings(path=path, load_mode="none", fit_ctx=512)
    found = {n: fit_settings(replace(settings, n_seqs=n), MTP)[0].n_ctx for n in (1, 8)}
    assert most // 2 - 512 <= found[1] <= most // 2
    assert found[8] < found[1], "planes for each sequence"
    assert fit_settings(settings)[0].n_ctx > found[1]


def test_a_model_without_a_head_is_refused_before_it_is_loaded(model_path: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"has no head for --spec-type draft-mtp: it needs one nextn block"):
        load(ModelSettings(path=str(model_path("tiny-hybrid"))), drafts=MTP)
