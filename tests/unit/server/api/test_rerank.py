"""Ranks on a backend without a model, whose score is the sum of the tokens."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.requests import ClientDisconnect

from pyctl.engine.backend import ModelTemplates
from pyctl.requests.reply_settings import ReplySettings
from pyctl.requests.text_limit import MAX_CHARS
from tests.case import Case
from tests.unit.server.fake import Bench
from tests.unit.server.parts import Caller

PATHS = ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"]
DOCUMENTS = ["b", "d", "a", "c"]


def ranker(**info: Any) -> Bench:
    return Bench(replies=ReplySettings(embeddings=True), pooling="rank", **info)


@pytest.mark.parametrize("path", PATHS)
def test_documents_come_back_in_order_of_their_scores(path: str) -> None:
    body = ranker().post(path, {"query": "q", "documents": DOCUMENTS, "model": "m"}).json()
    scores = {index: float(sum(f"q{text}".encode())) for index, text in enumerate(DOCUMENTS)}
    expected = [{"index": index, "relevance_score": scores[index]} for index in (1, 3, 0, 2)]
    usage = {"prompt_tokens": 8, "total_tokens": 8}
    assert body == {"model": "m", "object": "list", "usage": usage, "results": expected}


def test_the_other_form_is_a_list_with_texts_if_wanted() -> None:
    results = (
        ranker().post("/rerank", {"query": "q", "texts": DOCUMENTS, "return_text": True}).json()
    )
    assert [(item["index"], item["text"]) for item in results] == [
        (1, "d"),
        (3, "c"),
        (0, "b"),
        (2, "a"),
    ]
    assert "text" not in ranker().post("/rerank", {"query": "q", "texts": DOCUMENTS}).json()[0]


def test_documents_are_objects_and_come_back_if_requested() -> None:
    objects = [{"text": text, "id": 7} for text in DOCUMENTS]
    for documents in (objects, DOCUMENTS, [*objects[:2], *DOCUMENTS[2:]]):
        body = {"query": "q", "documents": documents, "return_documents": True}
        results = ranker().post("/v1/rerank", body).json()["results"]
        assert [(each["index"], each["document"]) for each in results] == [
            (1, {"text": "d"}),
            (3, {"text": "c"}),
            (0, {"text": "b"}),
            (2, {"text": "a"}),
        ]
    assert (
        "document"
        not in ranker().post("/rerank", {"query": "q", "documents": objects}).json()["results"][0]
    )


@pytest.mark.parametrize(("top_n", "n"), [(None, 4), (0, 0), (2, 2), (4, 4), (99, 4), (2**60, 4)])
def test_only_the_best_are_told(top_n: int | None, n: int) -> None:
    for name, results in (("documents", lambda body: body["results"]), ("texts", list)):
        body = ranker().post("/rerank", {"query": "q", name: DOCUMENTS, "top_n": top_n}).json()
        assert len(results(body)) == n


def test_a_model_is_asked_in_its_own_words_or_with_its_marks() -> None:
    body = {"query": "{document}", "documents": ["{query}"]}
    template = (
        ranker(templates=ModelTemplates(rerank="q={query} d={document}"))
        .post("/rerank", body)
        .json()
    )
    assert template["results"][0]["relevance_score"] == sum(b"q={document} d={query}")
    marks = ranker(rerank_marks=((1,), (2, 4), (8,))).post("/rerank", body).json()
    assert marks["results"][0]["relevance_score"] == sum(b"{document}{query}") + 15


@pytest.mark.parametrize(
    "case",
    [
        Case("/rerank", {"documents": ["a"]}, 400, '"query" must be provided'),
        Case(
            "/rerank", {"query": "q", "documents": [{"image": "a"}]}, 400, 'objects with a "text"'
        ),
        Case("/rerank", {"query": 1, "documents": ["a"]}, 400, '"query" must be a string'),
        Case("/rerank", {"query": None, "documents": ["a"]}, 400, '"query" must be a string'),
        Case("/rerank", {"query": "q"}, 400, '"documents" must be a non-empty string array'),
        Case(
            "/rerank",
            {"query": "q", "documents": []},
            400,
            '"documents" must be a non-empty string array',
        ),
        Case(
            "/rerank",
            {"query": "q", "documents": 123},
            400,
            '"documents" must be a non-empty string array',
        ),
        Case(
            "/rerank",
            {"query": "q", "documents": [1, 2]},
            400,
            '"documents" must be a non-empty string array',
        ),
        Case(
            "/rerank",
            {"query": "q", "texts": [""] * 1025},
            400,
            "'documents' must have at most 1024",
        ),
        Case("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, 400, "'top_n' must be in"),
        Case(
            "/rerank", {"query": "", "documents": ["a", ""]}, 400, "Input content cannot be empty"
        ),
        Case("/rerank", {"query": "q", "documents": ["x" * 64]}, 400, "too many tokens"),
        Case("/rerank", {"query": "q" * (MAX_CHARS + 1), "documents": ["a"]}, 400, "too long"),
        Case("/rerank", {"query": "q", "documents": ["a", "x" * (MAX_CHARS + 1)]}, 400, "too long"),
    ],
    ids=str,
)
def test_what_cannot_be_ranked(case: Case) -> None:
    case.check(ranker().client)


@pytest.mark.parametrize(("path", "name"), [("/rerank", "documents"), ("/v1/embeddings", "input")])
def test_texts_are_read_one_at_a_time_and_no_more_once_the_client_has_left(
    path: str, name: str
) -> None:
    """A hundred texts are tokenised one at a time, and none after the client has left."""
    bench = (
        ranker()
        if name == "documents"
        else Bench(replies=ReplySettings(embeddings=True), pooling="mean")
    )
    caller = Caller(bench.app, path, {"query": "q", name: [f"{n}" for n in range(100)]})
    embedded: list[int] = []
    embed = bench.service.admin.embed

    def leaving(tokens: Any) -> Any:
        embedded.append(int(tokens.size))
        if len(embedded) == 3:
            caller.gone.set()
        return embed(tokens)

    bench.service.admin.embed = leaving  # type: ignore[method-assign]
    bench.tokenizer.tokenize = tokenized = Mock(wraps=bench.tokenizer.tokenize)
    with suppress(ClientDisconnect):
        asyncio.run(caller.call())
    assert 3 <= len(embedded) < 8
    assert {each.args[0].lstrip("q") for each in tokenized.call_args_list} <= {
        "",
        *(f"{n}" for n in range(8)),
    }
    assert not any(message.get("body") for message in caller.sent)


@pytest.mark.parametrize("path", PATHS)
def test_only_with_the_flag(path: str) -> None:
    for bench in (
        Bench(pooling="rank"),
        Bench(replies=ReplySettings(embeddings=True), pooling="mean"),
    ):
        error = bench.post(path, {"query": "q", "documents": ["a"]}).json()["error"]
        assert error["code"] == 501
        assert error["type"] == "not_supported_error"
        assert (
            error["message"]
            == "This server does not support reranking. Start it with `--reranking`"
        )
