"""Embeddings in llama-server's own form and in OpenAI's, and ranks in Jina's and Text Embeddings
Inference's.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import NotSupportedError, RequestError
from pyctl.prompt import Tokens, as_tokens
from pyctl.requests.body_reader import Body, Integer, at_most, mixed
from pyctl.requests.json_text import parse_object
from pyctl.requests.text_limit import check_chars
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse
from pyctl.server.request_span import span_of
from pyctl.settings.limit import limit

__all__ = ["embed_texts", "native", "normalised", "openai", "rank"]

_INT16_RANGE = 32760.0

_MAX_INPUTS = limit(2048, "texts to embed", "400", "request")
_MAX_VECTOR_BYTES = limit(256 * 2**20, "vectors of one answer", "400", "reply", "bytes")


class _EmbeddingsBody(Body, frozen=True):
    """The body of POST /embeddings and /v1/embeddings."""

    input: Any = None
    content: Any = None
    encoding_format: str = "float"
    embd_normalize: Annotated[int | None, Integer(low=-1)] = None
    dimensions: Annotated[int | None, Integer(low=1)] = None
    model: str | None = None


class _RerankBody(Body, frozen=True):
    """The body of POST /rerank; ``texts`` in place of ``documents`` selects the answer of Text
    Embeddings Inference.

    A document is a text, or an object with its ``text``; ``return_documents`` is Jina's and
    Cohere's.
    """

    query: Any = None
    documents: Any = None
    texts: Any = None
    top_n: Annotated[int | None, Integer(low=0, is_limit=True)] = None
    return_text: bool = False
    return_documents: bool = False
    model: str | None = None


async def native(service: HttpService, request: Request) -> Response:
    """Answer POST /embeddings: a list of {"index", "embedding": one vector per pooled text, or one
    per token}.
    """
    return await _answer(service, request, oai=False)


async def openai(service: HttpService, request: Request) -> Response:
    """Answer POST /v1/embeddings; with "content" in place of "input" in the native form."""
    return await _answer(service, request, oai=True)


async def _answer(service: HttpService, request: Request, *, oai: bool) -> Response:
    """Return the embeddings of the request in OpenAI's form, or in llama-server's. Raises
    RequestError.
    """
    _check(service, pooled=oai)
    pooled = service.info.pooling != "none"
    body = _EmbeddingsBody.parse(await request.body())
    if body.input is None and body.content is None:
        raise RequestError('"input" or "content" must be provided')
    oai = oai and body.input is not None
    encoding = body.encoding_format
    if encoding not in ("float", "base64"):
        raise RequestError("The format to return the embeddings in. Can be either float or base64")
    norm = service.settings.embd_normalize if body.embd_normalize is None else body.embd_normalize
    items = _items(body.content if body.input is None else body.input)
    vectors, n_tokens = await _vectors(service, request, items, _tokens)
    vectors = [normalised(_cut(rows, body.dimensions), norm if pooled else -1) for rows in vectors]
    if not oai:
        return JsonResponse(
            [{"index": i, "embedding": rows.tolist()} for i, rows in enumerate(vectors)]
        )
    return JsonResponse(
        {
            "model": service.model if body.model is None else body.model,
            "object": "list",
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            "data": [_object(rows[0], index, encoding) for index, rows in enumerate(vectors)],
        }
    )


def _cut(rows: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first ``dimensions`` numbers of each of ``rows``, shape (n, width). RequestError
    if there are fewer.
    """
    width = rows.shape[1]
    if dimensions is not None and dimensions > width:
        raise RequestError(f"'dimensions' must be in [1, {width}], not {dimensions}")
    return rows[:, :dimensions]


def _check(service: HttpService, *, pooled: bool) -> None:
    """Raise an error if there are no embeddings, or with ``pooled`` none of whole texts."""
    if not service.settings.embeddings:
        raise NotSupportedError(
            "This server does not support embeddings. Start it with `--embeddings`"
        )
    if pooled and service.info.pooling == "none":
        raise RequestError(
            "Pooling type 'none' is not OAI compatible. Please use a different pooling type"
        )


async def embed_texts(
    service: HttpService, request: Request, texts: list[str], *, cut: bool
) -> tuple[list[NDArray[np.float32]], int]:
    """Return the unnormalised embedding of each text, shape (1, width), and the number of tokens;
    ``cut`` truncates texts.
    """
    _check(service, pooled=True)
    at_most(_MAX_INPUTS, len(texts), "input", "texts")
    return await _vectors(
        service, request, texts, partial(_tokens, maximum=service.admin.n_embed if cut else None)
    )


async def _vectors(
    service: HttpService,
    request: Request,
    items: list[Any],
    read: Callable[[HttpService, Any], Tokens],
) -> tuple[list[NDArray[np.float32]], int]:
    """Return the model's outputs for the tokens that ``read`` makes of each item, and the number of
    tokens.
    """
    vectors: list[NDArray[np.float32]] = []
    n_tokens = n_bytes = 0
    for item in items:
        # One at a time, when its turn has come: nothing is read for a client that has left.
        tokens = await service.shared.pool.reading.run(request, read, service, item)
        n_tokens += int(tokens.size)
        vectors.append(await asyncio.wrap_future(service.admin.embed(tokens)))
        n_bytes += vectors[-1].nbytes
        if n_bytes > _MAX_VECTOR_BYTES:
            raise RequestError(f"the vectors have more than {_MAX_VECTOR_BYTES} bytes")
    span_of(request.scope).n_embedded = n_tokens
    return vectors, n_tokens


def _object(vector: NDArray[np.float32], index: int, encoding: str) -> dict[str, Any]:
    if encoding == "float":
        return {"embedding": vector.tolist(), "index": index, "object": "embedding"}
    text = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return {"embedding": text, "index": index, "object": "embedding", "encoding_format": "base64"}


def normalised(rows: NDArray[np.float32], norm: int) -> NDArray[np.float32]:
    """Return ``rows``, shape (n, width), each divided by its norm: -1 none, 0 so that the largest
    is 32760, p the p-norm.
    """
    if norm == -1:
        return rows
    if norm == 0:
        size = np.abs(rows).max(axis=1, keepdims=True) / _INT16_RANGE
    elif norm == 2:
        size = np.sqrt((rows * rows).astype(np.float64).sum(axis=1, keepdims=True))
    else:
        size = (np.abs(rows).astype(np.float64) ** norm).sum(axis=1, keepdims=True) ** (1 / norm)
    factor = np.divide(1.0, size, out=np.zeros(size.shape), where=size > 0)
    scaled: NDArray[np.float32] = rows * factor.astype(np.float32)
    return scaled


def _items(value: Any) -> list[Any]:
    """Return the inputs to embed: a text, token ids, both mixed, or a list of these."""
    many = isinstance(value, list) and not any(isinstance(item, int) for item in value)
    items = value if many else [value]
    if not items:
        raise RequestError('"input" must not be empty')
    at_most(_MAX_INPUTS, len(items), "input", "texts")
    return items


def _tokens(service: HttpService, item: Any, maximum: int | None = None) -> Tokens:
    """Return the tokens of an input, at most ``maximum`` of them."""
    if isinstance(item, dict):
        item = _content(item)
    tokens: list[int] = []
    for index, part in enumerate(mixed(item, "input", service.info.n_vocab)):
        if isinstance(part, str):
            check_chars(part, service.info.n_ctx)
            tokens += service.tokenizer.tokenize(part, add_special=index == 0, parse_special=True)
        else:
            tokens.append(part)
    if not tokens:
        raise RequestError("Input content cannot be empty")
    if maximum is not None and len(tokens) > maximum:
        frame = service.tokenizer.tokenize("", add_special=True, parse_special=False)
        end = frame[1:] if service.tokenizer.add_bos else frame  # the tokens after each text
        tokens = [*tokens[: maximum - len(end)], *end]
    return as_tokens(tokens)


_TEXT_ONLY = "'input': only text and token ids can be embedded; image input is not supported here"


def _content(item: dict[str, Any]) -> Any:
    """Return the text of {"prompt_string": ...} or of {"content": ...}, a text or a list of text
    parts.
    """
    if item.get("multimodal_data"):
        raise NotSupportedError(_TEXT_ONLY)
    content = item.get("content", item.get("prompt_string"))
    if not isinstance(content, list):
        return content
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise NotSupportedError(_TEXT_ONLY)
    return "".join(part["text"] for part in content)


_MAX_DOCUMENTS = limit(1024, "documents to rank", "400", "request")


async def rank(service: HttpService, request: Request) -> Response:
    """Answer POST /rerank {"query", "documents", "top_n"}: documents by score. Raises
    NotSupportedError or RequestError.
    """
    if not service.settings.embeddings or service.info.pooling != "rank":
        raise NotSupportedError(
            "This server does not support reranking. Start it with `--reranking`"
        )
    values = parse_object(await request.body())
    body = _RerankBody.from_json(values)
    is_tei = "texts" in values
    if "query" not in values:
        raise RequestError('"query" must be provided')
    if not isinstance(body.query, str):
        raise RequestError('"query" must be a string')
    documents = body.texts if body.documents is None else body.documents
    if not isinstance(documents, list) or not documents:
        raise RequestError('"documents" must be a non-empty string array')
    at_most(_MAX_DOCUMENTS, len(documents), "documents", "documents")
    texts = [_document_text(document) for document in documents]
    check_chars(body.query, service.info.n_ctx)
    label = "score" if is_tei else "relevance_score"
    ranked: list[dict[str, Any]] = []
    all_scores, n_tokens = await _vectors(
        service, request, texts, partial(_prompt, query=body.query)
    )
    for index, scores in enumerate(all_scores):
        result: dict[str, Any] = {"index": index, label: float(scores[0, 0])}
        if is_tei and body.return_text:
            result["text"] = texts[index]
        if not is_tei and body.return_documents:
            result["document"] = {"text": texts[index]}
        ranked.append(result)
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


def _document_text(document: Any) -> str:
    """Return the text of a document to rank. Raises RequestError."""
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise RequestError(
            '"documents" must be a non-empty string array, or one of objects with a "text"'
        )
    return text


def _prompt(service: HttpService, document: str, query: str) -> Tokens:
    check_chars(document, service.info.n_ctx)
    tokens = as_tokens(list(_pair(service, query, document)))
    if not tokens.size:
        raise RequestError("Input content cannot be empty")
    return tokens


def _pair(service: HttpService, query: str, document: str) -> Iterator[int]:
    """Yield the tokens of one pair, by the model's own template, or else by its tokenizer's
    settings.
    """
    tokenize = service.tokenizer.tokenize
    if template := service.info.templates.rerank:
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
