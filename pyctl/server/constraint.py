"""What binds the form of a reply: a grammar or a JSON schema, by the fields of OpenAI and of llama-server."""

from __future__ import annotations

from typing import Any

from pyctl.chat.format import ChatFormat, Turn
from pyctl.chat.schema import reply_grammar, schema_grammar
from pyctl.errors import RequestError
from pyctl.server.fields import Fields

__all__ = ["constraint_of", "schema_of"]


def constraint_of(fields: Fields, chat: ChatFormat, turn: Turn | None = None) -> dict[str, Any]:
    """The members of Sampling that bind the reply; none without such a field. Raises RequestError.

    In a chat, a schema binds the content, which may follow a reasoning block; a grammar binds everything.
    """
    grammar = fields.string("grammar", "")
    schema = schema_of(fields)
    if turn is None:
        return {"grammar": grammar or _converted(schema, chat)} if grammar or schema is not None else {}
    if grammar and schema is not None:
        raise RequestError("Cannot use both json_schema and grammar")
    if grammar:
        return {"grammar": grammar}
    if schema is None:
        return {}
    prefill = turn.prefill if turn.where == "content" else ""
    return {"grammar": _converted(schema, chat, turn), "grammar_prefill": prefill}


def schema_of(fields: Fields) -> Any:
    """The JSON schema that the reply has to follow, from ``response_format`` or ``json_schema``; None without one."""
    schema = fields.get("json_schema")
    form = fields.object("response_format")
    kind = form.string("type", "")
    if kind == "json_object" and (schema is None or "schema" in form):
        schema = form.get("schema") or {}
    elif kind == "json_schema":
        schema = form.object("json_schema").get("schema") or {}
    elif kind not in ("", "text", "json_object"):
        raise RequestError(f'response_format type must be one of "text", "json_object" or "json_schema", not: {kind}')
    return {"type": "object"} if schema == {} else schema


def _converted(schema: Any, chat: ChatFormat, turn: Turn | None = None) -> str:
    try:
        return schema_grammar(schema) if turn is None else reply_grammar(schema, chat.tags, chat.begins(turn))
    except RequestError as error:
        raise RequestError(f"Field 'json_schema': JSON schema conversion failed: {error}") from error
