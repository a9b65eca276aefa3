"""The way in which a template writes conversations."""

from __future__ import annotations

from pyctl.chat.dialect import Dialect
from pyctl.chat.replay import Replay
from pyctl.chat.template import Template
from tests.unit.chat import toy


def dialect_of(template: str) -> Dialect:
    tokenizer = toy.chatml_tokenizer()
    specials = tokenizer.special_tokens()
    return Dialect(
        template=Template(template, eos_token="<|im_end|>"),
        tokenizer=tokenizer,
        specials=specials,
        controls=specials,
        kwargs={},
        replay=Replay(),
    )


def test_the_start_of_a_message_is_found_in_the_template() -> None:
    dialect = dialect_of(toy.CHATML)
    assert dialect.starts == (toy.chatml_tokenizer().special_tokens()["<|im_start|>"],)
    assert dialect.marks.replay.mode == "equal"


def test_tags_of_reasoning_that_are_tokens_reach_the_reader_of_replies() -> None:
    dialect = dialect_of(toy.THINKING)
    assert b"<think>" in dialect.control_texts.values()
    assert b"</think>" in dialect.control_texts.values()


def test_nothing_is_replayed_where_no_token_starts_a_message() -> None:
    dialect = dialect_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert dialect.marks.replay.mode == "off"
