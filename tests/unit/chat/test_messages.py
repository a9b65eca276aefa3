from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.messages import check_messages, fit_messages
from pyctl.chat.template import Template, TemplateCapabilities
from pyctl.errors import RequestError
from tests.unit.chat import toy
from tests.unit.chat.toy import prepare

ROLES = {"system_first", "system_inside", "repeated_user", "without_user"}
CALLS = {"tool_calls", "parallel_calls", "object_arguments"}
ALL = TemplateCapabilities(True, True, True, True, True, True, True, True)


def fit(messages: Any, **capabilities: bool) -> list[tuple[str, Any]]:
    fitted = fit_messages(check_messages(messages), replace(ALL, **capabilities))
    return [(message["role"], message["content"]) for message in fitted]


def said(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (None, "'messages' must be a list"),
        ([], "at least one"),
        ("hi", "'messages' must be a list"),
        ([{"role": "user", "content": ["hi"]}], r"content\[0\] must be an object"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "not null"),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}],
            "refusal must be a string",
        ),
        ([{"role": "assistant", "content": None, "function_call": "f"}], "object with a name"),
        ([123], r"messages\[0\] must be an object"),
        ([{}], r"messages\[0\].role"),
        ([{"role": 1, "content": "x"}], "not 1"),
        ([{"role": "<|im_start|>", "content": "x"}], "must be a word"),
        ([{"role": "", "content": "x"}], "must be a word"),
        ([{"role": "a" * 65, "content": "x"}], "must be a word"),
        ([{"role": "wizard\n", "content": "x"}], "must be a word"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 1}], "must be a string or a list"),
        ([{"role": "user", "content": [1]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text must be a string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "may need to provide the mmproj",
        ),
        ([{"role": "user", "content": "x"}, {"role": "assistant"}], r"messages\[1\] has neither"),
        (
            [{"role": "assistant", "content": "", "reasoning_content": 1}],
            "reasoning_content must be a string",
        ),
        ([{"role": "assistant", "tool_calls": {}}], r"neither|list"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"type": "x"}]}], "of type function"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}], "with a name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "arguments must be",
        ),
    ],
)
def test_bad_messages_are_named(messages: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        check_messages(messages)


def test_a_refusal_is_what_the_assistant_wrote() -> None:
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    assert check_messages([part])[0]["content"] == ["I will not."]
    member = {"role": "assistant", "content": None, "refusal": "I will not."}
    assert check_messages([member]) == [{"role": "assistant", "content": "I will not."}]
    del member["content"]
    assert check_messages([member]) == [{"role": "assistant", "content": "I will not."}]
    assert check_messages([{**member, "content": "But"}])[0]["content"] == "But"


def test_a_call_as_openai_had_it_before_tools_is_a_call() -> None:
    function = {"name": "look", "arguments": "{}"}
    for content in ({"content": None}, {}):
        (message,) = check_messages([{"role": "assistant", **content, "function_call": function}])
        assert message["tool_calls"] == [{"type": "function", "function": function}]


def test_what_templates_do_not_read_is_dropped() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "r",
        "name": None,
        "x": 1,
    }
    assert check_messages([message]) == [
        {"role": "assistant", "content": "", "reasoning_content": "r"}
    ]


def test_a_role_that_only_the_template_knows_is_handed_to_it(qwen_template: str) -> None:
    for role in ("function", "ipython", "observation", "control", "document", "tool_response"):
        messages = said(("user", "U"), (role, "x"))
        assert fit(messages) == [("user", "U"), (role, "x")]
        assert f"<|im_start|>{role}\nx<|im_end|>" in prepare(chat_of(toy.CHATML), messages).text
        with pytest.raises(RequestError, match="Unexpected message role"):
            prepare(chat_of(qwen_template), messages)


def chat_of(source: str) -> ChatFormat:
    return ChatFormat(Template(source, eos_token="<|im_end|>"), toy.chatml_tokenizer())


def test_a_conversation_in_which_the_user_says_nothing_is_rendered(qwen_template: str) -> None:
    """An empty user message is added after the system messages if the template would fail without
    one, and only then: an addition without need would change the prompt of other templates.
    """
    chat = chat_of(qwen_template)
    empty = "<|im_start|>user\n<|im_end|>\n"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "x", "content": "rain"}
    for messages, before in (
        ([called, result], ""),
        (said(("system", "S")), "<|im_start|>system\nS<|im_end|>\n"),
        ([*said(("system", "S")), called, result], "<|im_start|>system\nS<|im_end|>\n"),
        (said(("assistant", "A")), ""),
        ([result], ""),
    ):
        assert prepare(chat, messages).text.startswith(before + empty)
    plain = prepare(chat_of(toy.CHATML), said(("system", "S"), ("assistant", "A"))).text
    assert plain == "<|im_start|>system\nS<|im_end|>\n<|im_start|>assistant\nA", (
        "nothing is added without need"
    )


def test_developer_is_system() -> None:
    assert fit(said(("developer", "D"), ("user", "U"))) == [("system", "D"), ("user", "U")]


def test_parts_are_joined_unless_the_template_takes_them() -> None:
    parts = said(("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))
    assert fit(parts, parts=False) == [("user", "a\nb")]
    assert fit(parts) == [("user", parts[0]["content"])]
    assert fit(said(("user", "a")), text=False) == [("user", [{"type": "text", "text": "a"}])]


def test_system_messages_inside_stay_in_place_as_user_text() -> None:
    messages = said(
        ("system", "S"), ("user", "U"), ("system", "note"), ("assistant", "A"), ("system", "more")
    )
    assert fit(messages) == [(m["role"], m["content"]) for m in messages]
    first = ("system", "S")
    last = [("assistant", "A"), ("user", "more")]
    assert fit(messages, system_inside=False) == [first, ("user", "U"), ("user", "note"), *last]
    assert fit(messages, system_inside=False, repeated_user=False) == [
        first,
        ("user", "U\n\nnote"),
        *last,
    ]


def test_leading_system_messages_are_joined_or_become_user_text() -> None:
    messages = said(("system", "S1"), ("developer", "S2"), ("user", "U"))
    assert fit(messages, system_inside=False) == [("system", "S1\n\nS2"), ("user", "U")]
    without = {"system_first": False, "system_inside": False}
    assert fit(messages, **without) == [("user", "S1"), ("user", "S2"), ("user", "U")]
    assert fit(messages, **without, repeated_user=False) == [("user", "S1\n\nS2\n\nU")]


def test_the_clients_messages_are_left_alone() -> None:
    messages = said(("user", "U"), ("system", "S"))
    checked = check_messages(messages)
    fit_messages(checked, replace(ALL, system_inside=False, repeated_user=False))
    assert checked == messages


@pytest.mark.parametrize(
    ("arguments", "as_object", "as_text"),
    [
        ('{"a": "ü"}', {"a": "ü"}, '{"a": "ü"}'),
        ({"a": "ü"}, {"a": "ü"}, '{"a": "ü"}'),
        ("", {}, ""),
        ('{"a": ', '{"a": ', '{"a": '),
        ("[1]", "[1]", "[1]"),
    ],
)
def test_arguments_of_calls(arguments: Any, as_object: Any, as_text: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    checked = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    for capabilities, expected in (
        (ALL, as_object),
        (replace(ALL, object_arguments=False), as_text),
    ):
        fitted = fit_messages(checked, capabilities)[0]["tool_calls"]
        assert fitted == [{**call, "function": {"name": "f", "arguments": expected}}]


@pytest.mark.parametrize(
    ("source", "lacks"),
    [
        (toy.CHATML, {"parts", "tools", "old_reasoning"}),
        (toy.THINKING, {"parts", "tools", *CALLS, "system_inside"}),
        (toy.GEMMA, {"parts", "tools", *CALLS, "old_reasoning", *ROLES}),
        (toy.PARTS_ONLY, {"text", "tools", *CALLS, "old_reasoning"}),
        (
            toy.CHATML + "{{ reasoning_effort }}",
            {"parts", "tools", "old_reasoning", "reasoning_effort"},
        ),
    ],
)
def test_capabilities_are_found_by_rendering(source: str, lacks: set[str]) -> None:
    capabilities = TemplateCapabilities.probe(Template(source))
    assert {name for name, has in vars(capabilities).items() if not has} == lacks ^ {
        "reasoning_effort"
    }


def test_capabilities_of_the_real_template(qwen_template: str) -> None:
    capabilities = TemplateCapabilities.probe(Template(qwen_template))
    lacks = {name for name, has in vars(capabilities).items() if not has}
    assert lacks == {"system_inside", "old_reasoning", "reasoning_effort", "without_user"}


def test_two_conversations_of_claude_code_share_their_system_text() -> None:
    header = (
        "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli;You are a helper."
    )
    one, two = (fit(said(("system", header.format(stamp)))) for stamp in ("a5a", "f9d"))
    assert one == two == [("system", header.format("fff"))]
    for stamp in ("a5", "a5ag", "xyz"):
        assert fit(said(("system", header.format(stamp)))) == [("system", header.format(stamp))]


def test_the_stamp_in_the_billing_header_is_blotted_out() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.101.fff; cc_entrypoint=cli; cch={};"
    for stamp in ("a5145", "0", "0123456789abcdef"):
        text = header.format(stamp) + "You are Claude Code. cch=a5145;"
        blotted = header.format("fffff") + "You are Claude Code. cch=a5145;"
        assert fit(said(("system", text))) == [("system", blotted)]
        parts = [{"type": "text", "text": text}, {"type": "text", "text": "x"}]
        assert check_messages(said(("system", parts)))[0]["content"] == [blotted, "x"]
        assert fit(said(("user", text))) == [("user", text)]
    for text in ("cch=a5145;", header.format("") + "\ncch=a5145;", "See " + header.format("a5145")):
        assert fit(said(("system", text))) == [("system", text)]
