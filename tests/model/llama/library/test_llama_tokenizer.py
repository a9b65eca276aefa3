"""The tokenizer of a model: any text comes back, and special tokens are single."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyctl.llama.library.llama_tokenizer import read_piece
from pyctl.llama.loader import Loaded
from pyctl.llama.read_vocabulary import read_vocabulary


@pytest.fixture
def hybrid(open_model: Callable[..., Loaded]) -> Loaded:
    return open_model("tiny-hybrid")


def test_text_survives_the_vocabulary(hybrid: Loaded) -> None:
    tokenizer = hybrid.tokenizer
    for text in ("hello", "Äpfel & 🍏", "<|im_start|>user\nhi<|im_end|>\n", "\x00\n\t", ""):
        assert tokenizer.detokenize(tokenizer.tokenize(text)).decode() == text
    special = tokenizer.special_tokens()
    assert tokenizer.tokenize("<|im_end|>") == [special["<|im_end|>"]]
    assert (
        special["<|im_end|>"]
        in set(filter(tokenizer.is_end, range(tokenizer.n_vocab)))
        == tokenizer.end_tokens()
    )
    assert tokenizer.piece(special["<|im_end|>"], special=False) == b""
    assert len(tokenizer.tokenize("<|im_end|>", parse_special=False)) > 1
    assert tokenizer.piece(10**6) == b""


def test_pieces_of_all_tokens_are_those_of_each(hybrid: Loaded) -> None:
    tokenizer = hybrid.tokenizer
    pieces = list(tokenizer.pieces())
    assert len(pieces) == tokenizer.n_vocab
    assert pieces == [tokenizer.piece(token) for token in range(tokenizer.n_vocab)]


def test_control_tokens_have_no_text_unless_it_is_asked_for(hybrid: Loaded) -> None:
    tokenizer = hybrid.tokenizer
    controls = tokenizer.control_tokens()
    assert controls
    assert controls <= set(tokenizer.special_tokens().values())
    for token in controls:
        assert tokenizer.piece(token, special=False) == b""
        assert tokenizer.piece(token) != b""


def test_nothing_of_the_size_of_the_vocabulary_stays(hybrid: Loaded) -> None:
    tokenizer = read_vocabulary(hybrid.resolved.model).result()
    tokenizer.special_tokens()
    tokenizer.control_tokens()
    tokenizer.end_tokens()
    sizes = [len(value) for value in vars(tokenizer).values() if hasattr(value, "__len__")]
    assert max(sizes) < tokenizer.n_vocab


def test_tokens_that_end_a_reply_are_all_found(hybrid: Loaded) -> None:
    tokenizer = hybrid.tokenizer
    assert tokenizer.eos in tokenizer.end_tokens()
    assert all(tokenizer.is_end(token) for token in tokenizer.end_tokens())


@pytest.mark.parametrize("token", [-1, 10**6])
def test_an_id_outside_of_the_vocabulary_has_no_text(hybrid: Loaded, token: int) -> None:
    assert read_piece(hybrid.tokenizer.vocab, token) == b""


def test_tokens_to_fill_in_the_middle_are_in_the_vocabulary(hybrid: Loaded) -> None:
    tokens = hybrid.tokenizer.fim_tokens()
    assert set(tokens) <= {"pre", "suf", "mid", "rep", "sep"}
    assert all(0 <= token < hybrid.tokenizer.n_vocab for token in tokens.values())
