"""Settings of the model: the forms that their flags take, and settings that exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import ConfigError
from pyctl.llama.settings.model_settings import (
    MAX_WORKERS,
    ModelSettings,
    as_metadata,
    as_workers,
    proportions,
    scaled,
    unscaled,
)


@pytest.mark.parametrize(
    ("text", "values"), [("1,3", (1.0, 3.0)), ("0.5/0.5", (0.5, 0.5)), ("0,1", (0.0, 1.0))]
)
def test_proportions_are_parted_by_commas_or_slashes(text: str, values: tuple[float, ...]) -> None:
    assert proportions(text) == values


@pytest.mark.parametrize("text", ["0,0", "0", "-1,2", "a", ""])
def test_other_proportions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        proportions(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=int:-7", -7), ("a=float:1.5", 1.5), ("a=bool:true", True), ("a=str:x y", "x y")],
)
def test_metadata_have_a_type(text: str, value: object) -> None:
    assert as_metadata(text) == (("a", value),)


def test_several_metadata_are_parted_by_commas() -> None:
    assert as_metadata("a=int:1,b=bool:false") == (("a", 1), ("b", False))


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a=1",
        "a=byte:1",
        "a=int:x",
        f"a=int:{2**63}",
        "a=bool:yes",
        "ä=int:1",
        "a" * 128 + "=int:1",
    ],
)
def test_other_metadata_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        as_metadata(text)


def test_adapters_have_a_scale_of_one_unless_it_is_given() -> None:
    assert unscaled("a.gguf,b.gguf") == (("a.gguf", 1.0), ("b.gguf", 1.0))
    assert scaled("C:/a.gguf:0.5") == (("C:/a.gguf", 0.5),)


@pytest.mark.parametrize("text", ["a.gguf", ":0.5", "a.gguf:", "a.gguf:x"])
def test_an_adapter_without_its_scale_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        scaled(text)


def test_each_worker_counts_once() -> None:
    assert as_workers("a:1,b.c:65535,a:1") == ("a:1", "b.c:65535")


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a:",
        "a:0",
        "a:65536",
        "[::1]:80",
        "a b:1",
        "",
        ",".join(f"a:{n}" for n in range(1, MAX_WORKERS + 2)),
    ],
)
def test_other_workers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        as_workers(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"flash_attn": "off", "type_v": "q8_0"}, "needs flash attention"),
        ({"workers": ("a:1",), "split_mode": "tensor"}, "--rpc excludes --split-mode tensor"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSettings(**fields)


def test_a_quantised_k_needs_no_flash_attention() -> None:
    assert ModelSettings(flash_attn="off", type_k="q8_0").type_k == "q8_0"
