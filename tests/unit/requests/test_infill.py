"""The prompt of /infill."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.requests.reply_settings import ReplySettings
from tests.case import Case
from tests.unit.chat.toy import CHATML_SPECIALS, ByteTokenizer
from tests.unit.server.fake import N_CTX, Bench, play

GAPS = {f"<|fim_{name}|>" for name in ("pre", "suf", "mid")}
REPO = {"<|fim_rep|>", "<|fim_sep|>"}


class Tokenizer(ByteTokenizer):
    def fim_tokens(self) -> dict[str, int]:
        return {text[6:9]: token for text, token in self.special_tokens().items() if "fim" in text}


def bench_with(tokens: set[str], **settings: Any) -> Bench:
    """Return a server whose vocabulary has ``tokens`` besides those of a chat."""
    tokenizer = Tokenizer([*CHATML_SPECIALS, *sorted(tokens)], eos="<|im_end|>")
    return Bench(play("x"), tokenizer=tokenizer, replies=ReplySettings(**settings))


def prompt_of(bench: Bench) -> str:
    """Return the text of the prompt of the last request."""
    tokens = bench.worker.requests[-1].prompt.tokens.tolist()
    return bytes(bench.tokenizer.detokenize(tokens)).decode()


def test_prefix_and_suffix() -> None:
    fields = {"input_prefix": "def f(", "input_suffix": "\n<|im_end|>", "prompt": "a"}
    bench = bench_with(GAPS)
    assert bench.client.post_json("/infill", fields)["content"] == "x"
    assert prompt_of(bench) == "<|fim_pre|>def f(<|fim_suf|>\n<|im_end|><|fim_mid|>a"


def test_the_suffix_may_come_first() -> None:
    fields = {"input_prefix": "def f(", "input_suffix": "\n<|im_end|>", "prompt": "a"}
    bench = bench_with(GAPS, spm_infill=True)
    bench.client.post_json("/infill", fields)
    assert prompt_of(bench) == "<|fim_suf|>\n<|im_end|><|fim_pre|>def f(<|fim_mid|>a"


def test_a_completion_before_a_suffix() -> None:
    bench = bench_with(GAPS)
    body = bench.client.post_json("/v1/completions", {"prompt": "def f(", "suffix": "):"})
    assert body["choices"][0]["text"] == "x"
    assert prompt_of(bench) == "<|fim_pre|>def f(<|fim_suf|>):<|fim_mid|>"


@pytest.mark.parametrize(
    "case",
    [
        Case("/v1/completions", {"prompt": ["a", "b"], "suffix": "):"}, 400, "suffix"),
        Case("/v1/completions", {"prompt": [97], "suffix": "):"}, 400, "suffix"),
        Case("/v1/completions", {"prompt": "def f(", "suffix": "):", "echo": True}, 501, "echo"),
    ],
    ids=str,
)
def test_only_one_text_has_a_suffix(case: Case) -> None:
    case.check(bench_with(GAPS).client)


def test_extra_context() -> None:
    fields = {
        "input_prefix": "p",
        "input_suffix": "s",
        "input_extra": [{"text": "A", "filename": "a.py"}, {"text": "B"}],
    }
    plain = bench_with(GAPS)
    plain.client.post_json("/infill", fields)
    assert prompt_of(plain) == (
        "\n\n--- snippet ---\n\nA\n\n--- snippet ---\n\nB<|fim_pre|>p<|fim_suf|>s<|fim_mid|>"
    )
    repository = bench_with(GAPS | REPO)
    repository.client.post_json("/infill", fields)
    assert prompt_of(repository) == (
        "<|fim_rep|>myproject\n<|fim_sep|>a.py\nA<|fim_sep|>tmp\nB<|fim_sep|>filename\n"
        "<|fim_pre|>p<|fim_suf|>s<|fim_mid|>"
    )


def test_what_does_not_fit_is_cut_away_from_the_gap() -> None:
    fields = {
        "input_prefix": "p" * 900 + "P",
        "input_suffix": "S" + "s" * 900,
        "input_extra": [{"text": "e" * N_CTX}],
    }
    bench = bench_with(GAPS, n_batch=400, n_predict=100)
    bench.client.post_json("/infill", fields)
    extra, _, rest = prompt_of(bench).partition("<|fim_pre|>")
    prefix, _, suffix = rest.removesuffix("<|fim_mid|>").partition("<|fim_suf|>")
    assert extra == "e" * (N_CTX - 400 - 200)
    assert prefix == "p" * 299 + "P"
    assert suffix == "S" + "s" * 97


@pytest.mark.parametrize(
    "case",
    [
        Case("/infill", {"input_suffix": "s"}, 400, "input_prefix"),
        Case("/infill", {"input_prefix": "p"}, 400, "input_suffix"),
        Case("/infill", {"input_prefix": "p", "input_suffix": 3}, 400, "input_suffix"),
        Case("/infill", {"input_prefix": "p", "input_suffix": "s", "prompt": ["x"]}, 400, "prompt"),
        Case(
            "/infill",
            {"input_prefix": "p", "input_suffix": "s", "input_extra": {}},
            400,
            "input_extra",
        ),
        Case(
            "/infill",
            {"input_prefix": "p", "input_suffix": "s", "input_extra": [{"filename": "x"}]},
            400,
            "text",
        ),
        Case(
            "/infill",
            {
                "input_prefix": "p",
                "input_suffix": "s",
                "input_extra": [{"text": "x", "filename": 3}],
            },
            400,
            "filename",
        ),
    ],
    ids=str,
)
def test_bad_fields(case: Case) -> None:
    for specials in (GAPS, GAPS | REPO):
        case.check(bench_with(specials).client)


def test_a_model_without_the_tokens() -> None:
    case = Case("/infill", {"input_prefix": "a", "input_suffix": "b"}, 501, "")
    assert case.check(Bench(play("x")).client) == (
        "Infill is not supported by this model: "
        "prefix token is missing. suffix token is missing. middle token is missing. "
    )
