"""The built-in model recalls facts after every kind of restore; a wrong restore is a wrong
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.conftest import Server
from tools.needles import UNKNOWN, Messages, Question, told

FLAGS = ["-c", "81920", "-t", "1", "-ub", "512"]
POOL = ["--kv-pool", "40960"]
"""The least that there can be for that context: room for one of two layers, through which both
pass.
"""

LONG = 32_768
"""The longest conversation; it is evaluated cold once only."""


REPLY = {"max_tokens": 48}
"""Room for any answer."""


def _manual(rules: int) -> str:
    return " ".join(f"Rule {n}: valve {n * 7 % 97} opens at noon." for n in range(1, rules))


def after(messages: Messages, reply: str, question: Question) -> Messages:
    return [
        *messages,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": question.text},
    ]


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("", *FLAGS)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("tokens", "more"), [(1024, []), (4096, []), (LONG, []), (1024, POOL)])
def test_every_way_of_restoring_gives_the_cold_reply(
    start: Callable[..., Server], tmp_path: Path, tokens: int, more: list[str]
) -> None:
    """A restore from the live sequence, a branch, RAM and disk gives the reply of a cold run, at
    each length and with a pool; a lost or mixed row would change the recalled fact.
    """
    # A background request would leave a live sequence where the test wants a restore from RAM or
    # disk.
    flags = [*FLAGS, *more, "--no-warm-next", "--kv-cache-dir", str(tmp_path)]
    flags += ["-ub", "2048" if tokens == LONG else "512"]
    server = start("", *flags)
    conversation = told(2, tokens, 4)
    other = told(3, 1024, 4)
    prompt, (first, second, third, _) = conversation.ask(0), conversation.questions

    cold = server.chat(prompt, **REPLY)
    assert cold.text == first.answer
    assert cold.source == "none"
    if tokens < LONG:
        assert server.chat(prompt, **REPLY, cache_prompt=False).text == cold.text

    continued = server.chat(after(prompt, cold.text, second), **REPLY)
    assert continued.text == second.answer
    assert continued.source == "live"

    branch = server.chat(conversation.ask(2), **REPLY)
    assert branch.text == third.answer
    assert branch.timings["cache_n"] > 0.8 * tokens

    server.chat(other.ask(0), **REPLY)
    restored = server.chat(prompt, **REPLY)
    assert restored.text == cold.text
    assert restored.source == "ram"
    assert restored.timings["cache_n"] > 0.8 * tokens

    assert server.stop() == 0
    restarted = start("", *flags)
    restored = restarted.chat(prompt, **REPLY)
    assert restored.text == cold.text
    assert restored.source == "disk"
    assert restored.timings["cache_n"] > 0.8 * tokens
    again = restarted.chat(after(prompt, cold.text, second), **REPLY)
    assert again.text == continued.text
    assert restarted.chat(conversation.ask(2), **REPLY).text == branch.text
    assert restarted.stop() == 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_edited_fact_changes_the_answer(server: Server, number: int) -> None:
    conversation = told(4, 4096, 4)
    prompt = conversation.ask(number)
    answer = conversation.questions[number].answer
    edited, other_answer = conversation.edited(number)
    assert server.chat(prompt, **REPLY).text == answer
    reply = server.chat(edited, **REPLY)
    assert reply.text == other_answer != answer
    assert reply.timings["prompt_n"] > 32, "what comes after the edit is evaluated again"
    assert server.chat(edited, **REPLY, cache_prompt=False).text == reply.text
    assert server.chat(prompt, **REPLY).text == answer


def test_conversations_under_one_head_do_not_leak(server: Server) -> None:
    """Three users state the same facts with other values, in turn; each gets their own values
    back.
    """
    head = {"role": "system", "content": "You are the keeper of a long manual. " + _manual(60)}
    values = (
        ("4071", "Marvoth", "brown trunk"),
        ("9563", "Zelkin", "iron sack"),
        ("2208", "Trozam", "quiet jar"),
    )
    owners = (
        "The code of the north door is {}.",
        "My cat is called {}.",
        "The old map is in the {}.",
    )
    questions = (
        "What is the code of the north door?",
        "What is my cat called?",
        "Where is the old map?",
    )
    talks: list[Messages] = [[head] for _ in values]
    for owner, column in zip(owners, zip(*values, strict=True), strict=True):
        for talk, value in zip(talks, column, strict=True):
            talk.append({"role": "user", "content": owner.format(value)})
            talk.append({"role": "assistant", "content": server.chat(talk, **REPLY).text})
    for index, question in enumerate(questions):
        for number, talk in enumerate(talks):
            talk.append({"role": "user", "content": question})
            reply = server.chat(talk, **REPLY)
            assert reply.timings["cache_n"] > 0
            recalled = [own[index] in reply.text for own in values]
            assert recalled == [i == number for i in range(3)], reply.text
            assert server.chat(talk, **REPLY, cache_prompt=False).text == reply.text
            talk.append({"role": "assistant", "content": reply.text})


def test_what_is_told_in_passing_is_remembered(server: Server) -> None:
    """The built-in model recalls facts from free conversation, the newest value where one was
    corrected.
    """
    turns = (
        ("my name is Ada and the code of the door is 4711", ("Ada", "4711")),
        ("what's my name?", ("Ada",)),
        ("and the code?", ("4711",)),
        ("Thanks! It is raining here.", ()),
        ("by the way, my sister is called Nora", ("Nora",)),
        ("can you tell me how to open the door?", ("4711",)),
        ("again, please", ("4711",)),
        ("who am I?", ("Ada",)),
        ("what is my sister's name?", ("Nora",)),
        ("no, the code of the door is 9024", ("9024",)),
        ("which code opens the door?", ("9024",)),
    )
    messages: Messages = []
    for text, wanted in turns:
        messages.append({"role": "user", "content": text})
        reply = server.chat(messages, **REPLY).text
        assert all(value in reply for value in wanted), (text, reply)
        messages.append({"role": "assistant", "content": reply})


@pytest.mark.parametrize(
    "question",
    [
        "what is my name?",
        "What is the capital of Spain?",
        "where did I put the red lamp?",
        "who owns the boat?",
    ],
)
def test_nothing_is_known_at_first(server: Server, question: str) -> None:
    assert server.chat([{"role": "user", "content": question}], **REPLY).text == UNKNOWN


def test_its_head_drafts_unless_told_otherwise(start: Callable[..., Server]) -> None:
    """The model's head drafts by default. --exact drafts whether it pays on a busy machine or
    not.
    """
    prompt = [{"role": "user", "content": "What is a prefix cache?"}]
    reply = start("", *FLAGS, "--exact").chat(prompt, **REPLY)
    assert 0 < reply.timings["draft_n_accepted"] <= reply.timings["draft_n"]
    plain = start("", *FLAGS, "--exact", "--spec-type", "none").chat(prompt, **REPLY)
    assert "draft_n" not in plain.timings
    assert plain.text == reply.text


def test_a_told_conversation_holds_each_value_once() -> None:
    conversation = told(7, 1024, 8)
    for question in conversation.questions:
        assert (
            sum(question.fact.value in message["content"] for message in conversation.messages) == 1
        )
