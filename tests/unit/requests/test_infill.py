"""The prompt of /infill."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.requests.reply_settings import ReplySettings
from tests.unit.chat.toy import CHATML_SPECIALS, ByteTokenizer
from tests.unit.server.fake import N_CTX, Bench, play

GAPS = {f"<|fim_{name}|>" for name in ("pre", "suf", "mid")}
REPO = {"<|fim_rep|>", "<|fim_sep|>"}


class Tokenizer(ByteTokenizer):
    def fim_tokens(self) -> dict[str, int]:
        return {text[6:9]: token for text, token in self.special_tokens().items() if "fim" in text}


def ask(
    tokens: set[str], fields: dict[str, Any], path: str = "/infill", **settings: Any
) -> tuple[Any, str]:
    """Return the response, and the prompt's text."""
    tokenizer = Tokenizer([*CHATML_SPECIALS, *sorted(tokens)], eos="<|im_end|>")
    bench = Bench(play("x"), tokenizer=tokenizer, replies=ReplySettings(**settings))
    response = bench.post(path, fields)
    prompt = bench.worker.requests[0].prompt.tokens.tolist() if bench.worker.requests else []
    return response, tokenizer.detokenize(prompt).decode()


def test_prefix_and_suffix() -> None:
    fields = {"input_prefix": "def f(", "input_suffix": "\n<|im_end|>", "prompt": "a"}
    response, prompt = ask(GAPS, fields)
    assert prompt == "<|fim_pre|>def f(<|fim_suf|>\n<|im_end|><|fim_mid|>a"
    assert response.json()["content"] == "x"
    assert (
        ask(GAPS, fields, spm_infill=True)[1]
        == "<|fim_suf|>\n<|im_end|><|fim_pre|>def f(<|fim_mid|>a"
    )


def test_a_completion_before_a_suffix() -> None:
    fields = {"prompt": "def f(", "suffix": "):"}
    response, prompt = ask(GAPS, fields, "/v1/completions")
    assert prompt == "<|fim_pre|>def f(<|fim_suf|>):<|fim_mid|>"
    assert response.json()["choices"][0]["text"] == "x"
    for more, status in (
        ({"prompt": ["a", "b"]}, 400),
        ({"prompt": [97]}, 400),
        ({"echo": True}, 501),
    ):
        assert ask(GAPS, {**fields, **more}, "/v1/completions")[0].status_code == status


def test_extra_context() -> None:
    fields = {
        "input_prefix": "p",
        "input_suffix": "s",
        "input_extra": [{"text": "A", "filename": "a.py"}, {"text": "B"}],
    }
    assert ask(GAPS, fields)[1] == (
        "\n\n--- snippet ---\n\nA\n\n--- snippet ---\n\nB<|fim_pre|>p<|fim_suf|>s<|fim_mid|>"
    )
    assert ask(GAPS | REPO, fields)[1] == (
        "<|fim_rep|>myproject\n<|fim_sep|>a.py\nA<|fim_sep|>tmp\nB<|fim_sep|>filename\n"
        "<|fim_pre|>p<|fim_suf|>s<|fim_mid|>"
    )


def test_what_does_not_fit_is_cut_away_from_the_gap() -> None:
    fields = {
        "input_prefix": "p" * 900 + "P",
        "input_suffix": "S" + "s" * 900,
        "input_extra": [{"text": "e" * N_CTX}],
    }
    _, prompt = ask(GAPS, fields, n_batch=400, n_predict=100)
    extra, _, rest = prompt.partition("<|fim_pre|>")
    prefix, _, suffix = rest.removesuffix("<|fim_mid|>").partition("<|fim_suf|>")
    assert extra == "e" * (N_CTX - 400 - 200)
    assert prefix == "p" * 299 + "P"
    assert suffix == "S" + "s" * 97


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_suffix": "s"}, "input_prefix"),
        ({"input_prefix": "p"}, "input_suffix"),
        ({"input_prefix": "p", "input_suffix": 3}, "input_suffix"),
        ({"input_prefix": "p", "input_suffix": "s", "prompt": ["x"]}, "prompt"),
        ({"input_prefix": "p", "input_suffix": "s", "input_extra": {}}, "input_extra"),
        ({"input_prefix": "p", "input_suffix": "s", "input_extra": [{"filename": "x"}]}, "text"),
        (
            {
                "input_prefix": "p",
                "input_suffix": "s",
                "input_extra": [{"text": "x", "filename": 3}],
            },
            "filename",
        ),
    ],
)
def test_bad_fields(fields: dict[str, Any], words: str) -> None:
    for specials in (GAPS, GAPS | REPO):
        response, _ = ask(specials, fields)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]


def test_a_model_without_the_tokens() -> None:
    error = (
        Bench(play("x")).post("/infill", {"input_prefix": "a", "input_suffix": "b"}).json()["error"]
    )
    assert (error["code"], error["type"]) == (501, "not_supported_error")
    assert error["message"] == (
        "Infill is not supported by this model: "
        "prefix token is missing. suffix token is missing. middle token is missing. "
    )
