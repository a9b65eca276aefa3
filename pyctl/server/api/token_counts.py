"""Tokens without generating: tokenize, detokenize, apply-template and counts of input tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import RequestError
from pyctl.server.body import Fields
from pyctl.server.generate.chat_request import chat_turn
from pyctl.server.generate.prompts import mixed
from pyctl.server.http import JsonResponse
from pyctl.server.service import Service

__all__ = ["apply_template", "chat_input_tokens", "count", "counted", "detokenize", "tokenize"]


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize"""
    return JsonResponse(await asyncio.to_thread(_tokenize, service, Fields.parse(await request.body())))


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize"""
    return JsonResponse(await asyncio.to_thread(_detokenize, service, Fields.parse(await request.body())))


async def apply_template(service: Service, request: Request) -> Response:
    """POST /apply-template"""
    turn = await asyncio.to_thread(chat_turn, service, Fields.parse(await request.body()))
    return JsonResponse({"prompt": turn.text})


def _tokenize(service: Service, fields: Fields) -> dict[str, Any]:
    content = fields.get("content")
    parts = mixed(content, "content", service.info.n_vocab) if content is not None else []
    add_special, parse_special = fields.boolean("add_special", False), fields.boolean("parse_special", True)
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            first = add_special and index == 0
            tokens += service.tokenizer.tokenize(part, add_special=first, parse_special=parse_special)
        else:
            tokens.append(part)
    if not fields.boolean("with_pieces", False):
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": _readable(service.tokenizer.piece(token))} for token in tokens]}


def _detokenize(service: Service, fields: Fields) -> dict[str, Any]:
    tokens = mixed(fields.get("tokens") or [], "tokens", service.info.n_vocab)
    ids = [token for token in tokens if isinstance(token, int)]
    if len(ids) != len(tokens):
        raise RequestError("'tokens' must be a list of token ids")
    return {"content": service.tokenizer.detokenize(ids).decode(errors="replace")}


def _readable(piece: bytes) -> str | list[int]:
    """Text, or the bytes where they are no whole characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def chat_input_tokens(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens"""
    fields = Fields.parse(await request.body())
    return counted(await asyncio.to_thread(count, service, fields))


def count(service: Service, fields: Fields) -> int:
    """Tokens of the prompt that the chat request ``fields`` is rendered to."""
    return len(service.chat.prompt_from_text(chat_turn(service, fields).text))


def counted(n_tokens: int) -> Response:
    """``n_tokens`` as OpenAI says it."""
    return JsonResponse({"input_tokens": n_tokens, "object": "response.input_tokens"})
