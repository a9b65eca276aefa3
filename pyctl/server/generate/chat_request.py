"""What a chat request asks for, whatever API it came by: the rendered conversation, the engine's part, the way back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pyctl.chat.chat_format import ReasoningFormat
from pyctl.chat.rendering import Continue, RenderedChat
from pyctl.chat.reply_splitter import ReplySplitter
from pyctl.chat.tools import Tools
from pyctl.engine.request import Request
from pyctl.errors import RequestError
from pyctl.server.body import Fields
from pyctl.server.generate.prepare import Options, engine_request
from pyctl.server.service import Service

__all__ = ["ChatJob", "chat_job", "chat_turn"]


@dataclass(frozen=True)
class ChatJob:
    """One reply to make: ``request`` for the engine, ``splitter`` for its text; ``open_reasoning`` is text of the
    prompt that the content begins with.
    """

    request: Request
    options: Options
    turn: RenderedChat
    splitter: ReplySplitter
    open_reasoning: str


def chat_job(service: Service, fields: Fields) -> ChatJob:
    """Read the body of a chat completion, OpenAI's fields and llama-server's. Raises RequestError."""
    turn = chat_turn(service, fields)
    options = Options.of(fields, service.settings.ping_seconds)
    reasoning = _reasoning_format(fields, service)
    request = engine_request(fields, service.chat.prompt_of(turn), service, _n_chat_probs(fields), turn)
    grammar, triggers = service.chat.call_grammar(turn) if not request.sampling.grammar else ("", ())
    if grammar:
        sampling = replace(
            request.sampling, grammar=grammar, grammar_lazy=bool(triggers), grammar_triggers=tuple(triggers)
        )
        request = replace(request, sampling=sampling)
    open_reasoning = turn.open_reasoning if reasoning == "none" else ""
    return ChatJob(request, options, turn, service.chat.splitter(turn, reasoning), open_reasoning)


def chat_turn(service: Service, fields: Fields) -> RenderedChat:
    """The rendered conversation of a chat request."""
    kwargs = fields.object("chat_template_kwargs").as_dict()
    if isinstance(kwargs.get("enable_thinking"), str):
        raise RequestError("'chat_template_kwargs.enable_thinking' must be true or false, not a string")
    effort = fields.string("reasoning_effort", "")
    if effort == "none":
        kwargs["enable_thinking"] = False
    elif effort:
        kwargs["reasoning_effort"] = effort
    continues = _continues(fields)
    add_header = fields.boolean("add_generation_prompt", continues is None)
    if continues is not None and add_header:
        raise RequestError("'add_generation_prompt' and 'continue_final_message' exclude each other")
    tools = _tools(fields)
    return service.chat.turn(
        fields.get("messages"),
        tools=tools,
        callable_tools=_callable(fields, fields.get("tools") or []),
        kwargs=kwargs,
        add_generation_prompt=add_header,
        continues=continues,
    )


def _continues(fields: Fields) -> Continue | None:
    value = fields.get("continue_final_message")
    if value is True:
        return "auto"
    if value == "content":
        return "content"
    return "reasoning_content" if value == "reasoning_content" else None


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    """The tools as llama-server hands them to the template: name, description and parameters, and nothing else."""
    tools = fields.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError("'tools' must be a list of objects")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{at} must be of type function, with a function that has a name")
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None):
        raise RequestError(f"{at}.function.description must be a string")
    if not isinstance(parameters, dict | None):
        raise RequestError(f"{at}.function.parameters must be an object")
    return {
        "type": "function",
        "function": {"name": function["name"], "description": description or "", "parameters": parameters or {}},
    }


def _callable(fields: Fields, tools: list[dict[str, Any]]) -> Tools | None:
    """What of ``tools`` the reply may call, and whether it must; None for nothing."""
    choice = fields.get("tool_choice") or "auto"
    wanted = fields.boolean("parse_tool_calls", True)
    if not isinstance(choice, dict) and choice not in ("auto", "none", "required"):
        raise RequestError("'tool_choice' must be auto, none, required or an object")
    if not tools:
        return None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise RequestError("'tool_choice' as an object must be of type function, with a function that has a name")
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise RequestError(f"'tool_choice' names {name!r}, which is none of the tools")
    if choice == "none":
        return None
    if "grammar" in fields:
        raise RequestError("Cannot use custom grammar constraints with tools.")
    if not wanted:
        return None
    return Tools.of(tools, fields.boolean("parallel_tool_calls", True), forced=choice != "auto")


def _reasoning_format(fields: Fields, service: Service) -> ReasoningFormat:
    value = fields.string("reasoning_format", service.settings.reasoning_format)
    if value == "auto":
        return "auto"
    if value in ("deepseek", "deepseek-legacy"):  # llama-server, too, treats both alike
        return "deepseek"
    if value != "none":
        raise RequestError(f"'reasoning_format' must be auto, deepseek, deepseek-legacy or none, not {value!r}")
    return "none"


def _n_chat_probs(fields: Fields) -> int:
    """OpenAI's ``logprobs`` and ``top_logprobs``, or llama-server's ``n_probs``."""
    if fields.boolean("logprobs", False):
        return fields.integer("top_logprobs", default=20, low=0)
    if "top_logprobs" in fields:
        raise RequestError("top_logprobs requires logprobs to be set to true")
    return max(fields.integer("n_probs", default=0), 0)
