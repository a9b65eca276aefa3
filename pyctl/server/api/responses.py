"""The endpoints of OpenAI's Responses API; responses_request and responses_reply say where llama-server differs."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pyctl.errors import NotFoundError
from pyctl.server.api.responses_reply import ResponseReply
from pyctl.server.api.responses_request import ResponseRequest, messages_of
from pyctl.server.api.token_counts import count, counted
from pyctl.server.body import NewConversationBody, parse_object
from pyctl.server.byte_account import ByteAccount
from pyctl.server.generate.image_sources import Fetched, with_images
from pyctl.server.generate.prepare import prepare
from pyctl.server.generate.respond import log_error, respond
from pyctl.server.generation_body import ChatBody, ConversationBody
from pyctl.server.http import JsonResponse, error_response
from pyctl.server.service import Service
from pyctl.server.shared_store import owner_of

__all__ = [
    "change_conversation",
    "create",
    "create_conversation",
    "delete",
    "delete_conversation",
    "input_tokens",
    "retrieve",
    "retrieve_conversation",
]


async def create(service: Service, request: Request) -> ASGIApp:
    """POST /v1/responses"""
    values = parse_object(await request.body())
    try:
        owner = owner_of(request)
        reply = await with_images(service, request, lambda fetched: _reply(service, values, fetched, owner))
    except NotFoundError as error:
        log_error(request.url.path, error)
        return _not_found(values, error)
    return respond(service, [reply])


async def input_tokens(service: Service, request: Request) -> Response:
    """POST /v1/responses/input_tokens"""
    values = parse_object(await request.body())
    try:
        return counted(await with_images(service, request, lambda fetched: _count(service, values, fetched)))
    except NotFoundError as error:
        log_error(request.url.path, error)
        return _not_found(values, error)


async def retrieve(service: Service, request: Request) -> Response:
    """GET /v1/responses/{id}"""
    return JsonResponse(service.responses.get(request.path_params["id"]))


async def delete(service: Service, request: Request) -> Response:
    """DELETE /v1/responses/{id}"""
    name = request.path_params["id"]
    service.responses.delete(name)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


async def create_conversation(service: Service, request: Request) -> Response:
    """POST /v1/conversations {"items": [...], "metadata": {...}}; both may be absent."""
    raw = await request.body()
    return JsonResponse(await service.pool.run(request, _conversation, service, raw, owner_of(request)))


async def retrieve_conversation(service: Service, request: Request) -> Response:
    """GET /v1/conversations/{id}"""
    return JsonResponse(service.conversations.get(request.path_params["id"]))


async def change_conversation(service: Service, request: Request) -> Response:
    """POST /v1/conversations/{id} {"metadata": {...}}"""
    body = NewConversationBody.parse(await request.body())
    return JsonResponse(service.conversations.change(request.path_params["id"], body.metadata))


async def delete_conversation(service: Service, request: Request) -> Response:
    """DELETE /v1/conversations/{id}; the responses in it stay."""
    name = request.path_params["id"]
    service.conversations.delete(name)
    return JsonResponse({"id": name, "object": "conversation.deleted", "deleted": True})


def _conversation(service: Service, raw: bytes, owner: str) -> dict[str, Any]:
    body = NewConversationBody.parse(raw or b"{}")
    messages = [] if body.items is None else messages_of(body.items, "items", ByteAccount())
    return service.conversations.create(messages, body.metadata, owner)


def _reply(service: Service, values: dict[str, Any], fetched: Fetched, owner: str) -> ResponseReply:
    asked = ResponseRequest.of(values, service.responses, service.conversations)
    (prepared,) = prepare(service, ChatBody.of(asked.chat), fetched)
    return ResponseReply(service, prepared, asked, owner)


def _count(service: Service, values: dict[str, Any], fetched: Fetched) -> int:
    asked = ResponseRequest.of(values, service.responses, service.conversations)
    return count(service, ConversationBody.of(asked.chat), fetched)


def _not_found(values: dict[str, Any], missing: NotFoundError) -> Response:
    """OpenAI's words for it; clients know the code, and ask again with the whole conversation."""
    if values.get("conversation") is not None:
        return error_response(missing)
    error = {
        "code": "previous_response_not_found",
        "message": f"Previous response with id '{values.get('previous_response_id')}' not found.",
        "param": "previous_response_id",
        "type": "invalid_request_error",
    }
    return JsonResponse({"error": error}, status_code=400)
