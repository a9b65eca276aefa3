"""Streamed text: characters are not split, stop strings do not leak, lines and reasoning have
limits.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.chat.reasoning import ReasoningLimit
from pyctl.engine.stream import LineLimits, ReasoningBudget, TextStream
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, cold, engine_of


def stream(chunks: list[bytes], *stop: str) -> tuple[str, str]:
    text = TextStream(stop)
    sent = []
    for chunk in chunks:
        sent.append(text.feed(chunk))
        if text.stopping_word:
            break
    sent.append(text.flush())
    return "".join(sent), text.stopping_word


@given(text=st.text(max_size=60), size=st.integers(1, 5))
def test_utf8_survives_any_chunking(text: str, size: int) -> None:
    data = text.encode()
    assert stream([data[i : i + size] for i in range(0, len(data), size)]) == (text, "")


@pytest.mark.parametrize("stop", [(), ("x",)])
@pytest.mark.parametrize("letter", ["é", "€", "🙂"])
def test_half_a_character_is_held_back_and_left_out_at_the_end(
    letter: str, stop: tuple[str, ...]
) -> None:
    for size in range(1, len(letter.encode())):
        assert stream([b"a", letter.encode()[:size]], *stop) == ("a", "")
    assert stream([b"\xc3", b"a"], *stop) == ("\ufffda", ""), "what no end explains is shown"


@given(
    text=st.text("abc ", max_size=40),
    words=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 4),
)
def test_stop_strings_across_chunks(text: str, words: list[str], size: int) -> None:
    chunks = [text[i : i + size].encode() for i in range(0, len(text), size)]
    sent, stopped = stream(chunks, *words)
    ends = [text.find(word) for word in words if word in text]
    assert bool(stopped) == bool(ends)
    assert text.startswith(sent)
    if ends:
        assert not any(word in sent for word in words)
        assert text[len(sent) :].startswith(stopped)
    else:
        assert sent == text


@pytest.mark.parametrize("stop", [(), ("",), ("xyz",)])
def test_without_a_match_everything_comes_out(stop: tuple[str, ...]) -> None:
    assert stream([b"xy", b"xyx"], *stop) == ("xyxyx", "")


# -- lines
# ----------------------------------------------------------------------------------


def fed(lines: LineLimits, pieces: Sequence[str], late_from: int = 99) -> str:
    text = ""
    for number, piece in enumerate(pieces):
        text += lines.feed(piece, number >= late_from)
        if lines.ended:
            break
    return text


@pytest.mark.parametrize(
    ("n_indent", "text", "left"),
    [
        (2, "a\n  b\n\tc", "a\n  b\n\t"),
        (2, "a\n  b\n \tc\nd", "a\n  b\n \tc\n"),
        (1, "no line", "no line"),
        (1, "a\n\n\n b\nc", "a\n\n\n b\n"),
        (0, "a\nb", "a\nb"),
    ],
)
def test_a_line_with_too_few_blanks_ends_the_reply(n_indent: int, text: str, left: str) -> None:
    for pieces in ([text], list(text)):
        lines = LineLimits(n_indent)
        assert fed(lines, pieces) == left
        assert lines.ended == (left != text)


def test_the_time_ends_the_reply_with_a_line() -> None:
    pieces = ["a\n", "b", "c", "d\n", "e\n"]
    assert fed(LineLimits(0), pieces) == "a\nbcd\ne\n"
    assert fed(LineLimits(0), pieces, late_from=1) == "a\nbcd\n"


# -- the end of reasoning, forced token by token
# ----------------------------------------------------------------------------------


OPEN = 101
CLOSE = 102
NEWLINE = 10


def limit(
    n: int, read: tuple[int, ...] = (OPEN,), forced: tuple[int, ...] = (NEWLINE, CLOSE)
) -> ReasoningLimit:
    return ReasoningLimit(n, "e", ("f", "\7\x08"), forced, read, recurs=True)


def letters(token: int) -> bytes:
    return bytes([token])


def spoken(budget: ReasoningBudget, says: list[int]) -> list[int]:
    """Return the output when the model would say ``says``."""
    out = []
    for token in says:
        forced = budget.next()
        out.append(token if forced is None else forced)
        budget.observe_token(out[-1])
    return out


@pytest.mark.parametrize("n", [0, 1, 3])
def test_the_end_is_forced_after_n_tokens(n: int) -> None:
    assert spoken(ReasoningBudget(limit(n), letters), [1] * 8) == [1] * n + [NEWLINE, CLOSE] + [
        1
    ] * (6 - n)


def test_somebody_may_end_a_block_but_only_one_that_is_open() -> None:
    budget = ReasoningBudget(limit(100), letters)
    assert spoken(budget, [1, 1]) == [1, 1]
    budget.end()
    assert spoken(budget, [1] * 4) == [NEWLINE, CLOSE, 1, 1]
    budget.end()
    assert spoken(budget, [1, OPEN, 1, 1]) == [1, OPEN, 1, 1]


def test_what_the_prompt_holds_counts() -> None:
    begun = ReasoningBudget(limit(3, read=(OPEN, 5, 5)), letters)
    assert spoken(begun, [1] * 4) == [1, NEWLINE, CLOSE, 1]
    opened = ReasoningBudget(limit(0, read=(OPEN, NEWLINE)), letters)
    assert spoken(opened, [1] * 4) == [NEWLINE, CLOSE, 1, 1]


@pytest.mark.parametrize("reply", [[1, CLOSE, 1, 1, 1, 1], [1, 7, 8, 1, 1, 1]])
def test_an_end_in_time_is_left_alone(reply: list[int]) -> None:
    assert spoken(ReasoningBudget(limit(3), letters), reply) == reply


def test_a_new_block_counts_anew() -> None:
    reply = [1, CLOSE, 1, 1, OPEN, 1, 1, 1, 1, 1]
    forced = [1, CLOSE, 1, 1, OPEN, 1, 1, 1, NEWLINE, CLOSE]
    assert spoken(ReasoningBudget(limit(3), letters), reply) == forced


def test_without_a_block_nothing_is_forced() -> None:
    assert spoken(ReasoningBudget(limit(0, read=()), letters), [1] * 5) == [1] * 5


def test_a_character_is_never_torn() -> None:
    # 0xC3 0xA4 is one character in two tokens.
    assert spoken(ReasoningBudget(limit(1), letters), [0xC3, 0xA4, 1, 1]) == [
        0xC3,
        0xA4,
        NEWLINE,
        CLOSE,
    ]


@given(
    st.integers(0, 20),
    st.lists(st.integers(1, 110), max_size=60),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_a_block_is_never_longer_than_its_limit(
    n: int, says: list[int], message: list[int]
) -> None:
    out = spoken(ReasoningBudget(limit(n, forced=(*message, CLOSE)), letters), says)
    length = 0
    inside = True
    for at, token in enumerate(out):
        if not inside:
            inside = token == OPEN
            length = 0
        elif token == CLOSE or out[max(at - 1, 0) : at + 1] == [7, 8]:
            inside = False
        else:
            length += 1
            assert length <= n + len(message)


def test_forced_tokens_are_evaluated_like_any_other() -> None:
    """The sequence afterwards holds what a prompt with the same tokens would make of it."""
    backend = FakeBackend()
    prompt = Prompt.from_ids([*range(1, 50), 5], [])
    reasoning = ReasoningLimit(4, "<", (">",), (9, 3), (5,), {5: b"<", 9: b">"})
    reply = ask(engine_of(backend, 0, 0), prompt, 12, reasoning=reasoning)
    free = cold(FakeBackend(), prompt, 12).tokens
    assert reply.tokens[:4] == free[:4]
    assert reply.tokens[4:6] == [9, 3]
    again = FakeBackend()
    longer = Prompt.from_ids([*prompt.tokens, *reply.tokens[:-1]], [])
    for at in (slice(0, 50), *(slice(i, i + 1) for i in range(50, len(longer)))):
        again.evaluate(0, longer.tokens[at], at.start)
    assert again.digest(0) == backend.digest(0)
