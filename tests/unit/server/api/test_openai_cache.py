"""OpenAI's cache options: what they mean for a request, what is refused, and the diagnoses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyctl.chat.sections import digest_sections
from pyctl.errors import RequestError
from pyctl.prompt import Prompt
from pyctl.requests.cache_diagnosis import RequestRecord, RequestRecords
from pyctl.server.api.openai_cache import MAX_KEY, ComparedReply, PromptCaching
from pyctl.server.api.responses_request import ResponseRequest

ME = b"me"


def read(items: Any = None, **options: Any) -> PromptCaching:
    return PromptCaching.from_json({"prompt_cache_options": options}, items)


def message(role: str, **mark: Any) -> dict[str, Any]:
    """Return a message of two parts; ``mark`` is the breakpoint of the second one."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    if mark:
        parts[1]["prompt_cache_breakpoint"] = mark
    return {"role": role, "content": parts}


def test_a_request_without_options_is_unchanged() -> None:
    caching = PromptCaching.from_json({}, [message("user")])
    assert caching.with_chat_fields({"max_tokens": 5}) == {"max_tokens": 5}
    assert caching.applied() == {}


def test_prewarm_generates_nothing_under_any_name_of_the_limit() -> None:
    caching = read(prewarm=True)
    chat = {"max_tokens": 5, "max_completion_tokens": 7, "n_predict": 9}
    assert caching.with_chat_fields(chat) == {"max_tokens": 0}
    assert caching.is_prewarm


def test_a_lifetime_is_announced_only_if_the_client_names_one() -> None:
    assert read(mode="implicit").with_chat_fields({}) == {}
    announced = read(ttl="12h").with_chat_fields({})
    assert announced == {"cache_retention": {"head_seconds": 0, "prompt_seconds": 43_200}}


def test_breakpoints_announce_the_head_or_the_prompt() -> None:
    items = [message("system", mode="explicit", ttl="12h"), message("user", mode="explicit")]
    announced = read(items, mode="explicit", ttl="30m").with_chat_fields({})
    assert announced == {"cache_retention": {"head_seconds": 43_200, "prompt_seconds": 1_800}}


def test_explicit_mode_without_breakpoint_does_not_use_the_cache() -> None:
    assert read([message("user")], mode="explicit").with_chat_fields({}) == {"cache_prompt": False}
    marked = [message("user", mode="explicit")]
    assert read(marked, mode="explicit").with_chat_fields({}) == {}


def test_the_fields_of_this_server_win() -> None:
    own = {"cache_retention": {"prompt_seconds": 5}}
    assert read(ttl="30m").with_chat_fields(own) == own


def test_a_reply_repeats_the_options() -> None:
    values = {
        "prompt_cache_key": "mine",
        "prompt_cache_options": {"comparison_response_id": "resp_1"},
    }
    assert PromptCaching.from_json(values, None).applied() == {
        "prompt_cache_key": "mine",
        "prompt_cache_options": {
            "mode": "implicit",
            "ttl": "30m",
            "comparison_response_id": "resp_1",
        },
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_cache_options": 1}, "'prompt_cache_options' must be an object"),
        (
            {"prompt_cache_options": {"mode": "x"}},
            "'prompt_cache_options.mode' must be",
        ),
        ({"prompt_cache_options": {"ttl": "1h"}}, "'prompt_cache_options.ttl' must be 30m or 12h"),
        ({"prompt_cache_options": {"prewarm": 1}}, "'prewarm' must be true or false"),
        ({"prompt_cache_key": 1}, "'prompt_cache_key' must be a string"),
        ({"prompt_cache_key": "x" * (MAX_KEY + 1)}, "'prompt_cache_key' must have at most"),
        ({"prompt_cache_retention": "1h"}, "'prompt_cache_retention' must be in_memory or 24h"),
    ],
)
def test_other_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        PromptCaching.from_json(values, None)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("mark", "name"),
    [("x", ""), ({"mode": "auto"}, ".mode"), ({"mode": "explicit", "ttl": 1}, ".ttl")],
)
def test_other_breakpoints_are_refused(mark: Any, name: str) -> None:
    items = [{"role": "user", "content": [{"prompt_cache_breakpoint": mark}]}]
    with pytest.raises(RequestError) as refused:
        read(items)
    assert str(refused.value).startswith(f"'prompt_cache_breakpoint{name}' must be")


def test_a_response_is_a_chat_with_the_same_fields() -> None:
    values = {
        "input": [message("user", mode="explicit", ttl="30m")],
        "max_output_tokens": 9,
        "prompt_cache_key": "mine",
        "prompt_cache_options": {"prewarm": True},
    }
    values["input"][0]["content"] = [
        {**part, "type": "input_text"} for part in values["input"][0]["content"]
    ]
    asked = ResponseRequest.from_json(values)
    assert asked.chat["max_tokens"] == 0
    assert asked.chat["cache_retention"]["prompt_seconds"] == 1_800
    assert not asked.chat.keys() & {"prompt_cache_key", "prompt_cache_options"}


def record(text: str, owner: bytes = ME, tools: Any = None, **variables: Any) -> RequestRecord:
    """Return the record of a message ``text``, which was rendered to a prompt of 1,000 tokens."""
    sections = digest_sections([{"role": "user", "content": text}], tools, variables)
    prompt = replace(Prompt.from_ids(range(1000), [990]), sections=sections)
    return RequestRecord.from_prompt(owner, "m", prompt)


def compare(
    records: RequestRecords, later: str, *, n_cached: int, owner: bytes = ME, **fields: Any
) -> Any:
    """Return the diagnosis of a prompt of 1,000 tokens against the reply "first"."""
    caching = read(comparison_response_id="first")
    comparison = ComparedReply(caching, records, record(later, owner, **fields))
    members = comparison.diagnostics(n_cached)
    comparison.remember("later")
    return members["prompt_cache_diagnostics"]


@pytest.fixture
def records() -> RequestRecords:
    """The records with one request, the message "hi", answered by "first"."""
    records = RequestRecords()
    ComparedReply(PromptCaching(), records, record("hi")).remember("first")
    return records


def test_a_prompt_that_resumes_is_a_hit(records: RequestRecords) -> None:
    assert compare(records, "hi", n_cached=1000) == {"type": "cache_hit"}


def test_the_first_part_that_differs_is_named(records: RequestRecords) -> None:
    miss = compare(records, "ho", n_cached=400)
    assert miss["type"] == "cache_miss"
    assert miss["reason"] == "input_changed"
    assert miss["cache_missed_tokens"] == miss["comparison_reusable_tokens"] - 400
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert compare(records, "hi", n_cached=0, tools=tools)["reason"] == "tools_changed"
    effort = compare(records, "hi", n_cached=0, reasoning_effort="low")
    assert effort["reason"] == "reasoning_effort_changed"


def test_an_evicted_prompt_has_no_reason_at_openai(records: RequestRecords) -> None:
    assert compare(records, "hi", n_cached=0) == {"type": "unavailable"}


def test_replies_of_others_are_not_found(records: RequestRecords) -> None:
    assert compare(records, "hi", n_cached=1000, owner=b"you") == {
        "type": "comparison_response_not_found"
    }


def test_every_request_is_remembered(records: RequestRecords) -> None:
    compare(records, "hi", n_cached=0)
    assert records.find("later", ME) is not None
