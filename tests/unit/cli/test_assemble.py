"""Objects built from several settings at once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pyctl.cli import serve_command
from pyctl.cli.arguments import CommandSettings, parse_serve
from pyctl.cli.assemble import LOWEST_PRIORITY, assemble, check_files, found, prepare_vocabulary
from pyctl.engine.worker import Worker
from pyctl.errors import ConfigError, ModelError
from pyctl.models import HubSettings, hub

MIB = 2**20


@pytest.mark.parametrize(("ram", "rows", "snapshots"), [("64", 4, 60), ("8192", 256, 8192 - 256), ("0", 0, 0)])
def test_rows_of_images_count_within_the_cache(
    model_path: Callable[[str], Path], tiny_mmproj: Path, ram: str, rows: int, snapshots: int
) -> None:
    flags = ["-m", str(model_path("tiny-hybrid")), "-c", "512", "-t", "1", "--cache-ram", ram]
    service = assemble(parse_serve([*flags, "--mmproj", str(tiny_mmproj)], {}))
    try:
        engine = service.worker._engine
        assert engine.backend.encoder.rows.limit == rows * MIB
        assert engine.prefix_cache.cache.budget == snapshots * MIB
    finally:
        service.worker.close()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, model_path: Callable[[str], Path]) -> list[HubSettings]:
    """What was asked of a hub that has the tiny model, and beside it an encoder that is none."""
    asked: list[HubSettings] = []
    model = model_path("tiny-hybrid")

    def fetch(settings: HubSettings) -> Path:
        asked.append(settings)
        return model

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.setattr(hub, "fetch_companion", lambda *_: "eyes.gguf")
    return asked


def of_hub(*flags: str) -> CommandSettings:
    return found(parse_serve(flags, {}))


def stem(path: str) -> str:
    return Path(path).stem.partition("-")[0]


def test_a_draft_model_is_fetched_beside_a_model_that_is_a_file(fetched: list[HubSettings]) -> None:
    settings = of_hub("-m", "m.gguf", "-hfd", "org/d:Q8_0", "-md", "small.gguf")
    assert [(asked.hf_repo, asked.hf_file) for asked in fetched] == [("org/d:Q8_0", "small.gguf")]
    assert (stem(settings.drafts.draft_path), settings.model.path) == ("tiny", "m.gguf")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["-hf", "org/m"], "eyes"),
        (["-hf", "org/m", "--no-mmproj"], ""),
        (["-hf", "org/m", "--mmproj", "mine.gguf"], "mine"),
        (["-hf", "org/m", "-mmu", "http://h/v.gguf"], "tiny"),
        (["-hf", "org/m", "--kv-pool", "auto"], ""),
        (["-m", "m.gguf", "-mmu", "http://h/v.gguf"], "tiny"),
        (["-m", "m.gguf"], ""),
    ],
)
def test_a_vision_encoder_that_is_named_is_the_one_that_is_used(
    fetched: list[HubSettings], flags: Sequence[str], name: str
) -> None:
    assert stem(of_hub(*flags).vision.mmproj_path) == name


def test_a_vision_encoder_that_nobody_asked_for_stops_nothing(
    fetched: list[HubSettings], caplog: pytest.LogCaptureFixture
) -> None:
    """-hf brings the encoder beside the model. An unsupported one is a warning; only a named one is an error."""
    flags = ("-hf", "org/m", "-c", "512", "-t", "1", "--no-kv-cache")
    with caplog.at_level(logging.WARNING, "pyctl"):
        service = assemble(of_hub(*flags))
    service.worker.close()
    assert ("images disabled" in caplog.text, service.info.vision) == (True, False)
    with pytest.raises(ModelError):
        assemble(of_hub(*flags, "--mmproj", "eyes.gguf"))


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


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("-m", "JUNK"), "JUNK is not a GGUF file"),
        (("-m", "MODEL", "-md", "/none"), "cannot read the draft model /none: No such file or directory"),
        (("-m", "MODEL", "-md", "EYES"), "EYES is for --mmproj (vision encoder), not for -md (draft model)"),
        (("-m", "MODEL", "--mmproj", "MODEL"), "MODEL is for -m (model), not for --mmproj (vision encoder)"),
        (("-m", "MODEL", "--lora", "JUNK"), "JUNK is not a GGUF file"),
        (("-m", "MODEL", "--lora", "MODEL"), "MODEL is for -m (model), not for --lora (adapter)"),
    ],
)
def test_files_are_looked_at_before_a_load(
    flags: Sequence[str], told: str, model_path: Callable[[str], Path], tiny_mmproj: Path, tmp_path: Path
) -> None:
    (junk := tmp_path / "junk").write_bytes(b"<!DOCTYPE html>")
    paths = {"MODEL": str(model_path("tiny-hybrid")), "EYES": str(tiny_mmproj), "JUNK": str(junk)}
    with pytest.raises(ModelError) as caught:
        check_files(parse_serve([paths.get(word, word) for word in flags], {}))
    assert str(caught.value) == " ".join(paths.get(word, word) for word in told.split())


def test_grammars_are_prepared_at_the_lowest_priority() -> None:
    def priority(*_: object) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    seen: list[int] = []
    priority()
    prepare_vocabulary(cast(Worker, SimpleNamespace(check=priority)))
    priority()
    assert seen == [seen[0], LOWEST_PRIORITY, seen[0]]
