"""The lines of `bench.families` about replies and about processes that end."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench import families
from bench.families import (
    AGAIN,
    FEWER,
    STEPS,
    Answer,
    Record,
    Sizes,
    Tally,
    distinct,
    prompt_of,
    row_of,
    summary,
)


def answer(*best: tuple[tuple[int, float], ...]) -> Answer:
    return Answer(tuple(each[0][0] for each in best), best, 3, 4)


def test_probabilities_are_compared_up_to_the_first_other_token() -> None:
    one = answer(((1, -1.0), (2, -2.0)), ((3, -1.0),), ((4, 0.0),))
    assert one.difference(one) == 0
    assert (
        one.difference(answer(((1, -1.25), (5, -2.0)), ((6, -1.0), (3, -1.5)), ((4, 9.0),))) == 0.5
    )
    assert one.difference(answer(((7, -1.5), (8, -4.0)))) == 3.0
    tally = Tally()
    tally.count("a", one, one)
    tally.count("b", one, answer(((1, -1.25),)))
    assert tally.n == 2
    assert tally.unequal == ["b"]
    assert tally.largest == 0.25
    assert tally.share == 0.75


def test_shared_beginnings_count_once() -> None:
    assert distinct([np.array(text) for text in ([1, 2, 3], [1, 2], [1, 2, 4, 5], [300], [7])]) == 7
    assert distinct([]) == 0


def test_prompts_hold_the_replies_of_earlier_steps() -> None:
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    assert {*AGAIN, *FEWER} <= set(names)
    replies = {step.name: answer(((7, 0.0),)) for step in STEPS}
    lengths = {step.name: prompt_of(step.messages, replies).tokens.size for step in STEPS}
    assert lengths["appended, 2"] == lengths["one turn"] + 1 + 40 + 3
    assert max(lengths.values()) < families.N_CTX // 2


def test_a_record_comes_back_as_it_was_told() -> None:
    tally = Tally(13, ["one"], 0.001, 5, 10)
    record = Record(
        "tiny",
        "attention",
        {"f16 default": tally, "restart default": tally},
        {"q8_0": "no"},
        Sizes(1, 2, 3, 4),
    )
    assert msgspec.convert(json.loads(json.dumps(asdict(record))), Record) == record
    row = row_of(record)
    assert row[2] == "1/13, 1e-03"
    assert "refused" in row
    assert "50% / 50%" in row
    assert "tiny: q8_0 refused: no" in summary([record])


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        (
            (
                "echo one >&2; echo '/tmp/a/llama.cpp:7: GGML_ASSERT(x) failed' >&2; echo more "
                ">&2; "
                "exit 134"
            ),
            "llama.cpp:7",
        ),
        ("echo 'pyctl.errors.ModelError: no' >&2; exit 1", "pyctl.errors.ModelError: no"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_process_that_fails_is_a_line_of_the_table(
    script: str, failure: str, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    record = families.in_own_process("tiny-lfm2", program=[str(program)])
    assert record.failure.startswith(failure)
    assert record.failure in row_of(record)
