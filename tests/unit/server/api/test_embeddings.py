from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pyctl.requests.reply_settings import ReplySettings
from pyctl.requests.text_limit import MAX_CHARS
from pyctl.server.api import embeddings
from pyctl.server.api.embeddings import normalised
from tests.case import Case
from tests.unit.server.fake import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench(replies=ReplySettings(embeddings=True, embd_normalize=-1), pooling="mean")


A, B, C = b"abc"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("abc", [[A + B + C, 3]]),
        (["a", "bc"], [[A, 1], [B + C, 2]]),
        ([1, 2], [[3, 2]]),
        ([[1, 2], [4]], [[3, 2], [4, 1]]),
        (["a", 5, "b"], [[A + 5 + B, 3]]),
        (["a", [5, "b"]], [[A, 1], [5 + B, 2]]),
        ({"prompt_string": "a"}, [[A, 1]]),
        (
            [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "c"],
            [[A + B, 2], [C, 1]],
        ),
    ],
)
def test_all_forms_of_input(bench: Bench, value: Any, expected: list[list[float]]) -> None:
    native = bench.post("/embeddings", {"input": value}).json()
    assert native == bench.post("/embedding", {"content": value}).json()
    assert native == bench.post("/v1/embeddings", {"content": value}).json()
    assert native == [{"index": i, "embedding": [row]} for i, row in enumerate(expected)]
    body = bench.post("/v1/embeddings", {"input": value, "model": "m"}).json()
    n = sum(int(row[1]) for row in expected)
    assert body["usage"] == {"prompt_tokens": n, "total_tokens": n}
    assert body["object"] == "list"
    assert body["model"] == "m"
    assert body["data"] == [
        {"embedding": row, "index": i, "object": "embedding"} for i, row in enumerate(expected)
    ]


def test_base64_and_norms(bench: Bench) -> None:
    body = bench.post(
        "/v1/embeddings", {"input": [[3, 1]], "encoding_format": "base64", "embd_normalize": 2}
    ).json()
    (item,) = body["data"]
    assert item["encoding_format"] == "base64"
    vector = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    assert vector == pytest.approx([4 / 20**0.5, 2 / 20**0.5])


@pytest.mark.parametrize(
    "case",
    [
        Case("/embeddings", {}, 400, '"input" or "content" must be provided'),
        Case("/v1/embeddings", {}, 400, '"input" or "content" must be provided'),
        Case("/embeddings", {"input": []}, 400, '"input" must not be empty'),
        Case("/v1/embeddings", {"input": []}, 400, '"input" must not be empty'),
        Case("/embeddings", {"input": ""}, 400, "Input content cannot be empty"),
        Case("/v1/embeddings", {"input": ""}, 400, "Input content cannot be empty"),
        Case("/embeddings", {"input": ["a", ""]}, 400, "Input content cannot be empty"),
        Case("/v1/embeddings", {"input": ["a", ""]}, 400, "Input content cannot be empty"),
        Case("/embeddings", {"input": 5}, 400, "'input' must be"),
        Case("/v1/embeddings", {"input": 5}, 400, "'input' must be"),
        Case("/embeddings", {"input": [[10**9]]}, 400, "'input' must hold"),
        Case("/v1/embeddings", {"input": [[10**9]]}, 400, "'input' must hold"),
        Case("/embeddings", {"input": "a", "encoding_format": "zip"}, 400, "float or base64"),
        Case("/v1/embeddings", {"input": "a", "encoding_format": "zip"}, 400, "float or base64"),
        Case("/embeddings", {"input": "a", "embd_normalize": -2}, 400, "embd_normalize"),
        Case("/v1/embeddings", {"input": "a", "embd_normalize": -2}, 400, "embd_normalize"),
        Case("/embeddings", {"input": "x" * 65}, 400, "too many tokens"),
        Case("/v1/embeddings", {"input": "x" * 65}, 400, "too many tokens"),
        Case("/embeddings", {"input": ["x"] * 2049}, 400, "at most 2048 texts"),
        Case("/v1/embeddings", {"input": ["x"] * 2049}, 400, "at most 2048 texts"),
        Case("/embeddings", {"input": ["x", "x" * (MAX_CHARS + 1)]}, 400, "too long"),
        Case("/v1/embeddings", {"input": ["x", "x" * (MAX_CHARS + 1)]}, 400, "too long"),
    ],
    ids=str,
)
def test_bad_input(bench: Bench, case: Case) -> None:
    case.check(bench.client)


def test_vectors_of_one_answer_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_MAX_VECTOR_BYTES", 100)
    assert bench.post("/v1/embeddings", {"input": ["a"] * 12}).status_code == 200
    Case("/v1/embeddings", {"input": ["a"] * 13}, 400, "more than 100 bytes").check(bench.client)


def test_dimensions_cut_a_vector_before_it_is_normalised(bench: Bench) -> None:
    """The norm is that of the numbers that are left."""

    def vectors(**fields: Any) -> list[Any]:
        response = bench.post("/v1/embeddings", {"input": [[3, 1]], **fields})
        assert response.status_code == 200, response.text
        return [item["embedding"] for item in response.json()["data"]]

    assert vectors() == vectors(dimensions=2) == vectors(dimensions=None) == [[4, 2]]
    assert vectors(dimensions=1) == [[4]]
    assert vectors(dimensions=1, embd_normalize=2) == [[1]]
    for dimensions, message in (
        (0, "in [1, "),
        (3, "in [1, 2]"),
        (100_000, "in [1, 2]"),
        ("8", "a number"),
    ):
        Case("/v1/embeddings", {"input": "a", "dimensions": dimensions}, 400, message).check(
            bench.client
        )


def test_without_pooling_only_the_native_form() -> None:
    bench = Bench(replies=ReplySettings(embeddings=True), pooling="none")
    assert bench.post("/v1/embeddings", {"input": "a"}).status_code == 400
    assert bench.post("/embeddings", {"input": "a"}).json() == [{"index": 0, "embedding": [[A, 1]]}]


def test_only_with_the_flag() -> None:
    bench = Bench()
    for path in ("/embedding", "/embeddings", "/v1/embeddings"):
        Case(path, {"input": "a"}, 501, "").check(bench.client)


@given(arrays(np.float32, (3, 5), elements=st.floats(-1e3, 1e3, width=32)), st.integers(1, 6))
def test_norms(rows: np.ndarray[Any, Any], p: int) -> None:
    rows[np.abs(rows) < 1e-3] = 0
    lengths = (np.abs(normalised(rows, p)).astype(float) ** p).sum(axis=1) ** (1 / p)
    full = np.any(rows != 0, axis=1)
    assert lengths[full] == pytest.approx(np.ones(full.sum()), rel=1e-4)
    assert not lengths[~full].any()
    largest = np.abs(normalised(rows, 0)).max(axis=1)
    assert largest[full] == pytest.approx(np.full(full.sum(), 32760), rel=1e-4)
    assert (normalised(rows, -1) == rows).all()
