"""Sampling parameters of a GGUF file, from the texts of its metadata."""

from __future__ import annotations

import logging

import pytest

from pyctl.engine.sampling import Sampling
from pyctl.llama.sampling.file_sampling import recommended_sampling

FIELDS = {
    "temp": "temperature",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
}
"""Fields whose names differ from their keys."""


def read(**texts: str) -> dict[str, object]:
    return recommended_sampling(lambda key: texts.get(key.removeprefix("general.sampling."), ""))


def test_every_key_has_its_field() -> None:
    """Each sampling key of a GGUF file sets the field of the same meaning, under the name that
    pyctl has for it.
    """
    found = read(
        sequence="top_k;temperature",
        top_k="20",
        top_p="0.95",
        min_p="0.01",
        xtc_probability="0.5",
        xtc_threshold="0.2",
        temp="1.0",
        penalty_last_n="-1",
        penalty_repeat="1.1",
        mirostat="2",
        mirostat_tau="4.5",
        mirostat_eta="0.2",
    )
    assert Sampling(**found) == Sampling(  # type: ignore[arg-type]
        samplers=("top_k", "temperature"),
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        temperature=1.0,
        repeat_last_n=-1,
        repeat_penalty=1.1,
        mirostat=2,
        mirostat_tau=4.5,
        mirostat_eta=0.2,
    )


@pytest.mark.parametrize(
    ("key", "text", "value", "said"),
    [
        ("temp", "nan", None, "not a finite number"),
        ("temp", "1" + 300 * "0" + ".000000", None, "not a finite number"),
        ("temp", "true", None, "not a number"),
        ("temp", "[1, 2]", None, "not a number"),
        ("temp", "-1.000000", 0.0, "cut"),
        ("top_p", "7.5", 1.0, "cut"),
        ("top_k", "20.000000", 20, ""),
        ("top_k", "-1", 0, ""),
        ("top_k", "2.5", None, "not a whole number"),
        ("top_k", "99999999999", 2**31 - 1, "cut"),
        ("penalty_last_n", "-7", None, "outside"),
        ("penalty_repeat", "0.000000", None, "greater than 0"),
        ("mirostat", "3", 2, "cut"),
        ("sequence", "top_k;" + "x" * 900, None, "unknown sampler"),
        ("sequence", "7", None, "unknown sampler"),
    ],
)
def test_a_bad_value_is_one_line(
    caplog: pytest.LogCaptureFixture, key: str, text: str, value: object, said: str
) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(**{key: text}, temp="0.5") if key != "temp" else read(temp=text)
    expected = {} if value is None else {FIELDS.get(key, key): value}
    assert found == {**({} if key == "temp" else {"temperature": 0.5}), **expected}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(said)
    assert all(
        said in line and f"general.sampling.{key}" in line and len(line) < 250 for line in lines
    )
