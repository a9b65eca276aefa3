"""Ranks of documents for a query, by a model with a classifier, in Jina's and Text Embeddings Inference's forms."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import NotSupportedError, RequestError
from pyctl.limit import limit
from pyctl.prompt import Tokens, as_tokens
from pyctl.server.body import RerankBody, at_most, parse_object
from pyctl.server.byte_account import check_letters
from pyctl.server.http import JsonResponse
from pyctl.server.service import Service

__all__ = ["rank"]

_MOST_DOCUMENTS = limit(1024, "documents to rank", "400", "request")


async def rank(service: Service, request: Request) -> Response:
    """POST /rerank {"query", "documents", "top_n"}: indices and scores of the documents, the best first."""
    if not service.settings.embeddings or service.info.pooling != "rank":
        raise NotSupportedError("This server does not support reranking. Start it with `--reranking`")
    values = parse_object(await request.body())
    body, is_tei = RerankBody.of(values), "texts" in values
    if "query" not in values:
        raise RequestError('"query" must be provided')
    if not isinstance(body.query, str):
        raise RequestError('"query" must be a string')
    documents = body.texts if body.documents is None else body.documents
    if not isinstance(documents, list) or not documents or not all(isinstance(text, str) for text in documents):
        raise RequestError('"documents" must be a non-empty string array')
    at_most(_MOST_DOCUMENTS, len(documents), "documents", "documents")
    check_letters(body.query, service.info.n_ctx)
    n_tokens = 0
    label = "score" if is_tei else "relevance_score"
    ranked: list[dict[str, Any]] = []
    for index, document in enumerate(documents):
        # One at a time, when its turn has come: nothing is read for a client that has left.
        tokens = await service.pool.run(request, _prompt, service, body.query, document)
        n_tokens += int(tokens.size)
        scores = await asyncio.wrap_future(service.admin.embed(tokens))
        text = {"text": documents[index]} if is_tei and body.return_text else {}
        ranked.append({"index": index, label: float(scores[0, 0]), **text})
    ranked.sort(key=lambda item: -item[label])
    results = ranked[: body.top_n]
    if is_tei:
        return JsonResponse(results)
    return JsonResponse(
        {
            "model": service.model if body.model is None else body.model,
            "object": "list",
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            "results": results,
        }
    )


def _prompt(service: Service, query: str, document: str) -> Tokens:
    check_letters(document, service.info.n_ctx)
    tokens = as_tokens(list(_pair(service, query, document)))
    if not tokens.size:
        raise RequestError("Input content cannot be empty")
    return tokens


def _pair(service: Service, query: str, document: str) -> Iterator[int]:
    """The tokens of one pair, as the model's own template has them, or else its tokenizer's settings."""
    tokenize = service.tokenizer.tokenize
    if template := service.info.rerank_template:
        texts = {"{query}": query, "{document}": document}
        text = re.sub(r"\{query\}|\{document\}", lambda found: texts[found[0]], template)
        yield from tokenize(text, add_special=False, parse_special=True)
        return
    before, between, after = service.info.rerank_marks
    yield from before
    yield from tokenize(query, add_special=False, parse_special=False)
    yield from between
    yield from tokenize(document, add_special=False, parse_special=False)
    yield from after
