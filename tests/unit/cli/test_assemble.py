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
from pyctl.cli.assemble import (
    LOWEST_PRIORITY,
    assemble,
    check_files,
    found,
    prepare_vocabulary,
    too_many_threads,
)
from pyctl.engine.worker import Worker
from pyctl.errors import ConfigError, ModelError
from pyctl.llama.library.devices import missing_text
from pyctl.model_files import HubSettings, hub

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


@pytest.fixture
def fetched(
    monkeypatch: pytest.MonkeyPatch, model_path: Callable[[str], Path]
) -> list[HubSettings]:
    """Return the settings of the requests to a hub that has the tiny model, and beside it a file
    that is no encoder.
    """
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
    """-hf brings the encoder beside the model. An unsupported one is a warning; only a named one is
    an error.
    """
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
        (
            ("-m", "WEIGHTS"),
            "WEIGHTS is not a GGUF file, and .safetensors files cannot be served: -hf "
            "USER/NAME-GGUF fetches a GGUF "
            "file of the model",
        ),
        (
            ("-m", "none.gguf"),
            "cannot read the model none.gguf: No such file or directory; pyctl models lists the "
            "models that are here, "
            "-hf USER/NAME fetches one",
        ),
        (
            ("-m", "No-One/Model:Q4_K_M"),
            "cannot read the model No-One/Model:Q4_K_M: No such file or directory; did you mean "
            "-hf "
            "No-One/Model:Q4_K_M?",
        ),
        (
            ("-m", "EMPTY"),
            (
                "cannot read the model EMPTY: Is a directory; to serve all models below it: "
                "--models-dir EMPTY"
            ),
        ),
        (
            ("-m", "MODEL", "-md", "/none"),
            "cannot read the draft model /none: No such file or directory",
        ),
        (
            ("-m", "MODEL", "-md", "EYES"),
            "EYES is for --mmproj (vision encoder), not for -md (draft model)",
        ),
        (
            ("-m", "MODEL", "--mmproj", "MODEL"),
            "MODEL is for -m (model), not for --mmproj (vision encoder)",
        ),
        (("-m", "MODEL", "--lora", "JUNK"), "JUNK is not a GGUF file"),
        (("-m", "MODEL", "--lora", "MODEL"), "MODEL is for -m (model), not for --lora (adapter)"),
    ],
)
def test_files_are_looked_at_before_a_load(
    flags: Sequence[str],
    told: str,
    model_path: Callable[[str], Path],
    tiny_mmproj: Path,
    tmp_path: Path,
) -> None:
    (junk := tmp_path / "junk").write_bytes(b"<!DOCTYPE html>")
    (weights := tmp_path / "model.safetensors").write_bytes(b"{}" * 8)
    (empty := tmp_path / "empty").mkdir()
    paths = {"MODEL": str(model_path("tiny-hybrid")), "EYES": str(tiny_mmproj), "JUNK": str(junk)}
    paths |= {"WEIGHTS": str(weights), "EMPTY": str(empty)}
    with pytest.raises(ModelError) as caught:
        check_files(parse_serve([paths.get(word, word) for word in flags], {}))
    for name, path in paths.items():
        told = told.replace(name, path)
    assert str(caught.value) == told


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


def test_grammars_are_prepared_at_the_lowest_priority() -> None:
    def priority(*_: object) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    seen: list[int] = []
    priority()
    prepare_vocabulary(cast(Worker, SimpleNamespace(check=priority)))
    priority()
    assert seen == [seen[0], LOWEST_PRIORITY, seen[0]]
