"""Objects built from several settings at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pyctl.cli import serve_command
from pyctl.cli.arguments import parse_serve
from pyctl.cli.assemble import (
    LOWEST_PRIORITY,
    PREPARE_SECONDS,
    assemble,
    prepare_later,
    prepare_vocabulary,
    too_many_threads,
)
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.errors import ConfigError, ModelError
from pyctl.llama.library.devices import missing_text
from pyctl.requests.request_pool import PostReplyQueue

MIB = 2**20


@pytest.mark.parametrize(
    ("ram", "rows", "snapshots"), [("64", 4, 60), ("8192", 256, 8192 - 256), ("0", 0, 0)]
)
def test_rows_of_images_count_within_the_cache(
    model_path: Callable[[str], Path], tiny_mmproj: Path, ram: str, rows: int, snapshots: int
) -> None:
    flags = ["-m", str(model_path("tiny-hybrid")), "-c", "512", "-t", "1", "--cache-ram", ram]
    service = assemble(parse_serve([*flags, "--mmproj", str(tiny_mmproj)], {}))
    try:
        engine = service.worker._engine
        assert engine.backend.encoder.rows.limit == rows * MIB
        assert engine.prefix_cache.cache.budget.limit == snapshots * MIB
    finally:
        service.worker.close()


@pytest.mark.parametrize("is_gpu", [True, False])
def test_a_start_on_the_cpu_says_which_card_is_idle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_gpu: bool
) -> None:
    monkeypatch.setattr(serve_command, "start_log", lambda *_: None)
    monkeypatch.setattr(serve_command, "devices", lambda: [SimpleNamespace(is_gpu=is_gpu)])
    monkeypatch.setattr(serve_command, "unused_card", lambda: "RTX 3090 is idle")
    with pytest.raises(ConfigError):  # there is no such model
        serve_command.run_serve(parse_serve(["-m", "m.gguf", "--port", "0"], {}), ())
    assert ("RTX 3090 is idle" in caplog.text) is not is_gpu


def test_a_cut_model_is_told_by_its_size(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    whole = model_path("tiny-hybrid")
    assert missing_text(whole) == ""
    n_bytes = whole.stat().st_size
    (cut := tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[: n_bytes - 4096])
    with pytest.raises(
        ModelError, match=rf"; cut.gguf has {n_bytes - 4096:,} of [\d,]+ bytes: fetch it again$"
    ):
        assemble(parse_serve(["-m", str(cut), "-c", "256", "--fit", "off", "--no-kv-cache"], {}))


def test_more_threads_than_processors_are_warned_of() -> None:
    assert too_many_threads((8, 16), 16) == ""
    assert (
        too_many_threads((8, 999), 16)
        == "999 threads are slower than 16 on this machine's 16 processors"
    )


class Lane:
    """A lane that keeps the functions instead of running them."""

    def __init__(self) -> None:
        self.functions: list[Callable[[], object]] = []

    def add(self, function: Callable[[], object]) -> None:
        self.functions.append(function)


def test_grammars_are_prepared_some_time_after_the_start() -> None:
    checked: list[Sampling] = []
    worker = cast(Worker, SimpleNamespace(check=checked.append, is_serving=False))
    lane = Lane()
    timer = prepare_later(cast(PostReplyQueue, lane), worker, seconds=0)
    timer.join()
    assert len(lane.functions) == 1
    assert not checked, "the lane decides when it runs"
    lane.functions[0]()
    assert [sampling.grammar_kind for sampling in checked] == ["llguidance"]


class BusyWorker:
    """A worker that serves a request for the first ``n`` times it is asked."""

    def __init__(self, n: int) -> None:
        self.n_left = n

    @property
    def is_serving(self) -> bool:
        """True while there are times left."""
        self.n_left -= 1
        return self.n_left >= 0

    def check(self, sampling: Sampling) -> None:
        """Compile nothing."""


def test_the_preparation_waits_for_the_end_of_requests() -> None:
    worker = BusyWorker(3)
    is_added = threading.Event()
    lane = SimpleNamespace(add=lambda function: is_added.set())
    prepare_later(cast(PostReplyQueue, lane), cast(Worker, worker), seconds=0)
    assert is_added.wait(60)
    assert worker.n_left == -1, "it looked three times in vain"


def test_the_first_requests_come_before_the_preparation() -> None:
    lane = Lane()
    timer = prepare_later(cast(PostReplyQueue, lane), cast(Worker, SimpleNamespace()))
    assert timer.daemon, "the end of the process does not wait for it"
    assert timer.interval == PREPARE_SECONDS
    assert not lane.functions
    timer.cancel()


def test_grammars_are_prepared_at_the_lowest_priority() -> None:
    def priority(*_: object) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    seen: list[int] = []
    priority()
    prepare_vocabulary(cast(Worker, SimpleNamespace(check=priority)))
    priority()
    assert seen == [seen[0], LOWEST_PRIORITY, seen[0]]
