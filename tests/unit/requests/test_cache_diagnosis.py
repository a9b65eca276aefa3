"""Diagnoses by the id of an earlier reply: the first part that differs, bounded records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyctl.chat.sections import digest_sections
from pyctl.prompt import Prompt
from pyctl.requests.cache_diagnosis import (
    CacheMiss,
    RequestRecord,
    RequestRecords,
    diagnose,
)
from tests.client import HI

ME = b"me"
SYSTEM = {"role": "system", "content": "Be kind."}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
REPLY = {"role": "assistant", "content": "Hello"}
BASE: dict[str, Any] = {"messages": [SYSTEM, *HI], "tools": [TOOL]}
N_TOKENS = 2000


def record(model: str = "toy", owner: bytes = ME, **fields: Any) -> RequestRecord:
    variables = {**BASE, **fields}
    sections = digest_sections(variables.pop("messages"), variables.pop("tools"), variables)
    prompt = replace(Prompt.from_ids(range(N_TOKENS)), sections=sections)
    return RequestRecord.from_prompt(owner, model, prompt)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "other", "tools": []}, "model"),
        ({"tools": [], "messages": HI}, "tools"),
        ({"messages": HI}, "system"),
        ({"messages": [{**SYSTEM, "content": "Be brief."}, *HI]}, "system"),
        ({"messages": [SYSTEM, {"role": "user", "content": "Who?"}]}, "messages"),
        ({"messages": [SYSTEM]}, "messages"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "options"),
        ({"reasoning_effort": "low"}, "options"),
        ({}, "not_cached"),
        ({"messages": [SYSTEM, *HI, REPLY, *HI]}, "not_cached"),
    ],
)
def test_the_first_part_that_differs_is_the_reason(fields: Any, reason: Any) -> None:
    assert diagnose(record(), record(**fields), 100) == CacheMiss(reason, N_TOKENS - 100)


def test_a_prompt_that_resumes_has_missed_nothing() -> None:
    assert diagnose(record(), record(tools=[]), N_TOKENS) is None


def test_the_last_batch_of_a_continued_prompt_may_be_evaluated_again() -> None:
    later = record(messages=[SYSTEM, *HI, REPLY, *HI])
    assert diagnose(record(), later, N_TOKENS - 511) is None
    assert diagnose(record(), later, N_TOKENS - 512) == CacheMiss("not_cached", 512)
    assert diagnose(record(), record(tools=[]), N_TOKENS - 1) == CacheMiss("tools", 1)


def test_an_unknown_request_is_a_reason_without_tokens() -> None:
    assert diagnose(None, record(), 0) == CacheMiss("not_found")


def test_a_record_is_found_by_its_owner_only() -> None:
    records = RequestRecords()
    mine = record()
    records.add("m1", mine)
    assert records.find("m1", ME) is mine
    assert records.find("m1", b"you") is None
    assert records.find("m2", ME) is None


def test_records_are_bounded_in_number() -> None:
    records = RequestRecords(max_entries=2)
    for number in range(5):
        records.add(f"m{number}", record())
    assert len(records) == 2
    assert records.find("m2", ME) is None
    assert records.find("m3", ME) is not None


def test_records_are_bounded_in_bytes() -> None:
    one = record()
    records = RequestRecords(max_bytes=2 * one.n_bytes)
    for number in range(5):
        records.add(f"m{number}", one)
    assert len(records) == 2
    assert records.n_bytes == 2 * one.n_bytes
    large = replace(one.sections, messages=b"x" * 10 * one.n_bytes)
    records.add("large", replace(one, sections=large))
    assert len(records) == 0
    assert records.n_bytes == 0
