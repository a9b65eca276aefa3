from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.cached_tokenizer import CachedTokenizer
from pyctl.chat.tokenizer import Tokenizer
from tests.effort import examples
from tests.unit.chat.toy import ByteTokenizer, chatml_tokenizer

MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "</s>",
    "[PAD151646]",
    "<think>",
    "<|im_",
    "start|>",
    "<|",
    "|>",
)
WORDS = ("|>", " ", "\n", "\n\n", "\t", "  \r\n", "user\n", "don't", "12345", " hello")
TEXTS = st.lists(st.sampled_from((*MARKS, *WORDS)) | st.text(max_size=8), max_size=12).map("".join)


@pytest.fixture(scope="module")
def qwen(qwen_tokenizer: Tokenizer) -> CachedTokenizer:
    return CachedTokenizer(qwen_tokenizer, qwen_tokenizer.special_tokens(), max_bytes=4096)


@settings(max_examples=examples(400))
@given(text=TEXTS)
def test_pieces_in_a_row_are_the_whole_on_the_real_vocabulary(
    qwen: CachedTokenizer, qwen_tokenizer: Tokenizer, text: str
) -> None:
    expected = qwen_tokenizer.tokenize(text, parse_special=True)
    assert qwen.tokenize(text).tolist() == expected
    assert qwen.tokenize(text).tolist() == expected  # now from the memo


def test_history_is_tokenized_once() -> None:
    tokenizer = chatml_tokenizer()
    memo = CachedTokenizer(tokenizer, tokenizer.special_tokens())
    history = "".join(f"<|im_start|>user\nmessage {i}<|im_end|>\n" for i in range(50))
    memo.tokenize(history)
    tokenizer.n_chars = 0
    tokens = memo.tokenize(history + "<|im_start|>user\nand this?")
    assert tokenizer.n_chars == len("user\nand this?")
    assert tokens.tolist() == tokenizer.tokenize(history + "<|im_start|>user\nand this?")
    assert tokens.dtype == np.int32


def test_tokens_that_overlap_or_swallow_blanks_stay_inside_the_pieces() -> None:
    """Cached pieces give the tokens of the whole text, even if special tokens overlap, one contains
    the start of another, or one swallows the blanks after it.
    """

    class Greedy(ByteTokenizer):
        """llama.cpp's order: one special token after the other, longest first; <r> swallows blanks
        after it.
        """

        def tokenize(
            self, text: str, *, add_special: bool = False, parse_special: bool = True
        ) -> list[int]:
            """Split by each special token in turn, longest first, and encode the rest as bytes."""
            parts: list[str | int] = [text]
            for special, token in sorted(
                self.special_tokens().items(), key=lambda item: -len(item[0])
            ):
                found: list[str | int] = []
                for part in parts:
                    if isinstance(part, int):
                        found.append(part)
                        continue
                    for index, rest in enumerate(part.split(special)):
                        found += [token] if index else []
                        found.append(rest.lstrip() if index and special == "<r>" else rest)
                parts = found
            return [
                t for part in parts for t in ([part] if isinstance(part, int) else part.encode())
            ]

    tokenizer = Greedy(["<s>", "<s><s>", "ab<", "<x>", "<r>", "\n"])
    memo = CachedTokenizer(tokenizer, tokenizer.special_tokens())
    rng = np.random.default_rng(5)
    pieces = ["<s>", "ab<", "x>", "<x>", "<r>", " ", "\n", "a", "b", "s>"]
    for _ in range(300):
        text = "".join(rng.choice(pieces, rng.integers(0, 9)))
        assert memo.tokenize(text).tolist() == tokenizer.tokenize(text), text


def test_only_the_usual_special_tokens_are_judged() -> None:
    texts = ["<|im_start|>", "<|im_end|>", *(f"<unused{i}>" for i in range(500))]
    tokenizer = ByteTokenizer(texts)
    memo = CachedTokenizer(tokenizer, tokenizer.special_tokens(), usual=texts[:2])
    assert tokenizer.n_chars < 500, "a tokenizer takes long for each of thousands"
    text = "<|im_start|>a<unused7><unused70> b<|im_end|><unused8>"
    assert memo.tokenize(text).tolist() == tokenizer.tokenize(text)
    tokenizer.n_chars = 0
    assert memo.tokenize("<|im_start|>a<unused7><unused70> b<|im_end|>").size
    assert not tokenizer.n_chars, "texts between the usual ones are remembered"


@given(st.lists(st.text("<ab>", min_size=1, max_size=3), unique=True, min_size=2, max_size=8))
def test_a_usual_token_that_overlaps_with_another_is_no_separator(texts: list[str]) -> None:
    tokenizer = ByteTokenizer(texts)
    specials = tokenizer.special_tokens()
    some = CachedTokenizer(tokenizer, specials, usual=texts[:1])
    every = CachedTokenizer(tokenizer, specials)
    for text in ("".join(texts), "".join(reversed(texts)), f"a{texts[0]}<b{texts[1]}>"):
        expected = tokenizer.tokenize(text)
        assert every.tokenize(text).tolist() == expected
        assert some.tokenize(text).tolist() == expected


def test_memory_stays_within_its_bound_and_the_longest_unused_goes_first() -> None:
    tokenizer = chatml_tokenizer()
    memo = CachedTokenizer(tokenizer, tokenizer.special_tokens(), max_bytes=5000)
    memo.tokenize("keep me")
    for i in range(40):
        memo.tokenize(f"text {i}" * 5)
        memo.tokenize("keep me")
        assert 0 < memo.n_bytes <= 5000
    tokenizer.n_chars = 0
    memo.tokenize("keep me")
    assert tokenizer.n_chars == 0
    assert memo.tokenize("x" * 10_000).size == 10_000  # larger than the memo
    assert memo.n_bytes <= 5000


def test_nothing_and_no_special_tokens() -> None:
    tokenizer = ByteTokenizer([])
    memo = CachedTokenizer(tokenizer, {})
    assert memo.tokenize("").tolist() == []
    assert memo.tokenize("ab<|im_start|>").tolist() == list(b"ab<|im_start|>")


def test_many_threads() -> None:
    """Four threads that share a cache too small for their texts get the right tokens, and the cache
    stays within its bytes.
    """
    tokenizer = chatml_tokenizer()
    memo = CachedTokenizer(tokenizer, tokenizer.special_tokens(), max_bytes=3000)
    texts = [f"<|im_start|>{i}<|im_end|>" * 3 for i in range(30)]
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for text in rng.choice(texts, 200):
            if memo.tokenize(text).tolist() != tokenizer.tokenize(text):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memo.n_bytes <= 3000
