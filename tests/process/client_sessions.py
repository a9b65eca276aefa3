"""Sessions in the shapes of real programs: roles, parts, fields and lengths as they send them, all
words replaced.

Each is a generator that yields a request (path and body) and is sent the reply. What a program
changes from turn to turn (stamps, cache marks, ids, which parts of a reply it returns) changes
here, too. Lengths are a sixteenth of the real ones.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Session = Generator["Asked", "Replied", None]

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Asked:
    """``known``: the part that must come from the cache of what its ``thread`` was asked last: the
    prompt, "and reply" where that is returned as it was, or a share of the prompt.
    """

    path: str
    body: Json
    known: float | Literal["and reply"] = 1.0
    thread: str = "main"


@dataclass(frozen=True)
class Replied:
    """The parts of the model's reply."""

    content: str
    reasoning: str
    calls: list[Json] = field(default_factory=list)
    items: list[Json] = field(default_factory=list)
    """The output of a response, as it came."""
    n_tokens: int = 0


def text(n: int, seed: object = 0) -> str:
    """Return ``n`` characters of a real prompt, made of our words."""
    rng = random.Random(f"{seed} {n}")
    words = " ".join(
        rng.choice(("stone", "river", "lamp", "seven", "walks", "under", "green"))
        for _ in range(n // 96)
    )
    return words + "."


def tool(name: str, n: int, **choices: Any) -> Json:
    """Return a function whose arguments can have one value each, with a description of ``n``
    characters.
    """
    properties = {key: {"enum": [value]} for key, value in choices.items()}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(choices),
        "additionalProperties": False,
    }
    return {"name": name, "description": text(n, name), "parameters": schema}


def tools(count: int, n: int) -> list[Json]:
    """`look` and `open`, which a session calls, and others beside them."""
    others = [tool(f"tool_{i}", n, value=i) for i in range(count - 2)]
    return [
        tool("look", n, command="ls -la", description="List"),
        tool("open", n, file="notes.txt"),
        *others,
    ]


def forced(name: str) -> Json:
    """Return fields that make a model of random weights reason briefly and then call ``name``."""
    return {
        "tool_choice": name,
        "parallel_tool_calls": False,
        "thinking_budget_tokens": 8,
        "temperature": 0,
    }


def said() -> Json:
    """Return fields that make it reason briefly and then answer."""
    return {
        "tool_choice": "none",
        "thinking_budget_tokens": 8,
        "json_schema": {"enum": ["Done."]},
        "temperature": 0,
    }


# -- the Messages API
# ----------------------------------------------------------------------------------


def claude_code() -> Session:
    """Yield a session of Claude Code: a title in between, a sub-agent, a resumed session, a
    compaction.
    """
    ephemeral = {"cache_control": {"type": "ephemeral"}}

    def body(
        stamp: str, n_system: int, listed: list[Json], messages: list[Json], how: Json
    ) -> Json:
        """Return the body of a request; the last message has the cache mark, which moves on with
        each turn.
        """
        marked = [*messages[:-1], {**messages[-1]}]
        if isinstance(marked[-1]["content"], list):
            marked[-1]["content"] = [
                *marked[-1]["content"][:-1],
                {**marked[-1]["content"][-1], **ephemeral},
            ]
        choice = how.pop("tool_choice")
        one = {"disable_parallel_tool_use": not how.pop("parallel_tool_calls", True)}
        header = f"x-anthropic-billing-header: cc_version=2.1.197.{stamp}; cc_entrypoint=sdk-cli;"
        system = [{"type": "text", "text": header}, {"type": "text", "text": text(62), **ephemeral}]
        return {
            "model": "any",
            "max_tokens": 4000,
            "stream": True,
            "metadata": {"user_id": '{"device_id":"1"}'},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "messages": marked,
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "system": [*system, {"type": "text", "text": text(n_system), **ephemeral}],
            "tools": [
                {
                    "name": each["name"],
                    "description": each["description"],
                    "input_schema": each["parameters"],
                }
                for each in listed
            ],
            "tool_choice": {"type": "none"}
            if choice == "none"
            else {"type": "tool", "name": choice, **one},
            **how,
        }

    def returned(reply: Replied) -> Json:
        blocks: list[Json] = [{"type": "thinking", "thinking": reply.reasoning, "signature": ""}]
        blocks += [{"type": "text", "text": reply.content}] if reply.content else []
        for call in reply.calls:
            function = call["function"]
            given = json.loads(function["arguments"])
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
            )
        return {"role": "assistant", "content": blocks}

    def result(reply: Replied, n: int) -> Json:
        block = {
            "tool_use_id": reply.calls[0]["id"],
            "type": "tool_result",
            "content": text(n),
            "is_error": False,
        }
        return {"role": "user", "content": [block]}

    def user(*texts: str) -> Json:
        return {"role": "user", "content": [{"type": "text", "text": one} for one in texts]}

    def loop(
        thread: str, stamp: str, n_system: int, listed: list[Json], messages: list[Json]
    ) -> Session:
        for how in (forced("look"), forced("open"), said()):
            reply = yield Asked(
                MESSAGES, body(stamp, n_system, listed, messages, how), "and reply", thread
            )
            messages.append(returned(reply))
            if reply.calls:
                messages.append(result(reply, 200))

    main = tools(24, 1200)
    helper = tools(22, 1100)
    title = {"format": {"type": "json_schema", "schema": {"enum": ["A title"]}}, "effort": "high"}
    asked = body("68e", 1190, [], [user(text(163))], {"tool_choice": "none"})
    del asked["tools"], asked["tool_choice"], asked["thinking"], asked["context_management"]
    asked |= {"output_config": title, "thinking_budget_tokens": 8, "temperature": 0}
    yield Asked(MESSAGES, asked, thread="title")

    messages = [user(text(306), text(21)), {"role": "system", "content": text(6062)}]
    yield from loop("main", "a5a", 5892, main, messages)
    other = [user(text(306), text(19, "other")), {"role": "system", "content": text(4518)}]
    yield from loop("helper", "7d5", 2722, helper, other)
    messages += [user(text(31))]
    reply = yield Asked(MESSAGES, body("a5a", 5892, main, messages, said()))
    messages += [returned(reply), user(text(5978))]
    yield Asked(MESSAGES, body("a5a", 5892, main, messages, said()), "and reply")
    compacted = [user(text(306), text(723)), returned(reply), user(text(246), text(135))]
    yield Asked(MESSAGES, body("f9d", 5892, main, compacted, said()), 0.8)


# -- the Responses API
# ----------------------------------------------------------------------------------


def codex() -> Session:
    """Yield a session of Codex: nothing is stored, all items come back, with the model's own words
    sealed.
    """
    names = itertools.count()

    def item(role: str, *texts: int) -> Json:
        parts = [{"type": "input_text", "text": text(n, role)} for n in texts]
        return {"type": "message", "id": f"msg_{next(names):036}", "role": role, "content": parts}

    listed: list[Json] = [{"type": "function", **one, "strict": False} for one in tools(7, 900)]
    inner = [{"type": "function", **tool("close", 300, target="1"), "strict": False}]
    listed.append({"type": "namespace", "name": "agents", "description": text(43), "tools": inner})
    listed.append({"type": "web_search", "external_web_access": True})
    items = [
        item("developer", 16979),
        item("developer", 2143, 362),
        item("user", 375),
        item("user", 21),
    ]
    for how in (forced("look"), forced("agents close"), said(), said()):
        choice = how["tool_choice"]
        space, _, name = choice.rpartition(" ")
        chosen = {"type": "function", "name": name, **({"namespace": space} if space else {})}
        body = {
            "model": "any",
            "stream": True,
            "parallel_tool_calls": True,
            "store": False,
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": f"{next(names):036}",
            "input": list(items),
            "client_metadata": {"turn_id": f"{next(names):036}"},
            "tools": listed,
            **how,
            "tool_choice": choice if choice == "none" else chosen,
        }
        reply = yield Asked(RESPONSES, body, "and reply")
        items += reply.items
        calls = [one for one in reply.items if one["type"] == "function_call"]
        for call in calls:
            assert call.get("namespace", "") == space
            assert call["name"] == name
            items.append(
                {
                    "type": "function_call_output",
                    "id": "o",
                    "call_id": call["call_id"],
                    "output": text(296),
                }
            )
        if not calls:
            items.append(item("user", 20))


# -- chat completions
# ----------------------------------------------------------------------------------


def chat_agent(
    system: int,
    n_tools: int,
    n_tool: int,
    *,
    keeps_reasoning: bool,
    parts: bool = False,
    empty: str | None = "",
    thread: str = "main",
    **fields: Any,
) -> Session:
    """Programs that differ in what they return: reasoning or not, texts or parts, empty content or
    null.
    """

    def user(n: int) -> Json:
        content = text(n, "user")
        return {
            "role": "user",
            "content": [{"type": "text", "text": content}] if parts else content,
        }

    messages = [{"role": "system", "content": text(system)}, user(400)]
    listed = [{"type": "function", "function": one} for one in tools(n_tools, n_tool)]
    for number, how in enumerate((forced("look"), forced("open"), said(), said())):
        if how["tool_choice"] != "none":
            how["tool_choice"] = {"type": "function", "function": {"name": how["tool_choice"]}}
        body = {
            "model": "any",
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
            **how,
        }
        # Without its reasoning a turn is rendered anew once the user has spoken again.
        known: Any = "and reply" if keeps_reasoning else 1.0 if number < 3 else 0.5
        reply = yield Asked(
            CHAT, {**body, "messages": list(messages), "tools": listed}, known, thread
        )
        message: Json = {"role": "assistant", "content": reply.content or empty}
        if keeps_reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = reply.calls
        messages.append(message)
        for call in reply.calls:
            result: Any = [{"type": "text", "text": text(300)}] if parts else text(300)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not reply.calls:
            messages.append(user(22))


def opencode() -> Session:
    """Yield a session of OpenCode, whose title comes first, as two user messages and without
    tools.
    """
    messages = [{"role": "system", "content": text(2096)}, {"role": "user", "content": text(40)}]
    messages.append({"role": "user", "content": text(400, "user")})
    fields = {
        "model": "any",
        "max_tokens": 4000,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    yield Asked(
        CHAT, {**fields, "messages": messages, "grammar": 'root ::= "A title"'}, thread="title"
    )
    yield from chat_agent(9550, 10, 3000, keeps_reasoning=True, max_tokens=4000)


def sillytavern() -> Session:
    """Yield raw prompts of SillyTavern without marks: a reply, a swipe, the next turn and a reply
    that goes on.
    """
    samplers = [
        *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
        *("temperature", "adaptive_p"),
    ]
    fields: Json = {
        "model": "",
        "max_new_tokens": 16,
        "max_tokens": 16,
        "n_predict": 16,
        "num_predict": 16,
        "n": 1,
        "temperature": 1,
        "top_p": 1,
        "typical_p": 1,
        "min_p": 0,
        "top_k": 0,
        "repetition_penalty": 1,
        "rep_pen": 1,
        "min_tokens": 0,
        "add_bos_token": True,
        "smoothing_factor": 0,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 0,
        "dry_sequence_breakers": ["\n", ":", '"', "*"],
        "samplers": samplers,
        "stopping_strings": ["\nAnna:"],
        "stop": ["\nAnna:", "\n### Instruction:"],
        "tfs": 1,
        "truncation_length": 8192,
        "num_ctx": 8192,
        "ban_eos_token": False,
        "mirostat": 0,
        "mirostat_tau": 5,
        "mirostat_eta": 0.1,
        "custom_token_bans": "",
        "banned_strings": [],
        "api_type": "llamacpp",
        "api_server": "http://127.0.0.1/",
        "xtc_threshold": 0.1,
        "xtc_probability": 0,
        "nsigma": 0,
        "top_n_sigma": 0,
        "min_keep": 0,
        "adaptive_target": -0.01,
        "adaptive_decay": 0.9,
        "guidance_scale": 1,
        "negative_prompt": "",
        "logit_bias": [],
        "repeat_penalty": 1,
        "repeat_last_n": 0,
        "ignore_eos": False,
        "rep_pen_slope": 1,
        "grammar": "",
        "cache_prompt": True,
        "stream": True,
    }
    prompt = text(20_000) + "\n### Instruction:\nAnna: Hello.\n\n### Response:\nBert:"
    reply = yield Asked("/completion", {**fields, "prompt": prompt})
    yield Asked("/completion", {**fields, "prompt": prompt})
    prompt += f"{reply.content}\n\n### Instruction:\nAnna: And then?\n\n### Response:\nBert:"
    yield Asked("/completion", {**fields, "prompt": prompt})
    yield Asked("/completion", {**fields, "prompt": prompt + " Some beans"})


def open_webui() -> Session:
    """Yield a chat, and after each reply a title, tags and follow-ups: one message each, which ends
    in the conversation.
    """
    messages: list[Json] = [
        {"role": "system", "content": text(800)},
        {"role": "user", "content": text(900)},
    ]
    for n in range(2):
        body = {"model": "any", "stream": True, "messages": list(messages), **said()}
        del body["tool_choice"]
        reply = yield Asked(CHAT, body)
        messages.append({"role": "assistant", "content": reply.content})
        told = "\n".join(
            f"{message['role'].upper()}: {message['content']}" for message in messages[1:]
        )
        for task, length in (("title", 1100), ("tags", 900), ("follow-ups", 800)):
            content = (
                f"### Task:\n{text(length, task)}\n### Chat "
                f"History:\n<chat_history>\n{told}\n</chat_history>"
            )
            asked = {
                "model": "any",
                "messages": [{"role": "user", "content": content}],
                "stream": False,
            }
            limit = {"max_tokens": 1000, "grammar": 'root ::= "Done."'}
            yield Asked(CHAT, {**asked, **limit}, 0.0, task)
        messages.append({"role": "user", "content": text(100, n)})
    begun = [*messages[:-2], {"role": "assistant", "content": "The first words"}]
    fields = {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "grammar": 'root ::= " and more"',
    }
    yield Asked(CHAT, {"model": "any", "stream": True, "messages": begun, **fields}, 0.5)


SESSIONS: dict[str, Callable[[], Session]] = {
    "claude code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "qwen code": lambda: chat_agent(
        38946, 15, 1500, keeps_reasoning=True, parts=True, max_tokens=4000
    ),
    "cline": lambda: chat_agent(4271, 25, 700, keeps_reasoning=True, empty=None),
    "continue": lambda: chat_agent(1271, 11, 500, keeps_reasoning=False),
    "sillytavern": sillytavern,
    "open webui": open_webui,
}
