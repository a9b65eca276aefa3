"""Bytes by device become bytes by place."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pyctl.llama.fit.places import HOST, MemoryPlaces, UsageByPlace
from pyctl.llama.library.devices import Device
from pyctl.llama.settings.memory_plan import Place, Usage

GPUS = tuple(Device(f"CUDA{i}", "a GPU", True, i, f"buffer {i}", i, 1_000, 2_000) for i in range(2))

PLACES = MemoryPlaces(
    gpus=GPUS,
    host_free=500,
    shares={"CUDA0": 1.0, "CUDA1": 3.0},
    margins=[10, 20],
    is_mapped=True,
    is_estimate=False,
)


@pytest.mark.parametrize(
    ("device", "place"),
    [("CUDA1", "CUDA1"), ("buffer 0", "CUDA0"), ("", HOST), ("CPU_Mapped", HOST)],
)
def test_devices_and_their_buffers_have_a_place(device: str, place: str) -> None:
    assert PLACES.name_of(device) == place


def test_devices_of_one_place_add_up() -> None:
    usage = PLACES.usage({"CUDA0": (1, 2, 3, 4), "buffer 0": (10, 0, 0, 0), "": (0, 5, 0, 6)})
    assert usage.weights == {"CUDA0": 11}
    assert usage.kv == {"CUDA0": 2, HOST: 5}
    assert usage.compute == {"CUDA0": 4, HOST: 6}


@pytest.mark.parametrize(
    ("is_estimate", "states", "compute"),
    [(False, (4, 12), (8, 8)), (True, (3, 9), (2, 6))],
)
def test_gpus_share_what_they_have_together(
    is_estimate: bool, states: tuple[int, int], compute: tuple[int, int]
) -> None:
    places = replace(PLACES, is_estimate=is_estimate)
    usage = places.usage({"Meta(CUDA0,CUDA1)": (400, 40, 12, 8)})
    assert [usage.weights[gpu.name] for gpu in GPUS] == [100, 300]
    assert [usage.kv[gpu.name] for gpu in GPUS] == [10, 30]
    assert tuple(usage.states[gpu.name] for gpu in GPUS) == states
    assert tuple(usage.compute[gpu.name] for gpu in GPUS) == compute


def test_margins_go_to_the_gpus_in_use() -> None:
    usage = UsageByPlace(kv=Counter({"CUDA1": 7}), weights=Counter({HOST: 9}))
    found = list(PLACES.in_use(usage))
    assert found == [
        Place("CUDA1", True, Usage(kv=7), 1_000, margin=10),
        Place(HOST, False, Usage(weights=9), 500, is_mapped=True),
    ]
    third = replace(GPUS[0], name="CUDA2")
    all_in_use = Counter({"CUDA0": 1, "CUDA1": 1, "CUDA2": 1})
    places = replace(PLACES, gpus=(*GPUS, third))
    margins = [place.margin for place in places.in_use(UsageByPlace(kv=all_in_use))]
    assert margins == [10, 20, 20, 0]


def test_rows_on_the_host_or_a_worker_are_elsewhere() -> None:
    on_gpu = PLACES.usage({"CUDA0": (0, 1, 1, 0)})
    on_both = PLACES.usage({"CUDA0": (0, 1, 0, 0), "": (0, 0, 1, 0)})
    assert PLACES.are_all_local_gpus(on_gpu)
    assert not PLACES.are_all_local_gpus(on_both)
    workers = replace(PLACES, gpus=tuple(replace(gpu, is_remote=True) for gpu in GPUS))
    assert not workers.are_all_local_gpus(on_gpu)
