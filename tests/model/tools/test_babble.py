from __future__ import annotations

from typing import TYPE_CHECKING

from tools.generator import byte_vocab

if TYPE_CHECKING:
    from tests.model.tools.conftest import Load, Loaded

QUESTIONS = ["hello", "What is the weather?", "Write a poem about the sea.", "1+1="]


def prompt(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_greedy_replies_are_not_stuck(tiny: Loaded) -> None:
    for question in QUESTIONS:
        tokens = tiny.reply(prompt(question), limit=32)
        assert len(set(tokens)) >= 8


def test_sampled_replies_are_printable_text_with_words(tiny: Loaded) -> None:
    end = byte_vocab().ids["<|im_end|>"]
    for seed, question in enumerate(QUESTIONS):
        tokens = [token for token in tiny.reply(prompt(question), 100, temperature=0.8, seed=seed) if token != end]
        text = tiny.detokenize(tokens).decode()
        assert text.isascii()
        assert sum(char.isalpha() or char in " .,!?" for char in text) >= 0.9 * len(text)


def test_replies_differ_by_question(tiny: Loaded) -> None:
    replies = {tuple(tiny.reply(prompt(question), limit=16)) for question in QUESTIONS}
    assert len(replies) == len(QUESTIONS)


def test_most_replies_end_but_not_at_once(loaded: Load) -> None:
    model = loaded("tiny-hybrid")
    lengths = sorted(len(model.reply(prompt("hello"), 400, temperature=0.8, seed=seed)) for seed in range(12))
    assert lengths[0] > 1
    assert lengths[6] < 400
    assert any(40 <= length <= 200 for length in lengths)
