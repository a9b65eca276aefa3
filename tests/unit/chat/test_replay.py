from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.replay import Replay
from pyctl.chat.reply import ParsedReply
from pyctl.chat.template import Template
from pyctl.chat.tokenizer import Tokenizer
from tests.effort import examples
from tests.functions import function, turned
from tests.unit.chat import toy
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.toy import prepare

Message = dict[str, Any]

TOOL = function("look_up", description="", city={"type": "string"}, days={"type": "integer"})
AT = b"a place"
HI: Message = {"role": "user", "content": "Hi"}
RESULT: Message = {"role": "tool", "tool_call_id": "x", "content": "rain"}
XML = (
    "<tool_call>\n<function=look_up>\n<parameter=days>\n "
    "3\n</parameter>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
)
JSON = (
    '<tool_call>\n{"name":"look_up",  "arguments":{ "days":3,"city":"Par\\u0069s"}}\n</tool_call>'
)


class Dialogue:
    """A client and a server that remembers; replies are sampled one byte a token, as no tokenizer
    would.
    """

    def __init__(
        self, template: str, mode: str = "equal", tokenizer: Tokenizer | None = None
    ) -> None:
        self.replay = Replay(mode)
        self.chat = ChatFormat(
            Template(template, eos_token="<|im_end|>"),
            tokenizer or toy.chatml_tokenizer(),
            replay=self.replay,
        )
        self.messages: list[Message] = []
        self.tokens: list[int] = []
        self.unbroken: list[bool] = []

    def turn(
        self, *messages: Message, reply: str, tokens: list[int] | None = None, **kwargs: Any
    ) -> Message:
        """Send ``messages`` and get ``reply``, which is returned as a message; notes whether the
        prompt goes on where the last reply ended.
        """
        self.messages += messages
        turn = prepare(self.chat, self.messages, tools=[TOOL], template_kwargs=kwargs)
        prompt = turn.prompt.tokens.tolist()
        self.unbroken.append(prompt[: len(self.tokens)] == self.tokens)
        tokens = list(reply.encode()) if tokens is None else tokens
        self.tokens = prompt + tokens
        parsed: list[Any] = []
        splitter = turn.splitter()
        for at, letter in enumerate(reply):
            parsed.append(splitter.feed(letter, tokens if at == 0 else ()))
        parsed.append(splitter.finish())
        whole = ParsedReply()
        for delta in parsed:
            whole.add(delta)
        return whole.message()


def rewritten(message: Message, **changes: Any) -> Message:
    """Return the message as a client may send it back: without ids, arguments written in another
    way.
    """
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        text = json.dumps(dict(sorted(arguments.items())), indent=2)
        calls.append(
            {"type": "function", "function": {"name": call["function"]["name"], "arguments": text}}
        )
    return {**message, **({"tool_calls": calls} if calls else {}), **changes}


def qwen() -> str:
    return unpacked("templates/Qwen3.5-4B.jinja").read_text()


@pytest.mark.parametrize(
    ("template", "reply"),
    [
        (qwen, f"hm\n\n</think>\n\nI look.\n{XML}\n"),
        (qwen, f" so{XML}"),
        (lambda: unpacked("templates/Qwen3-Coder.jinja").read_text(), f"I look.\n{XML}"),
        (
            lambda: unpacked("templates/Qwen-Qwen3-0.6B.jinja").read_text(),
            f"<think>hm</think>{JSON}",
        ),
        (
            lambda: unpacked("templates/Qwen-Qwen2.5-7B-Instruct.jinja").read_text(),
            f"```json{JSON[11:-12]}```\n",
        ),
    ],
)
def test_a_round_trip_of_a_tool_is_unbroken(template: Callable[[], str], reply: str) -> None:
    for mode in ("equal", "off"):
        dialogue = Dialogue(template(), mode)
        said = dialogue.turn(HI, reply=reply)
        assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {
            "city": "Paris",
            "days": 3,
        }
        dialogue.turn(rewritten(said), RESULT, reply="It rains.")
        assert dialogue.unbroken == [True, mode == "equal"]


def test_the_thinking_of_a_whole_chain_stays_after_the_next_question() -> None:
    dialogue = Dialogue(qwen())
    said = dialogue.turn(HI, reply=f"hm\n</think>\n\n{XML}")
    said = dialogue.turn(said, RESULT, reply="fine\n</think>\n\nIt rains.")
    dialogue.turn(said, HI, reply="bye</think>Bye")
    assert dialogue.unbroken == [True, True, True]
    assert "hm\n</think>" in prepare(dialogue.chat, dialogue.messages, tools=[TOOL]).text
    without = ChatFormat(dialogue.chat.template, toy.chatml_tokenizer())
    assert "hm" not in prepare(without, dialogue.messages, tools=[TOOL]).text


@pytest.mark.parametrize(("mode", "unbroken"), [("equal", False), ("full", True)])
def test_reasoning_that_the_client_dropped_comes_back_only_if_asked_for(
    mode: str, unbroken: bool
) -> None:
    dialogue = Dialogue(qwen(), mode)
    said = dialogue.turn(HI, reply=f"hm\n</think>\n\n{XML}")
    del said["reasoning_content"]
    dialogue.turn(said, RESULT, reply="</think>It rains.")
    assert dialogue.unbroken == [True, unbroken]


ROME = {
    "type": "function",
    "function": {"name": "look_up", "arguments": {"city": "Rome", "days": 3}},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"content": "other"},
        {"reasoning_content": "other"},
        {"tool_calls": []},
        {"tool_calls": [ROME]},
    ],
)
def test_a_message_that_means_something_else_is_not_replaced(changes: Message) -> None:
    for mode in ("equal", "full"):
        dialogue = Dialogue(qwen(), mode)
        said = {**dialogue.turn(HI, reply=f"hm\n</think>\n\nI look.\n\n{XML}"), **changes}
        messages = [HI, said, RESULT]
        plain = ChatFormat(dialogue.chat.template, toy.chatml_tokenizer())
        assert prepare(dialogue.chat, messages).text == prepare(plain, messages).text


def test_the_same_call_twice_is_told_apart_by_what_comes_before() -> None:
    for keep_ids in (True, False):
        dialogue = Dialogue(qwen(), "full")
        sent: list[Message] = []
        for thought in ("one", "two", "three"):
            said = dialogue.turn(
                *sent, HI if not sent else RESULT, reply=f"{thought}\n</think>\n\n{XML}"
            )
            del said["reasoning_content"]
            sent = [said if keep_ids else rewritten(said)]
        assert dialogue.unbroken == [True, True, True]


def test_a_continued_message_is_remembered_with_its_beginning() -> None:
    dialogue = Dialogue(toy.THINKING)
    dialogue.messages = [HI, {"role": "assistant", "content": "We"}]
    assert dialogue.turn(reply="ll  ")["content"] == "ll  "
    whole = {"role": "assistant", "content": "Well"}
    assert "Well  <|im_end|>" in prepare(dialogue.chat, [HI, whole, HI], tools=[TOOL]).text
    assert prepare(dialogue.chat, [HI, whole], tools=[TOOL]).text.endswith(
        "Well"
    )  # it is being continued and stays as it is


def test_replay_goes_on_under_a_message_that_is_continued() -> None:
    dialogue = Dialogue(qwen())
    said = dialogue.turn(HI, reply=f"hm\n</think>\n\n{XML}")
    turn = prepare(
        dialogue.chat, [HI, said, RESULT, {"role": "assistant", "content": "It"}], tools=[TOOL]
    )
    assert turn.prompt.tokens[: len(dialogue.tokens)].tolist() == dialogue.tokens
    assert turn.text.endswith("</think>\n\nIt")


def test_tokens_that_say_something_else_are_not_kept() -> None:
    dialogue = Dialogue(toy.CHATML)
    said = dialogue.turn(HI, reply="Well", tokens=list(b"Well, STOP"))  # as after a stop string
    turn = prepare(dialogue.chat, [HI, said, HI], tools=[TOOL])
    assert turn.text.startswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell<|im_end|>\n"
    )
    assert turn.prompt.tokens.tolist() == dialogue.chat.prompt_from_text(turn.text).tokens.tolist()


def test_a_reply_that_is_cut_within_a_character_is_kept_without_the_part() -> None:
    dialogue = Dialogue(toy.CHATML)
    text = "A <think>, caf"
    said = dialogue.turn(HI, reply=text, tokens=[*text.encode(), 0xC3])
    ids = prepare(dialogue.chat, [HI, said, HI], tools=[TOOL]).prompt.tokens.tolist()
    assert ids[: len(dialogue.tokens)] == [
        *dialogue.tokens[:-1],
        toy.chatml_tokenizer().special_tokens()["<|im_end|>"],
    ]


@pytest.mark.parametrize(
    "template", [toy.MISTRAL, toy.PLAIN, toy.LLAMA3.replace("<|start_header_id|>", "")]
)
def test_nothing_is_replaced_where_no_token_begins_the_message(template: str) -> None:
    dialogue = Dialogue(template)
    said = dialogue.turn({"role": "user", "content": "a\nb"}, reply="  Well")
    messages = [{"role": "user", "content": "a\nc"}, said, HI]
    plain = ChatFormat(dialogue.chat.template, toy.chatml_tokenizer())
    assert prepare(dialogue.chat, messages).text == prepare(plain, messages).text


def test_a_user_who_writes_a_mark_gets_nothing_replaced() -> None:
    dialogue = Dialogue(toy.CHATML)
    said = dialogue.turn(HI, reply="Well", tokens=[87, 101, 108, 108])
    messages = [HI, said, {"role": "user", "content": "pyctl-said-before-4c9e-1;"}]
    assert prepare(dialogue.chat, messages, tools=[TOOL]).rendered.parts == ()
    assert prepare(dialogue.chat, [HI, said, HI], tools=[TOOL]).rendered.parts != ()


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    replay = Replay("equal", max_bytes=5000)
    said = [{"role": "assistant", "content": f"reply {i}"} for i in range(20)]
    for message in said:
        replay.remember(message, AT, "<|im_start|>assistant\n", message["content"], None)
        assert replay.n_bytes <= 5000
        assert replay.find(said[0], AT) is not None  # in use all the time
    kept = [replay.find(message, AT) is not None for message in said]
    assert kept[1:] == sorted(kept[1:])
    assert 2 < sum(kept) < 19
    before = replay.n_bytes
    replay.remember(said[-1], AT, "<|im_start|>assistant\n", "reply 19", None)
    assert replay.n_bytes == before


PARTS = [
    "<think>",
    "</think>",
    XML,
    JSON,
    XML[:60],
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "Well",
    "<|im_end|>",
]


@settings(max_examples=examples(120))
@given(
    replies=st.lists(
        st.lists(st.sampled_from(PARTS), max_size=6).map("".join), min_size=1, max_size=4
    ),
    thinks=st.booleans(),
    asks=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_whatever_was_said_is_unbroken_when_it_is_returned(
    replies: list[str], thinks: bool, asks: list[bool]
) -> None:
    dialogue = Dialogue(qwen())
    sent: list[Message] = [HI]
    for reply, ask in zip(replies, asks, strict=False):
        said = dialogue.turn(*sent, reply=reply, enable_thinking=thinks)
        sent = [said, HI if ask else RESULT]
    dialogue.turn(*sent, reply="")
    assert all(dialogue.unbroken)


def test_a_reply_belongs_to_its_conversation_alone() -> None:
    secret = {"role": "user", "content": "My PIN is 1234. Is it a good one?"}
    for mode in ("equal", "full"):
        dialogue = Dialogue(qwen(), mode)
        said = dialogue.turn(secret, reply="The PIN 1234 is poor.\n</think>\n\nYes.")
        for told in (said, {"role": "assistant", "content": said["content"]}):
            for before in ([HI], [HI, secret], [{"role": "system", "content": "x"}, secret]):
                messages = [*before, told, HI]
                plain = ChatFormat(dialogue.chat.template, toy.chatml_tokenizer())
                mine = prepare(dialogue.chat, messages, tools=[TOOL])
                assert mine.rendered.parts == ()
                assert mine.text == prepare(plain, messages, tools=[TOOL]).text
        assert prepare(dialogue.chat, [secret, said, HI], tools=[TOOL]).rendered.parts
        assert not prepare(dialogue.chat, [secret, said, HI]).rendered.parts, (
            "with these tools only"
        )


def test_what_clients_write_anew_each_turn_is_still_the_same_conversation() -> None:
    dialogue = Dialogue(qwen())
    said = dialogue.turn({"role": "user", "content": "a\nb"}, reply=f"hm\n</think>\n\n{XML}")
    result = {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "rain"}]}
    last = dialogue.turn(said, result, reply="fine\n</think>\n\nIt rains.")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    again = [
        {"role": "user", "content": parts},
        rewritten(said, content=None),
        {**RESULT, "tool_call_id": "y"},
    ]
    del again[1]["reasoning_content"]
    assert "fine" in prepare(dialogue.chat, [*again, last, HI], tools=[TOOL]).text


def test_tools_with_reordered_keys_match_the_earlier_reply() -> None:
    """Tools that differ only in the order of their keys are rendered in the order of the first
    request, so that the prompt keeps its prefix. A difference in values or in the order of an array
    stays.
    """
    sent = function("look_up", required=["a", "b"], a={"type": "string"}, b={"default": 1})
    dialogue = Dialogue(qwen())
    dialogue.turn(HI, reply="hm\n</think>\n\nHello.")
    dialogue.replay.with_remembered_key_order([sent])[1]()
    before, after = (
        prepare(dialogue.chat, [HI], tools=tools) for tools in ([TOOL], [turned(TOOL)])
    )
    assert after.text == before.text
    assert after.constraint == before.constraint
    for old, new in (
        ('["a", "b"]', '["b", "a"]'),
        ('": 1', '": 1.0'),
        ('": 1', '": true'),
        ("up", "down"),
    ):
        other = [turned(json.loads(json.dumps(sent).replace(old, new)))]
        assert dialogue.replay.with_remembered_key_order(other)[0] is other
    assert json.dumps(dialogue.replay.with_remembered_key_order([turned(sent)])[0]) == json.dumps(
        [sent]
    )


@pytest.mark.parametrize(
    "damage", [(b"look_up", b"look_at"), (b"[{", b"[["), (b'"of":2', b'"of":1')]
)
def test_tools_of_a_damaged_or_older_file_are_as_they_are_sent(
    tmp_path: Path, damage: tuple[bytes, bytes]
) -> None:
    path = tmp_path / "replies"
    sent = [turned(TOOL)]
    Replay(path=path).with_remembered_key_order([TOOL])[1]()
    assert Replay(path=path).with_remembered_key_order(sent)[0] is not sent
    path.write_bytes(path.read_bytes().replace(*damage))
    damaged = Replay(path=path)
    found, remember = damaged.with_remembered_key_order(sent)
    assert found is sent
    remember()
    assert json.dumps(damaged.with_remembered_key_order([TOOL])[0]) == json.dumps(sent)


def test_replies_that_mean_the_same_are_bounded() -> None:
    replay = Replay("full")
    for number in range(100):
        message = {"role": "assistant", "content": "Yes.", "reasoning_content": str(number)}
        replay.remember(message, AT, "head", str(number), None)
    found = replay.find({"role": "assistant", "content": "Yes."}, AT)
    assert found.text == "99"
    assert replay.n_bytes < 10_000
