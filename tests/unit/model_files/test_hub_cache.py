"""Models that were fetched from huggingface.co before, in a made-up cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyctl.errors import ConfigError
from pyctl.model_files.hub_cache import (
    cached_files,
    choose,
    find_companion,
    main_revision,
    revisions,
)

MODEL = "m-Q4_K_M.gguf"


def fetch(home: Path, repo: str, commit: str, *names: str, main: str = "", age: int = 0) -> Path:
    """Make a revision of ``repo`` as the library keeps it: ``age`` seconds old."""
    place = home / f"models--{repo.replace('/', '--')}"
    revision = place / "snapshots" / commit
    for name in names:
        (revision / name).parent.mkdir(parents=True, exist_ok=True)
        (revision / name).touch()
    if main:
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(f"{main}\n")
    os.utime(revision, (1e9 - age, 1e9 - age))
    return revision


def environ(home: Path) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(home)}


def test_a_model_has_the_name_of_its_repository_and_quant(tmp_path: Path) -> None:
    """Encoders and the later parts of a split model are no models."""
    here = fetch(
        tmp_path,
        "org/m",
        "1",
        MODEL,
        "m-q8_0.gguf",
        "mmproj-F16.gguf",
        "big-BF16-00001-of-00002.gguf",
        "big-BF16-00002-of-00002.gguf",
        "sub/other.gguf",
    )
    assert cached_files(environ(tmp_path)) == {
        "org/m": here / "sub/other.gguf",
        "org/m:BF16": here / "big-BF16-00001-of-00002.gguf",
        "org/m:Q4_K_M": here / MODEL,
        "org/m:Q8_0": here / "m-q8_0.gguf",
    }


def test_the_revision_of_main_wins_over_a_newer_one(tmp_path: Path) -> None:
    fetch(tmp_path, "org/m", "new", MODEL)
    old = fetch(tmp_path, "org/m", "old", MODEL, main="old", age=60)
    assert cached_files(environ(tmp_path)) == {"org/m:Q4_K_M": old / MODEL}
    revision = main_revision("ORG/M", environ(tmp_path))
    assert revision is not None
    assert revision.path == old


def test_without_main_the_newest_revision_counts(tmp_path: Path) -> None:
    fetch(tmp_path, "org/m", "a", MODEL, age=60)
    new = fetch(tmp_path, "org/m", "b", MODEL)
    revision = main_revision("org/m", environ(tmp_path))
    assert revision is not None
    assert revision.path == new
    assert main_revision("org/other", environ(tmp_path)) is None


def test_a_file_that_is_gone_and_an_empty_revision_are_passed_over(tmp_path: Path) -> None:
    fetch(tmp_path, "org/m", "1", "a.gguf")
    (tmp_path / "models--org--m/snapshots/1/broken.gguf").symlink_to(tmp_path / "gone")
    (tmp_path / "models--org--m/snapshots/2").mkdir()
    (revision,) = revisions(environ(tmp_path))
    assert revision.names == ("a.gguf",)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"XDG_CACHE_HOME": "{}/x"}, "x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "{}/x", "HF_HOME": "{}/h"}, "h/hub"),
        ({"HF_HOME": "{}/h", "HUGGINGFACE_HUB_CACHE": "{}/old"}, "old"),
        ({"HUGGINGFACE_HUB_CACHE": "{}/old", "HF_HUB_CACHE": "{}/new"}, "new"),
    ],
)
def test_the_cache_is_where_the_library_has_it(
    variables: dict[str, str], place: str, tmp_path: Path
) -> None:
    fetch(tmp_path / place, "org/m", "1", MODEL)
    given = {name: value.format(tmp_path) for name, value in variables.items()}
    assert list(cached_files(given)) == ["org/m:Q4_K_M"]


NAMES = ("first.gguf", "m-Q8_0.gguf", "m-q4_k_m.gguf", "mmproj-m-Q8_0.gguf", "notes.txt")


@pytest.mark.parametrize(
    ("names", "quant", "file", "chosen"),
    [
        (NAMES, "", "", "m-q4_k_m.gguf"),
        (NAMES, "q8_0", "", "m-Q8_0.gguf"),
        (NAMES, "q8_0", "mmproj-m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"),
        (NAMES[:2], "", "", "m-Q8_0.gguf"),
        (NAMES[:1], "", "", "first.gguf"),
        (("a-BF16-00002-of-00002.gguf", "a-BF16-00001-of-00002.gguf"), "bf16", "", "a-BF16-00001"),
    ],
)
def test_a_file_is_chosen(names: tuple[str, ...], quant: str, file: str, chosen: str) -> None:
    assert choose(names, quant, file, "org/m").startswith(chosen)


@pytest.mark.parametrize(
    ("names", "quant", "file", "error"),
    [
        (NAMES, "", "x.gguf", "no file x.gguf in org/m; found first.gguf, m-Q8_0.gguf"),
        (NAMES, "Q5_K_M", "", "no GGUF file of quant Q5_K_M in org/m; found first.gguf"),
        (NAMES, "Q8", "", "no GGUF file of quant Q8 in org/m"),
        (NAMES[3:], "", "", "no GGUF file in org/m; found none"),
    ],
)
def test_without_a_file_the_error_lists_the_others(
    names: tuple[str, ...], quant: str, file: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        choose(names, quant, file, "org/m")


@pytest.mark.parametrize(
    ("model", "companion"),
    [
        ("m-Q4_K_M.gguf", "mmproj-Q8_0.gguf"),
        ("m-F32.gguf", "mmproj-F16.gguf"),
        ("sub/m-Q8_0.gguf", "sub/mmproj-F32.gguf"),
        ("sub/deep/m-Q8_0.gguf", "sub/mmproj-F32.gguf"),
    ],
)
def test_the_nearest_encoder_of_the_most_similar_quant_comes_with_a_model(
    model: str, companion: str
) -> None:
    names = ("mmproj-F16.gguf", "mmproj-Q8_0.gguf", "sub/mmproj-F32.gguf", "elsewhere/mmproj.gguf")
    assert find_companion(names, model) == companion


def test_a_model_may_have_no_encoder() -> None:
    assert find_companion(("mmproj.txt", "elsewhere/mmproj.gguf", "m.gguf"), "m.gguf") == ""
