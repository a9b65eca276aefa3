"""The files of a model, before a load."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pyctl.cli.arguments import CommandSettings, parse_serve
from pyctl.cli.assemble import assemble
from pyctl.cli.model_paths import check_files, file_states, resolve_files, with_model
from pyctl.errors import ModelError
from pyctl.model_files import HubSettings, hub


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
    return resolve_files(parse_serve(flags, {}))


def stem(path: str) -> str:
    return Path(path).stem.partition("-")[0]


def test_a_draft_model_is_fetched_beside_a_model_that_is_a_file(fetched: list[HubSettings]) -> None:
    settings = of_hub("-m", "m.gguf", "-hfd", "org/d:Q8_0", "-md", "small.gguf")
    assert [(asked.hf_repo, asked.hf_file) for asked in fetched] == [("org/d:Q8_0", "small.gguf")]
    assert stem(settings.drafts.draft_path) == "tiny"
    assert settings.model.path == "m.gguf"


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
    assert "images disabled" in caplog.text
    assert service.info.vision is False
    with pytest.raises(ModelError):
        assemble(of_hub(*flags, "--mmproj", "eyes.gguf"))


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
            "cannot read the model none.gguf: No such file or directory; pyctl models lists "
            "local models, -hf USER/NAME fetches one",
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


def test_files_are_compared_by_their_states(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "m.gguf"
    copy.write_bytes(model_path("tiny-dense").read_bytes())
    settings = parse_serve(["-m", str(copy)], {})
    before = file_states(settings)
    assert len(before) == 1
    assert file_states(settings) == before
    status = copy.stat()
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert file_states(settings) != before
    copy.unlink()
    assert file_states(settings) == [], "a file that cannot be read has no state"


def test_the_builtin_model_stands_in_for_none() -> None:
    given = parse_serve(["-m", "m.gguf"], {})
    assert with_model(given) is given
    builtin = with_model(parse_serve([], {}))
    assert Path(builtin.model.path).exists()
    assert builtin.model.n_ctx == 65_536
    assert with_model(parse_serve(["-c", "512"], {})).model.n_ctx == 512
