"""Tokens without generating: tokenize, detokenize, apply-template and counts of input tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import RequestError
from pyctl.requests.body import ConversationBody
from pyctl.requests.body_reader import Body, mixed
from pyctl.requests.chat_request import prepare_chat
from pyctl.requests.json_text import parse_object
from pyctl.requests.request_pool import Fetched
from pyctl.requests.text_limit import check_chars
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse

__all__ = [
    "apply_template",
    "chat_input_tokens",
    "count_chat_tokens",
    "detokenize",
    "n_input_tokens",
    "tokenize",
]


class _TokenizeBody(Body, frozen=True):
    """The body of POST /tokenize."""

    content: Any = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


async def tokenize(service: HttpService, request: Request) -> Response:
    """Answer POST /tokenize."""
    body = await request.body()
    lane = service.shared.pool.reading
    return JsonResponse(
        await lane.run(request, lambda: _tokenize(service, _TokenizeBody.parse(body)))
    )


async def detokenize(service: HttpService, request: Request) -> Response:
    """Answer POST /detokenize."""
    body = await request.body()
    lane = service.shared.pool.reading
    return JsonResponse(await lane.run(request, lambda: _detokenize(service, parse_object(body))))


async def apply_template(service: HttpService, request: Request) -> Response:
    """Answer POST /apply-template."""
    body = await request.body()
    chat = await service.shared.pool.read(
        request,
        lambda fetched: prepare_chat(service, ConversationBody.parse(body), fetched=fetched),
    )
    return JsonResponse({"prompt": chat.text})


def _tokenize(service: HttpService, body: _TokenizeBody) -> dict[str, Any]:
    """Return the tokens of ``body``, with their text if it requests pieces. Special tokens of the
    start are added only before the first part.
    """
    parts = mixed(body.content, "content", service.info.n_vocab) if body.content is not None else []
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            check_chars(part, service.info.n_ctx)
            first = body.add_special and index == 0
            tokens += service.tokenizer.tokenize(
                part, add_special=first, parse_special=body.parse_special
            )
        else:
            tokens.append(part)
    if not body.with_pieces:
        return {"tokens": tokens}
    pieces = {
        token: {"id": token, "piece": _readable(service.tokenizer.piece(token))}
        for token in set(tokens)
    }
    return {"tokens": [pieces[token] for token in tokens]}


def _detokenize(service: HttpService, values: Mapping[str, Any]) -> dict[str, Any]:
    tokens = mixed(values.get("tokens") or [], "tokens", service.info.n_vocab)
    ids = [token for token in tokens if isinstance(token, int)]
    if len(ids) != len(tokens):
        raise RequestError("'tokens' must be a list of token ids")
    return {"content": service.readable(ids)}


def _readable(piece: bytes) -> str | list[int]:
    """Return text, or the bytes if they are not whole characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def count_chat_tokens(service: HttpService, chat: Mapping[str, Any], fetched: Fetched) -> int:
    """Return the tokens of the prompt that the fields of a chat are rendered to. Raises
    RequestError.
    """
    prepared = prepare_chat(service, ConversationBody.from_json(chat), fetched=fetched)
    check_chars(prepared.text, service.info.n_ctx)
    return prepared.n_tokens


async def n_input_tokens(
    service: HttpService,
    request: Request,
    chat_of: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda values: values,
) -> int:
    """Return the tokens of the prompt that a request is rendered to; ``chat_of`` makes the fields
    of a chat of its body.
    """
    body = await request.body()
    return await service.shared.pool.read(
        request, lambda fetched: count_chat_tokens(service, chat_of(parse_object(body)), fetched)
    )


async def chat_input_tokens(service: HttpService, request: Request) -> Response:
    """Answer POST /v1/chat/completions/input_tokens."""
    n = await n_input_tokens(service, request)
    return JsonResponse({"input_tokens": n, "object": "response.input_tokens"})
