"""The requests that both servers get: every endpoint and every documented field of llama-server,
valid and invalid.

Sources: tools/server/README.md of the pinned llama.cpp release, and what its tests send.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.contract.fields import (
    CALLING,
    CHAT,
    COMPLETION,
    HI,
    INFILL,
    MESSAGES,
    OAI_COMPLETION,
    REASONING,
    RESPONSES,
    SCHEMA,
    SHARED,
    TOOL,
    TOOL_TURN,
)
from tests.pictures import image_bytes

__all__ = ["GROUPS", "MARKER", "OWN", "WITH_HEAD", "Probe", "probes"]

KEY = "right"

GROUPS: dict[str, tuple[str, ...]] = {
    "main": ("--alias", "tiny", "--metrics", "--slot-save-path", "{directory}", "-np", "2"),
    "plain": ("--no-slots", "-np", "1"),
    "key": ("--api-key", f"other,{KEY}"),
    "prefix": ("--api-prefix", "/pre"),
    "embeddings": ("--embeddings", "--pooling", "mean", "-np", "1"),
    "drafting": ("--alias", "tiny", "--spec-type", "draft-mtp", "--metrics", "-np", "1"),
    "n-grams": ("--alias", "tiny", "--spec-default", "--metrics", "-np", "1"),
    "images": ("--alias", "tiny", "-np", "1", "--mmproj", "{mmproj}", "--media-path", "{media}"),
}
"""The flags of the servers that answer the probes of each group, besides `FLAGS`."""

OWN: dict[str, tuple[str, ...]] = {"drafting": ("--exact",)}
"""Flags of pyctl alone: drafts in every step, where it would make none that do not pay."""

WITH_HEAD = frozenset({"drafting"})
"""Groups whose model has a head for drafts."""


@dataclass(frozen=True)
class Probe:
    """A request. ``endpoint`` and ``what`` name it in the table; ``body`` is sent as JSON unless it
    is bytes.

    ``show`` names members whose values are compared as well, wherever they are in the reply; "*" is
    all of them.
    """

    endpoint: str
    what: str
    method: str = "POST"
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    group: str = "main"
    path: str = ""
    show: tuple[str, ...] = ()


def probes() -> Iterator[Probe]:
    """Yield all probes, in the order in which they are sent."""
    yield from _facts()
    yield from _text()
    completion = {"prompt": "Once upon", "n_predict": 4, "temperature": 0, "seed": 1}
    yield from _fields(
        "/completion", completion, {**SHARED, **COMPLETION}, show=("generation_settings",)
    )
    yield Probe("/completions", "as /completion", body=completion)
    plain = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0, "seed": 1}
    yield from _fields(
        "/v1/completions", plain, {**SHARED, **OAI_COMPLETION, "prompt": COMPLETION["prompt"]}
    )
    chat = {"messages": HI, "max_tokens": 4, "temperature": 0, "seed": 1}
    yield from _fields("/v1/chat/completions", chat, {**SHARED, **CHAT})
    yield Probe("/chat/completions", "as /v1/chat/completions", body=chat)
    yield from _chat(chat)
    messages = {"model": "tiny", "messages": HI, "max_tokens": 4, "temperature": 0}
    yield from _fields("/v1/messages", messages, MESSAGES)
    yield from _tools_anthropic(messages)
    yield from _fields(
        "/v1/messages/count_tokens",
        {"model": "tiny", "messages": HI},
        MESSAGES,
        stream=False,
        show=("*",),
    )
    responses = {"model": "tiny", "input": "Hello", "max_output_tokens": 4, "temperature": 0}
    yield from _fields("/v1/responses", responses, RESPONSES)
    yield from _tools_responses(responses)
    yield Probe("/responses", "as /v1/responses", body=responses)
    for prefix in ("", "/v1"):
        yield Probe(f"{prefix}/chat/completions/input_tokens", "", body=chat, show=("*",))
        yield Probe(f"{prefix}/responses/input_tokens", "", body=responses, show=("*",))
    yield Probe("/v1/chat/completions/input_tokens", "no messages", body={})
    infill = {"input_prefix": "def f(", "input_suffix": ")", "n_predict": 4, "temperature": 0}
    yield from _fields("/infill", infill, INFILL, show=("prompt",))
    yield from _slots()
    yield from _refused()
    yield from _embeddings()
    yield from _keys()
    yield from _drafts("drafting", "Once upon", 'root ::= "Once upon a time there was"')
    verse = "the quick brown fox jumps over the lazy dog and goes on, "
    yield from _drafts("n-grams", verse * 6, f'root ::= "{verse * 2}"')
    yield from _images()


def _drafts(group: str, prompt: str, grammar: str) -> Iterator[Probe]:
    """Yield fields about drafts, and replies that drafts must not change. Heads of both servers
    draft the same.
    """
    yield Probe("/slots", f"{group}, nothing asked yet", "GET", group=group, show=("speculative",))
    messages = [{"role": "user", "content": prompt}]
    text = {"prompt": prompt, "n_predict": 60, "temperature": 0, "seed": 1, "grammar": grammar}
    chat = {**text, "messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    counts = ("draft_n", "draft_n_accepted") if group in WITH_HEAD else ()
    logprobs = ({"n_probs": 2}, {"logprobs": 2}, {"logprobs": True, "top_logprobs": 2})
    paths = ("/completion", "/v1/completions", "/v1/chat/completions")
    for path, body, probs in zip(paths, (text, text, chat), logprobs, strict=True):
        ways = {
            "plain": {},
            "timings_per_token": {"timings_per_token": True},
            "stop": {"stop": ["goes", "ere"]},
        }
        ways |= {
            "logprobs": probs,
            "without a grammar": {"grammar": ""},
            "one token": {"n_predict": 1},
        }
        for what, fields in ways.items():
            show = (
                ("content", "text", "generation_settings", *counts)
                if what in ("plain", "stop")
                else ()
            )
            plain, streamed = _both(path, f"{group}, {what}", {**body, **fields}, group=group)
            yield from (replace(plain, show=show), streamed)
    for path, body in (
        (
            "/v1/messages",
            {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0},
        ),
        (
            "/v1/responses",
            {"model": "tiny", "input": prompt, "max_output_tokens": 20, "temperature": 0},
        ),
        (
            "/infill",
            {"input_prefix": "def f(", "input_suffix": ")", "n_predict": 9, "temperature": 0},
        ),
    ):
        yield from _both(path, group, body, group=group)
    for path, show in (("/props", ("*",)), ("/slots", ("speculative",)), ("/metrics", ("*",))):
        yield Probe(path, f"{group}, after some replies", "GET", group=group, show=show)


MARKER = "<__media__>"
"""The mark of an image in a text, set for both servers."""


def _images() -> Iterator[Probe]:
    """Yield images of every kind, in every API, in results of tools, counted, and broken in every
    way.
    """
    files = {kind: image_bytes(200, 150, kind, seed=1) for kind in ("png", "jpeg", "gif", "bmp")}
    files |= {
        "1x1": image_bytes(1, 1),
        "wide": image_bytes(600, 20),
        "large": image_bytes(900, 700, "jpeg"),
    }
    texts = {name: base64.b64encode(data).decode() for name, data in files.items()}
    urls = {name: f"data:image/{name};base64,{text}" for name, text in texts.items()}
    first = urls["png"]
    other = urls["wide"]
    chat = {
        "max_tokens": 6,
        "temperature": 0,
        "seed": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    shown = ("prompt_tokens", "token")

    def asked(*parts: Any, **more: Any) -> dict[str, Any]:
        known = (_part(part) if isinstance(part, str) else part for part in parts)
        return {**chat, "messages": [{"role": "user", "content": list(known)}], **more}

    path = "/v1/chat/completions"
    probs = {"logprobs": True, "top_logprobs": 3}
    for name, url in urls.items():
        yield Probe(
            path,
            f"image, {name}",
            body=asked("Look: ", url, "what?", **probs),
            group="images",
            show=shown,
        )
    for what, parts in {
        "alone": (first,),
        "two": (first, other),
        "the same twice": (first, first),
        "lines": ("a", "b", first, "c", "d"),
        "base64 alone": ("a", {"type": "image_url", "image_url": {"url": texts["png"]}}),
        "file": ("a", "file://inside/a.png"),
        "marker in the text": (f"a{MARKER}b", first),
    }.items():
        yield from _both(
            path, f"image, {what}", asked(*parts), ("content", "prompt_tokens"), "images"
        )
    call = {"id": "c", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [_part("here"), _part(first)]}
    turn = {
        **chat,
        "messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}, result],
    }
    yield Probe(
        path,
        "image, result of a tool",
        body=turn,
        group="images",
        show=("content", "prompt_tokens"),
    )
    webp = base64.b64encode(image_bytes(200, 150, "webp", seed=1)).decode()
    wrong: dict[str, Any] = {
        "junk": "data:image/png;base64,aGVsbG8=",
        "WebP": f"data:image/webp;base64,{webp}",
        "cut off": first[:2000],
        "not base64": "data:image/png,xx",
        "no base64": "data:image/png;base64,!!",
        "empty": "",
        "missing file": "file://none.png",
        "file outside": "file://../m.gguf",
        "no object": None,
    }
    for what, url in wrong.items():
        yield Probe(
            path,
            f"image, {what}",
            body=asked("a", {"type": "image_url", "image_url": {"url": url}}),
            group="images",
        )
    for what, part in {
        "audio": {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}},
        "unknown part": {"type": "wizard"},
        "no url": {"type": "image_url"},
        "url as a string": {"type": "image_url", "image_url": first},
    }.items():
        yield Probe(path, f"image, {what}", body=asked("a", part), group="images")
    source = {"type": "base64", "media_type": "image/png", "data": texts["png"]}
    block = {"type": "image", "source": source}
    text = {"type": "text", "text": "see"}
    messages = {
        "model": "tiny",
        "max_tokens": 6,
        "temperature": 0,
        "chat_template_kwargs": chat["chat_template_kwargs"],
    }
    used = [{"type": "tool_use", "id": "c", "name": "shot", "input": {}}]
    for what, content in {"image": [text, block], "image first": [block, text]}.items():
        body = {**messages, "messages": [{"role": "user", "content": content}]}
        yield from _both("/v1/messages", what, body, ("text",), "images")
        yield Probe("/v1/messages/count_tokens", what, body=body, group="images", show=("*",))
    results = [{"type": "tool_result", "tool_use_id": "c", "content": [text, block]}]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": used},
        {"role": "user", "content": results},
    ]
    body = {**messages, "messages": turns}
    yield Probe(
        "/v1/messages", "image, result of a tool", body=body, group="images", show=("text",)
    )
    given = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": first},
            ],
        }
    ]
    responses = {"model": "tiny", "input": given, "max_output_tokens": 6, "temperature": 0}
    yield from _both("/v1/responses", "image", responses, ("text", "input_tokens"), "images")
    yield Probe("/v1/responses/input_tokens", "image", body=responses, group="images", show=("*",))
    output = [{"type": "input_text", "text": "here"}, {"type": "input_image", "image_url": first}]
    called = {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"}
    given = [*HI, called, {"type": "function_call_output", "call_id": "c", "output": output}]
    body = {**responses, "input": given}
    yield Probe(
        "/v1/responses",
        "image, result of a tool",
        body=body,
        group="images",
        show=("text", "input_tokens"),
    )
    raw = {"n_predict": 6, "temperature": 0, "n_probs": 3}
    for what, prompt in {
        "image": {"prompt_string": f"Look {MARKER} so", "multimodal_data": [texts["png"]]},
        "two images": {
            "prompt_string": f"{MARKER}and{MARKER}",
            "multimodal_data": [texts["png"], texts["wide"]],
        },
        "too few markers": {"prompt_string": "Look", "multimodal_data": [texts["png"]]},
        "too many markers": {
            "prompt_string": f"{MARKER}{MARKER}",
            "multimodal_data": [texts["png"]],
        },
        "broken image": {"prompt_string": MARKER, "multimodal_data": ["aGVsbG8="]},
        "one without a list": {"prompt_string": MARKER, "multimodal_data": texts["png"]},
        "a list of prompts": [
            {"prompt_string": f"a{MARKER}", "multimodal_data": [texts["png"]]},
            "b",
        ],
    }.items():
        shown = ("content", "tokens_evaluated", "token")
        yield Probe(
            "/completion",
            f"multimodal_data, {what}",
            body={**raw, "prompt": prompt},
            group="images",
            show=shown,
        )
    yield Probe(
        "/apply-template", "image", body=asked("a", first, "b"), group="images", show=("*",)
    )
    yield Probe(
        "/v1/chat/completions/input_tokens",
        "image",
        body=asked("a", first),
        group="images",
        show=("*",),
    )
    for path in ("/props", "/v1/models"):
        yield Probe(path, "with images", "GET", group="images", show=("*",))


def _part(part: str) -> dict[str, Any]:
    """Return a part of a message: an image if it is an address, else text."""
    if part.startswith(("data:", "file:")):
        return {"type": "image_url", "image_url": {"url": part}}
    return {"type": "text", "text": part}


def _fields(
    endpoint: str,
    base: dict[str, Any],
    fields: dict[str, tuple[Any, ...]],
    *,
    stream: bool = True,
    show: tuple[str, ...] = (),
) -> Iterator[Probe]:
    """Yield the plain request, broken bodies, and each value of each field; the plain one and valid
    values streamed too.
    """
    yield Probe(endpoint, "plain", body=base, show=show)
    if stream:
        yield Probe(endpoint, "plain, streamed", body={**base, "stream": True}, show=show)
    for what, raw in (
        ("not JSON", b"{"),
        ("empty body", b""),
        ("a list", b"[]"),
        ("no fields", b"{}"),
    ):
        yield Probe(endpoint, what, body=raw)
    for name, values in fields.items():
        for i, value in enumerate(values):
            text = repr(value) if len(repr(value)) < 70 else f"{type(value).__name__} number {i}"
            yield Probe(endpoint, f"{name}={text}", body={**base, name: value}, show=show)
            if stream and i == 0 and name != "stream":
                yield Probe(
                    endpoint,
                    f"{name}={text}, streamed",
                    body={**base, name: value, "stream": True},
                    show=show,
                )


def _both(
    endpoint: str, what: str, body: dict[str, Any], show: tuple[str, ...] = (), group: str = "main"
) -> Iterator[Probe]:
    yield Probe(endpoint, what, body=body, show=show, group=group)
    yield Probe(
        endpoint, f"{what}, streamed", body={**body, "stream": True}, show=show, group=group
    )


def _chat(chat: dict[str, Any]) -> Iterator[Probe]:
    """Yield chat completions with tools, reasoning, probabilities, stop words and schemas."""
    path = "/v1/chat/completions"
    long = {**chat, "max_tokens": 200}
    tools = {
        **long,
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
        "logit_bias": CALLING,
    }
    yield from _both(
        path,
        "tools, tool_choice=required",
        {**tools, "tool_choice": "required", "parallel_tool_calls": False},
        ("name",),
    )
    yield from _both(
        path,
        "tools, required, parallel",
        {**tools, "tool_choice": "required", "parallel_tool_calls": True},
    )
    yield from _both(path, "tools, auto", {**tools, "parallel_tool_calls": False}, ("name",))
    yield from _both(path, "tools, auto, as many calls as the template can write", tools, ("name",))
    yield from _both(
        path, "tools, tool_choice=none", {**tools, "tool_choice": "none", "max_tokens": 4}
    )
    yield from _both(path, "tools and grammar", {**tools, "grammar": 'root ::= "a"'})
    yield from _both(
        path,
        "tools and response_format",
        {**tools, "response_format": {"type": "json_object", "schema": SCHEMA}},
    )
    yield from _both(path, "tool result", {**chat, "messages": TOOL_TURN, "tools": [TOOL]})
    text = ("content", "reasoning_content")
    yield from _both(path, "reasoning", {**long, "grammar": REASONING}, text)
    for name in ("none", "auto", "deepseek", "deepseek-legacy"):
        yield from _both(
            path,
            f"reasoning, reasoning_format={name}",
            {**long, "grammar": REASONING, "reasoning_format": name},
            text,
        )
    yield from _going_on(path, long, text)
    yield from _both(path, "logprobs", {**chat, "logprobs": True, "top_logprobs": 2})
    yield from _both(path, "usage", {**chat, "stream_options": {"include_usage": True}})
    yield from _both(path, "n=2", {**chat, "n": 2})
    yield from _both(
        path, "stop word", {**long, "grammar": 'root ::= "</think>ab!cd"', "stop": ["!"]}, text
    )
    yield from _both(
        path,
        "json_schema with thinking off",
        {
            **long,
            "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            },
        },
        text,
    )
    yield Probe(
        f"{path}/control",
        "unknown id",
        body={"id": "chatcmpl-x", "action": "reasoning_end"},
        show=("*",),
    )
    yield Probe(
        f"{path}/control", "unknown action", body={"id": "chatcmpl-x", "action": "x"}, show=("*",)
    )
    yield Probe(f"{path}/control", "no id", body={})


def _going_on(path: str, long: dict[str, Any], text: tuple[str, ...]) -> Iterator[Probe]:
    """Replies that have begun in the prompt, and blanks before those that have not."""
    said = {"role": "assistant", "content": "Well, "}
    thought = {"role": "assistant", "content": "", "reasoning_content": "I think"}
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    hello = {"grammar": 'root ::= "hello"'}
    so = {"grammar": 'root ::= " so.</think>hello"'}
    for what, last, fields in (
        ("prefilled", said, hello),
        ("prefilled reasoning", thought, so),
        ("prefilled reasoning and content", {**thought, **said}, hello),
        (
            "prefilled, reasoning_format=none",
            {**thought, **said},
            {**hello, "reasoning_format": "none"},
        ),
        ("continued", said, {**hello, **explicit}),
        ("continued reasoning", thought, {**so, **explicit}),
        ("continued, with echo", said, {**hello, **explicit, "echo": True}),
    ):
        yield from _both(path, what, {**long, "messages": [*HI, last], **fields}, text)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    yield from _both(
        path, "blanks first", {**long, **off, "grammar": 'root ::= "\\n\\n hello "'}, text
    )


def _tools_anthropic(messages: dict[str, Any]) -> Iterator[Probe]:
    """Yield requests of the Messages API with tools, thinking and stop sequences."""
    tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    body = {
        **messages,
        "max_tokens": 200,
        "tools": [tool],
        "tool_choice": {"type": "any"},
        "logit_bias": CALLING,
    }
    body["chat_template_kwargs"] = {"enable_thinking": False}
    yield from _both("/v1/messages", "tools, any", body, ("name", "input", "partial_json"))
    yield from _both(
        "/v1/messages",
        "thinking",
        {**messages, "max_tokens": 200, "grammar": REASONING},
        ("text", "thinking"),
    )
    yield Probe(
        "/v1/messages",
        "stop sequence",
        body={**messages, "stop_sequences": ["e", "a", "o"], "max_tokens": 60},
    )


def _tools_responses(responses: dict[str, Any]) -> Iterator[Probe]:
    tool = {"type": "function", **TOOL["function"]}
    body = {**responses, "max_output_tokens": 200, "tools": [tool], "tool_choice": "required"}
    body |= {
        "chat_template_kwargs": {"enable_thinking": False},
        "logit_bias": CALLING,
        "parallel_tool_calls": False,
    }
    yield from _both("/v1/responses", "tools, required", body, ("name",))
    yield from _both(
        "/v1/responses",
        "reasoning text",
        {**responses, "max_output_tokens": 200, "grammar": REASONING},
        ("text",),
    )


def _facts() -> Iterator[Probe]:
    """Yield requests about the server and its models, with wrong methods, and from pages."""
    for path in ("/health", "/v1/health"):
        yield Probe(path, "", "GET", show=("*",))
    for path in ("/models", "/v1/models"):
        yield Probe(path, "", "GET", show=("*",))
    yield Probe("/v1/models/tiny", "one model", "GET")
    yield Probe("/v1/models/other", "an unknown model", "GET", show=("*",))
    yield Probe("/props", "", "GET", show=("*",))
    yield Probe("/props", "set, without --props", body={}, show=("*",))
    yield Probe("/metrics", "", "GET", show=("*",))
    yield Probe("/metrics", "without --metrics", "GET", group="plain", show=("*",))
    yield Probe("/slots", "", "GET", show=("is_processing", "n_ctx", "speculative"))
    yield Probe("/slots", "fail_on_no_slot", "GET", path="/slots?fail_on_no_slot=1")
    yield Probe("/slots", "with --no-slots", "GET", group="plain", show=("*",))
    yield Probe("/lora-adapters", "", "GET", show=("*",))
    yield Probe("/lora-adapters", "set none", body=[], show=("*",))
    yield Probe("/lora-adapters", "set unknown", body=[{"id": 3, "scale": 1.0}])
    yield Probe("/lora-adapters", "wrong type", body={})
    yield Probe("/", "the page", "GET")
    yield Probe("/nowhere", "", "GET", show=("*",))
    yield Probe("/nowhere", "POST", body={})
    for method, path in (
        ("GET", "/completion"),
        ("POST", "/health"),
        ("PUT", "/props"),
        ("DELETE", "/v1/models"),
    ):
        yield Probe(path, f"wrong method {method}", method, show=("*",))
    yield Probe("/health", "HEAD", "HEAD")
    origin = {"Origin": "http://page.example"}
    preflight = {
        **origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,x-a",
    }
    yield Probe("/v1/chat/completions", "CORS preflight", "OPTIONS", headers=preflight)
    yield Probe("/v1/chat/completions", "OPTIONS without asking", "OPTIONS", headers=origin)
    yield Probe("/nowhere", "OPTIONS", "OPTIONS", headers=origin)
    yield Probe("/health", "with an Origin", "GET", headers=origin)
    yield Probe("/v1/chat/completions", "error with an Origin", body={}, headers=origin)


def _text() -> Iterator[Probe]:
    """Yield requests that tokenize, detokenize and render."""
    everything = ("*",)
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("text", {"content": "Hello Äpfel 🍏"}),
        ("add_special", {"content": "Hello", "add_special": True}),
        ("parse_special", {"content": "<|im_start|>a", "parse_special": True}),
        ("parse_special off", {"content": "<|im_start|>a", "parse_special": False}),
        ("with_pieces", {"content": "aé🍏", "with_pieces": True}),
        ("mixed", {"content": [40, "ab", 41]}),
        ("empty", {"content": ""}),
        ("number", {"content": 7}),
        ("null", {"content": None}),
        ("nothing", {}),
        ("wrong add_special", {"content": "a", "add_special": "x"}),
    )
    for what, body in bodies:
        yield Probe("/tokenize", what, body=body, show=everything)
    bodies = (
        ("tokens", {"tokens": [40, 41]}),
        ("none", {"tokens": []}),
        ("nothing", {}),
        ("no list", {"tokens": "x"}),
        ("no numbers", {"tokens": ["x"]}),
        ("half a character", {"tokens": [128]}),
        ("fraction", {"tokens": [1.5]}),
        ("null", {"tokens": None}),
    )
    for what, body in bodies:
        yield Probe("/detokenize", what, body=body, show=everything)
    for name, value in (
        ("tools", [TOOL]),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("add_generation_prompt", False),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "low"),
        ("grammar", 'root ::= "a"'),
    ):
        yield Probe("/apply-template", name, body={"messages": HI, name: value}, show=everything)
    for i, value in enumerate(CHAT["messages"]):
        text = repr(value) if len(repr(value)) < 70 else f"list number {i}"
        yield Probe(
            "/apply-template", f"messages={text}", body={"messages": value}, show=everything
        )
    yield Probe("/apply-template", "no messages", body={})


def _slots() -> Iterator[Probe]:
    """Yield requests that save, restore and erase a slot, valid and not."""
    fill = {"prompt": "abcabcabc", "n_predict": 2, "temperature": 0, "id_slot": 1}
    yield Probe("/slots/1", "fill it", path="/completion", body=fill, show=("id_slot",))
    for what, path, body in (
        ("save", "/slots/1?action=save", {"filename": "one.bin"}),
        ("restore", "/slots/0?action=restore", {"filename": "one.bin"}),
        ("erase", "/slots/1?action=erase", {}),
        ("save, no name", "/slots/1?action=save", {}),
        ("save, a path", "/slots/1?action=save", {"filename": "../one.bin"}),
        ("restore, no file", "/slots/0?action=restore", {"filename": "none.bin"}),
        ("unknown action", "/slots/0?action=wizard", {}),
        ("no action", "/slots/0", {}),
        ("unknown slot", "/slots/77?action=erase", {}),
        ("no number", "/slots/x?action=erase", {}),
    ):
        yield Probe(
            "/slots/1",
            what,
            path=path,
            body=body,
            show=("id_slot", "filename", "n_saved", "n_restored"),
        )
    yield Probe(
        "/slots/0",
        "without --slot-save-path",
        path="/slots/0?action=save",
        body={"filename": "a"},
        group="plain",
    )


def _refused() -> Iterator[Probe]:
    """Yield features that this model or build lacks."""
    for path in ("/embedding", "/embeddings", "/v1/embeddings"):
        yield Probe(
            path, "not an embedding server", body={"input": "a", "content": "a"}, show=("*",)
        )
    for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"):
        yield Probe(path, "no reranker", body={"query": "a", "documents": ["b"]}, show=("*",))
    for path in ("/v1/audio/transcriptions", "/audio/transcriptions"):
        yield Probe(path, "no audio", body={})
    for path in ("/cors-proxy", "/tools"):
        yield Probe(path, "off", "GET", show=("*",))
        yield Probe(path, "off, POST", body={}, show=("*",))
    yield Probe("/v1/stream", "no id", "GET")
    yield Probe("/v1/stream", "no id", "DELETE")
    yield Probe("/v1/streams/lookup", "nothing", body={})
    yield Probe("/models/load", "no router", body={"model": "x"})
    yield Probe("/models/unload", "no router", body={"model": "x"})


def _embeddings() -> Iterator[Probe]:
    """Yield requests to a server of embeddings, and others that it refuses."""
    for path in ("/v1/embeddings", "/embeddings", "/embedding"):
        for what, body in (
            ("input", {"input": "hello"}),
            ("content", {"content": "hello"}),
            ("list", {"input": ["hello", "world"]}),
            ("tokens", {"input": [40, 41]}),
            ("lists of tokens", {"input": [[40], [41]]}),
            ("base64", {"input": "hello", "encoding_format": "base64"}),
            ("wrong encoding_format", {"input": "hello", "encoding_format": "x"}),
            ("embd_normalize", {"input": "hello", "embd_normalize": -1}),
            ("dimensions", {"input": "hello", "dimensions": 8}),
            ("empty", {"input": ""}),
            ("none", {"input": []}),
            ("nothing", {}),
            ("number", {"input": 7}),
            ("too long", {"input": "x" * 20000}),
        ):
            yield Probe(path, what, body=body, group="embeddings", show=("object", "model"))
    yield Probe(
        "/completion",
        "on an embedding server",
        body={"prompt": "a", "n_predict": 1},
        group="embeddings",
    )
    yield Probe(
        "/v1/chat/completions",
        "on an embedding server",
        body={"messages": HI, "max_tokens": 1},
        group="embeddings",
    )
    yield Probe(
        "/rerank",
        "on an embedding server",
        body={"query": "a", "documents": ["b"]},
        group="embeddings",
    )


def _keys() -> Iterator[Probe]:
    """Yield requests with and without a key, to paths with and without a prefix."""
    cases: tuple[tuple[str, dict[str, str]], ...] = (
        ("no key", {}),
        ("wrong key", {"Authorization": "Bearer wrong"}),
        ("right key", {"Authorization": f"Bearer {KEY}"}),
        ("right key without Bearer", {"Authorization": KEY}),
        ("x-api-key", {"X-Api-Key": KEY}),
        ("both, the first wrong", {"Authorization": "Bearer wrong", "X-Api-Key": KEY}),
    )
    for path in ("/health", "/v1/models", "/models", "/props", "/nowhere", "/"):
        for what, headers in cases:
            yield Probe(path, what, "GET", headers=headers, group="key", show=("error",))
    for what, headers in cases:
        yield Probe("/tokenize", what, body={"content": "a"}, headers=headers, group="key")
    origin = {"Origin": "http://a.example"}
    yield Probe("/props", "CORS preflight without key", "OPTIONS", headers=origin, group="key")
    for path in ("/pre/health", "/pre/props", "/health", "/props"):
        yield Probe(path, "with --api-prefix /pre", "GET", group="prefix")
