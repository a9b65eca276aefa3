"""The next turn made ready after a reply, on a real tiny model, through every API: what it costs
then, and its bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.plan import MIN_BATCH
from pyctl.cache.ram import RamCache
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.replay import Replay
from pyctl.chat.template import Template
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings, PrewarmDelays
from pyctl.engine.worker import Worker, WorkerTimes
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.requests.reply_settings import ReplySettings
from pyctl.server.app import create_app
from pyctl.server.app_state import AppState, HttpService
from pyctl.server.models import Models
from pyctl.server.server_settings import ServerSettings
from pyctl.terminal.conversation import ReplyDelta
from pyctl.terminal.local import LocalBackend
from tests.client import Client
from tests.functions import function
from tests.waiting import until

STRIPS = """\
{%- set last = namespace(question=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set last.question = messages.index(m) -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + ('user\\n<tool_response>' if m.role == 'tool' else m.role + '\\n') -}}
{%- if m.role == 'system' and tools -%}{{- tools | tojson -}}{%- endif -%}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.question -%}
{{- '<think>\\n' + m.reasoning_content | trim + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content | trim -}}
{%- for call in m.tool_calls or [] -%}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments.items() -%}
{{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n') -}}
{%- endif -%}
"""
"""A template like Qwen3.6's: the reasoning of turns before the last question is left out."""

SYSTEM = "You are an assistant. " * 6
QUESTIONS = [
    "Name three colours, and say which one you like the most.",
    "And which one is the warmest of all these?",
]
PARIS = "Paris, the capital of France, on the river Seine"
TOOL = function("look_up", required=["city"], city={"type": "string", "enum": [PARIS]})


class Served:
    """A server in this process, on a model of random weights that speaks bytes."""

    def __init__(
        self,
        path: Path,
        *,
        exact: bool = False,
        n_seqs: int = 1,
        ram: int | None = None,
        **settings: Any,
    ):
        """Load the model and build the application on it."""
        model = ModelSettings(path=str(path), n_ctx=8192, n_ubatch=128, n_threads=1, n_seqs=n_seqs)
        loaded = load(model)
        engine_settings = EngineSettings(exact=exact, prewarm=PrewarmDelays(quiet=0.0))
        engine = Engine(loaded.backend, RamCache(64, ram), engine_settings)
        # Nothing moves from the device for want of work.
        self.worker = Worker(engine, loaded.info, times=WorkerTimes(copy=3600.0))
        chat = ChatFormat(
            Template(STRIPS, eos_token="<|im_end|>"), loaded.tokenizer, replay=Replay()
        )
        shared = AppState(ServerSettings(show_metrics=True))
        admin = EngineAdmin(self.worker, engine)
        replies = ReplySettings(**settings)
        self.service = HttpService(self.worker, chat, replies, shared, admin=admin)
        self.client = Client.to_app(create_app(Models.from_service(self.service)))

    def post(self, path: str, body: Any) -> Any:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        self.cached, self.evaluated = (
            int(part.partition("=")[2])
            for part in response.headers.get("x-pyctl-cache", "s=; c=0; e=0").split(";")[1:]
        )
        return response.json()

    def totals(self) -> Any:
        return self.client.get("/cache").json()["totals"]

    def settle(self, n: int) -> None:
        """Wait until so many prompts were made ready."""
        until(lambda: self.totals()["prewarms"] >= n)


@pytest.fixture
def serve(model_path: Callable[[str], Path]) -> Iterator[Callable[..., Served]]:
    served: list[Served] = []

    def make(name: str = "tiny-hybrid", **settings: Any) -> Served:
        served.append(Served(model_path(name), **settings))
        return served[-1]

    yield make
    for each in served:
        assert each.worker.close()


THINKS = {"max_tokens": 200, "reasoning_budget_tokens": 100, "temperature": 0, "ignore_eos": True}


def chat(server: Served, *turns: Any, **fields: Any) -> Any:
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in turns:
        messages.append(turn if isinstance(turn, dict) else {"role": "user", "content": turn})
    return server.post("/v1/chat/completions", {"messages": messages, **THINKS, **fields})


def openai(server: Served, question: str, before: Any) -> Any:
    """Hold one turn. Return the messages that the client sends with the next turn, after those in
    ``before``.
    """
    before = before or []
    body = chat(server, *before, question)
    said = body["choices"][0]["message"]
    assert said.pop("reasoning_content")
    assert said["content"]
    return [*before, {"role": "user", "content": question}, said]


def anthropic(server: Served, question: str, before: Any) -> Any:
    messages = [*(before or []), {"role": "user", "content": question}]
    body = server.post(
        "/v1/messages",
        {
            **THINKS,
            "messages": messages,
            "system": SYSTEM,
            "thinking": {"type": "enabled", "budget_tokens": 100},
        },
    )
    kinds = [block["type"] for block in body["content"]]
    assert kinds == ["thinking", "text"]
    return [*messages, {"role": "assistant", "content": body["content"][1:]}]


def responses(server: Served, question: str, before: Any) -> Any:
    items = [*(before or []), {"role": "user", "content": question}]
    limits = {**THINKS, "max_output_tokens": 200}
    body = server.post(
        "/v1/responses", {**limits, "input": items, "instructions": SYSTEM, "store": False}
    )
    kinds = [item["type"] for item in body["output"]]
    assert kinds == ["reasoning", "message"]
    return [*items, body["output"][1]]


def streamed(server: Served, question: str, before: Any) -> Any:
    """Hold one turn in a stream. Return the messages of the next one, without the reasoning."""
    messages = [
        *(before or [{"role": "system", "content": SYSTEM}]),
        {"role": "user", "content": question},
    ]
    response = server.client.post(
        "/v1/chat/completions", json={"messages": messages, **THINKS, "stream": True}
    )
    import json

    frames = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(frame) for frame in frames]
    content = "".join(
        chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]
    )
    server.cached, server.evaluated = (
        chunks[-1]["timings"][name] for name in ("cache_n", "prompt_n")
    )
    return [*messages, {"role": "assistant", "content": content}]


APIS = [openai, anthropic, responses, streamed]


@pytest.mark.parametrize("api", APIS)
def test_turn_two_evaluates_only_the_new_message(api: Any, serve: Callable[..., Served]) -> None:
    evaluated = {}
    for warms in (True, False):
        server = serve(warm_next=warms)
        before = api(server, QUESTIONS[0], None)
        if warms:
            server.settle(1)
        api(server, QUESTIONS[1], before)
        evaluated[warms] = server.evaluated
    # A message of 44 letters with its header, and the header of the reply; without, also the reply
    # before it.
    assert evaluated[True] <= len(QUESTIONS[1]) + 40
    assert evaluated[False] >= evaluated[True] + 90


def test_the_terminals_chat_likewise(serve: Callable[..., Served]) -> None:
    """The chat at the terminal has the next turn made ready as the APIs do, and evaluates its new
    message only.
    """
    from dataclasses import replace

    evaluated = {}
    for warms in (True, False):
        server = serve(warm_next=warms)
        sampling = replace(server.service.settings.sampling, temperature=0.0, ignore_eos=True)
        settings = replace(
            server.service.settings, sampling=sampling, n_predict=200, reasoning_budget=100
        )
        backend = LocalBackend(replace(server.service, settings=settings))
        messages = [{"role": "system", "content": SYSTEM}]
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            *deltas, stats = backend.stream(messages)
            messages.append(
                {
                    "role": "assistant",
                    "content": "".join(
                        each.content for each in deltas if isinstance(each, ReplyDelta)
                    ),
                }
            )
            if warms:
                server.settle(len(messages) // 2)
        evaluated[warms] = stats.n_evaluated
    assert evaluated[True] <= len(QUESTIONS[1]) + 40
    assert evaluated[False] >= evaluated[True] + 90


def test_a_tools_result_follows_a_call(serve: Callable[..., Served]) -> None:
    """Within one chain of calls the reasoning stays, so the next turn goes on from the reply, and
    is exact.
    """
    results = []
    for exact in (False, True):
        server = serve(exact=exact)
        tools = {
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 400,
        }
        tools |= {"ignore_eos": False, "logprobs": True, "top_logprobs": 3}
        said = chat(server, QUESTIONS[0], **tools)["choices"][0]["message"]
        assert said["tool_calls"][0]["function"]["name"] == "look_up"
        del said["reasoning_content"]
        if not exact:
            server.settle(1)
        result = {
            "role": "tool",
            "tool_call_id": said["tool_calls"][0]["id"],
            "content": "It is a sunny day there.",
        }
        body = chat(server, QUESTIONS[0], said, result, **tools)
        results.append(body["choices"][0]["logprobs"])
        if not exact:
            assert server.evaluated <= 80
            assert body["timings"]["warmed_n"] >= 60
            assert (
                body["usage"]["prompt_tokens_details"]["warmed_tokens"]
                == body["timings"]["warmed_n"]
            )
            text = server.client.get("/metrics").text
            assert f"pyctl_prewarmed_tokens_used_total {body['timings']['warmed_n']}\n" in text
    assert results[0] == results[1], "to the bit"


def test_a_conversation_that_keeps_its_reasoning_is_known_by_it(
    serve: Callable[..., Served],
) -> None:
    server = serve()
    turns: list[Any] = []
    for question in (*QUESTIONS, "Why is that so, do you think?"):
        turns.append(question)
        turns.append(chat(server, *turns)["choices"][0]["message"])
        server.settle(len(turns) // 2)
    # The first reply might have come back without its reasoning; of the second it is known that it
    # will not, so that nothing of it is evaluated again.
    body = chat(server, *turns, "Thank you.")
    assert server.evaluated <= len("Thank you.") + 40
    assert 0 < body["timings"]["warmed_n"] < 10


def test_no_prewarm_for_raw_prompts_uncached_or_several_choices(
    serve: Callable[..., Served],
) -> None:
    server = serve()
    for path in ("/completion", "/v1/completions"):
        server.post(path, {"prompt": SYSTEM, **THINKS})
    chat(server, QUESTIONS[0], cache_prompt=False)
    chat(server, QUESTIONS[0], n=2)
    off = serve(ram=0)
    chat(off, QUESTIONS[0])
    for each in (server, off):
        rendered = threading.Event()
        each.service.post_reply.add(rendered.set)
        assert rendered.wait(60)
        time.sleep(0.05)
        assert each.totals()["prewarmed"] == 0


def test_a_head_is_made_ready_before_it_is_needed(serve: Callable[..., Served]) -> None:
    """A warm-up leaves a head from which the first request evaluates its question only; a second
    warm-up evaluates nothing, and none counts as a request.
    """
    server = serve(warm_next=False)
    head = {"messages": [{"role": "system", "content": SYSTEM * 10}], "tools": [TOOL]}
    body = server.post("/cache/prewarm", head)
    assert body["cached"] == 0
    assert body["ready"] == body["evaluated"] > 1000
    assert server.post("/cache/warm", head) == {
        "ready": body["ready"],
        "cached": body["ready"],
        "evaluated": 0,
    }
    asked = {
        **head,
        "messages": [*head["messages"], {"role": "user", "content": QUESTIONS[0]}],
        "max_tokens": 1,
    }
    server.post("/v1/chat/completions", asked)
    assert server.cached == body["ready"]
    assert server.evaluated <= len(QUESTIONS[0]) + 40 + MIN_BATCH
    assert server.post("/cache/warm", asked)["evaluated"] == 0, (
        "a whole prompt, up to the header of its reply"
    )
    assert server.totals()["requests"] == 1


def test_what_cannot_be_made_ready(serve: Callable[..., Served]) -> None:
    server = serve()
    for body in ({"messages": "x"}, {"messages": [{"role": "user"}]}, {"messages": [], "tools": 5}):
        assert server.client.post("/cache/warm", json=body).status_code == 400
    long = {"messages": [{"role": "user", "content": "x" * 9000}]}
    assert server.client.post("/cache/warm", json=long).status_code == 400
    assert server.client.get("/cache/warm").status_code == 404
