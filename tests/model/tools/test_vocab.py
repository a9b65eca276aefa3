from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from tools.generator import TINY_HYBRID, byte_vocab, finish, read_vocab, write_model
from tools.generator.vocab import SPECIAL_TOKENS

if TYPE_CHECKING:
    from tests.model.tools.conftest import Load

TEXTS = [
    *("plain", "Grüße, 世界! \u0000 ﷽", "👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈"),
    *("def f(x):\r\n\treturn  x * 2   \n\n\n", "it's 12345.67"),
]


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text())
def test_any_text_comes_back(loaded: Load, text: str) -> None:
    model = loaded("tiny-hybrid")
    assert model.detokenize(model.tokenize(text)) == text.encode()


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_special_token_is_one_id(loaded: Load, token: str) -> None:
    model = loaded("tiny-hybrid")
    assert model.tokenize(f"a{token}b")[1:-1] == [byte_vocab().ids[token]]


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 282 tokens, the shape has room for 281"):
        byte_vocab().fitted(281)


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "spm.gguf", "llama")
    writer.add_tokenizer_model("llama")
    finish(writer)
    with pytest.raises(ValueError, match="type 'llama'"):
        read_vocab(tmp_path / "spm.gguf")


def test_a_tiny_model_with_the_real_vocabulary(
    loaded: Load, models: Path, real_vocab_file: Path
) -> None:
    vocab = read_vocab(real_vocab_file)
    path = models / "real-vocab.gguf"
    write_model(path, replace(TINY_HYBRID, vocab_size=len(vocab)), vocab=vocab)
    model = loaded(path)
    assert model.vocab_size == len(vocab)
    assert len(model.tokenize("<|im_start|>user\nThe quick brown fox<|im_end|>")) == 8
    assert len(model.tokenize("<tool_call>")) == 1
    for text in TEXTS:
        assert model.detokenize(model.tokenize(text)) == text.encode()
    reply = model.detokenize(model.reply("<|im_start|>assistant\n", limit=16))
    assert reply.isascii()
    assert reply.decode().isprintable()
