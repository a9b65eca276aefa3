from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

import pytest

from pyctl.engine.request import Request
from pyctl.engine.sampling import DEFAULT_SAMPLERS, RANDOM_SEED, Sampling, field_range
from pyctl.errors import RequestError
from pyctl.prompt import Prompt
from pyctl.requests.reply_options import ReplyOptions
from pyctl.requests.sampling_fields import MAX_BIASES, build_sampling, sampling_values
from pyctl.server.reply_json import settings_json
from tests.unit.chat.toy import chatml_tokenizer

NEVER = -float("inf")


def read(**fields: Any) -> Sampling:
    return read_over(Sampling(), **fields)


def read_over(defaults: Sampling, /, **fields: Any) -> Sampling:
    tokenizer = chatml_tokenizer()
    return build_sampling(sampling_values(fields), defaults, tokenizer, tokenizer.n_vocab)


def test_nothing_said_means_the_servers_defaults() -> None:
    defaults = Sampling(temperature=0.3, top_k=7, seed=5)
    assert read_over(defaults) == defaults
    assert read_over(defaults, top_k=9) == Sampling(temperature=0.3, top_k=9, seed=5)


def test_the_penalty_has_the_name_of_vllm_too() -> None:
    assert read(repetition_penalty=1.3) == read(repeat_penalty=1.3) == Sampling(repeat_penalty=1.3)
    assert read(repetition_penalty=1.3, repeat_penalty=1.1).repeat_penalty == 1.1
    assert read(repetition_penalty=1.3, repeat_penalty=None).repeat_penalty == 1.3


def test_all_names() -> None:
    """Every sampling field of llama-server sets the setting of its name."""
    numbers = {
        "temperature": 0.5,
        "dynatemp_range": 0.1,
        "dynatemp_exponent": 2.0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.2,
        "top_n_sigma": 1.5,
        "typical_p": 0.9,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.2,
        "repeat_last_n": 32,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.7,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 100,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "adaptive_target": 0.5,
        "adaptive_decay": 0.7,
        "min_keep": 2,
        "seed": 42,
    }
    sampling = read(
        **numbers, ignore_eos=True, post_sampling_probs=True, dry_sequence_breakers=["\n"]
    )
    assert {name: getattr(sampling, name) for name in numbers} == numbers
    assert sampling.ignore_eos is True
    assert sampling.post_sampling_probs is True
    assert sampling.dry_sequence_breakers == ("\n",)


@pytest.mark.parametrize(
    ("name", "given", "used"),
    [
        ("temperature", -1, 0.0),
        ("top_p", 3, 1.0),
        ("min_p", -0.5, 0.0),
        ("top_k", -5, 0),
        ("mirostat", 9, 2),
        ("dry_base", 0.5, 1.75),
        ("top_k", 3.7, 3),
    ],
)
def test_values_out_of_range_are_cut_as_llama_server_does(
    name: str, given: float, used: float
) -> None:
    assert getattr(read(**{name: given}), name) == used


@pytest.mark.parametrize(
    ("given", "used"), [(-1, RANDOM_SEED), (7, 7), (2**32 - 1, RANDOM_SEED), (2**32 + 3, 3)]
)
def test_seeds(given: int, used: int) -> None:
    assert read(seed=given).seed == used


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (["top_k", "temperature"], ("top_k", "temperature")),
        (
            ["Top-K", "temp", "nucleus", "typ", "minp"],
            ("top_k", "temperature", "top_p", "typ_p", "min_p"),
        ),
        (["infill", "top_k", "no_such", "adaptive-p"], ("infill", "top_k", "adaptive_p")),
        ("ia", ("infill", "adaptive_p")),
        (3, DEFAULT_SAMPLERS),
        ("edskypmxt", DEFAULT_SAMPLERS),
        ("k?t", ("top_k", "temperature")),
        ([], ()),
    ],
)
def test_samplers(given: Any, used: tuple[str, ...]) -> None:
    assert read(samplers=given).samplers == used


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ([[97, 1.5], [98, -2]], ((97, 1.5), (98, -2.0))),
        ([[97, False]], ((97, NEVER),)),
        ([["ab", -1]], ((97, -1.0), (98, -1.0))),
        ({"97": 1, "ab": False}, ((97, 1.0), (97, NEVER), (98, NEVER))),
        ({"-100": 1, "100000": 1}, ()),
        ({" +97": 1, "9" * 5_000: 1, "-" + "9" * 5_000: 1}, ((97, 1.0),)),
        ({"+-5": 1}, tuple((byte, 1.0) for byte in b"+-5")),
        ([[10**9, 1], [-1, 1], [97], 5, [97, True], [97, "x"], [None, 1], [True, 1]], ()),
        ([["<|im_start|>", 1]], tuple((byte, 1.0) for byte in b"<|im_start|>")),
        ([], ()),
        ("x", ()),
        (False, ()),
    ],
)
def test_logit_bias(given: Any, used: tuple[tuple[int, float], ...]) -> None:
    assert read(logit_bias=given).logit_bias == used


def test_what_a_bias_names_is_bounded_before_it_is_read() -> None:
    """Biases with too long texts or too many tokens are refused before they are tokenized, or as
    soon as there are too many, so that a small request cannot cost much work.
    """
    tokenizer: Any = chatml_tokenizer()
    tokenize = tokenizer.tokenize
    texts = []

    def noting(text: str, **flags: Any) -> Any:
        texts.append(text)
        return tokenize(text, **flags)

    tokenizer.tokenize = noting

    def refused(biases: Any, said: str) -> None:
        with pytest.raises(RequestError, match=said):
            build_sampling(
                sampling_values({"logit_bias": biases}), Sampling(), tokenizer, tokenizer.n_vocab
            )

    refused({"97": 10**400}, "too large a number")
    refused({"x" * (8 * MAX_BIASES + 1): 1}, "characters in a text")
    assert not texts
    refused([["x" * 1000, 1]] * 100, "at most 8192 tokens")
    assert len(texts) == MAX_BIASES // 1000 + 1, "no more than it takes to be too many"


@pytest.mark.parametrize(
    "fields",
    [
        {"min_keep": -1},
        {"repeat_last_n": -2},
        {"dry_allowed_length": -1},
        {"temperature": 1e400},
        {"ignore_eos": 1},
        {"adaptive_decay": -0.1},
        {"dry_sequence_breakers": "x"},
        {"samplers": [1]},
    ],
)
def test_what_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read(**fields)


NUMBERS = [item for item in fields(Sampling) if field_range(item) is not None]


@pytest.mark.parametrize("item", NUMBERS, ids=lambda item: item.name)
def test_every_number_of_the_declaration_is_read_and_shown(item: Field[Any]) -> None:
    limits = field_range(item)
    assert limits is not None
    value = item.default + 1 if item.default + 1 <= limits.high else limits.high / 2
    sampling = read(**{item.name: value})
    assert getattr(sampling, item.name) == value != item.default
    shown = settings_json(Request(Prompt.from_ids([1]), sampling), ReplyOptions(), ())
    assert shown[item.name] == pytest.approx(value, rel=1e-6)
