"""Sampling parameters: names of samplers, and ranges."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pyctl.engine.sampling import SAMPLER_LETTERS, SAMPLERS, Sampling, field_range, sampler_named


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_has_its_name_in_any_spelling(name: str) -> None:
    assert sampler_named(name) == name
    assert sampler_named(name.upper().replace("_", "-")) == name


def test_an_unknown_sampler_has_no_name() -> None:
    assert sampler_named("dice") is None


def test_each_sampler_has_one_letter() -> None:
    assert sorted(SAMPLER_LETTERS.values()) == sorted(SAMPLERS)


def test_each_default_is_in_its_range() -> None:
    ranges = {item.name: field_range(item) for item in fields(Sampling)}
    for item in fields(Sampling):
        limits = ranges[item.name]
        if limits is not None:
            assert limits.low <= item.default <= limits.high, item.name
