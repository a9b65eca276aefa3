"""Anthropic's SDK continues conversations that the server keeps, and sends everything where none
does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import anthropic
import pytest

from tests.process.conftest import Server
from tests.process.reduced_server import without_threads

pytest.importorskip("anthropic.lib.threads", reason="this version of the SDK has no threads")

SYSTEM = "You answer at length. " * 12
KEY = "secret"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "-c", "32768", "--alias", "tiny", "--api-key", KEY, is_f32=True)


@dataclass
class Recorder:
    """A client whose bodies are recorded."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def client(self) -> anthropic.Anthropic:
        def record(request: Any) -> None:
            self.bodies.append(json.loads(request.content))

        http_client = anthropic.DefaultHttpxClient(event_hooks={"request": [record]})
        return anthropic.Anthropic(
            base_url=self.url, api_key=KEY, max_retries=0, http_client=http_client
        )

    def roles(self) -> list[list[str]]:
        return [[message["role"] for message in body["messages"]] for body in self.bodies]

    def thread_types(self) -> list[str]:
        return [body.get("thread", {}).get("type", "") for body in self.bodies]


@pytest.fixture
def recorder(server: Server) -> Recorder:
    return Recorder(server.url)


@pytest.fixture
def client(recorder: Recorder) -> Iterator[anthropic.Anthropic]:
    with recorder.client() as client:
        yield client


@pytest.fixture
def refusing(server: Server) -> Iterator[str]:
    """Yield the address of a server that refuses threads and passes all other requests on."""
    with without_threads(server.url) as url:
        yield url


@anthropic.beta_tool
def look(at: Literal["door"]) -> str:
    """Look at a thing."""
    return f"{at} is red"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def thread_on(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.beta.messages.thread(
        model="tiny", max_tokens=12, system=SYSTEM, extra_body=GREEDY, **fields
    )


def run_tools(client: anthropic.Anthropic, **fields: Any) -> list[Any]:
    """Return the replies of a run that calls a tool once."""
    runner = client.beta.messages.tool_runner(
        model="tiny",
        max_tokens=256,
        system=SYSTEM,
        messages=[user("What colour is the door?")],
        tools=[look],
        tool_choice={"type": "tool", "name": "look"},
        max_iterations=2,
        extra_body=GREEDY,
        **fields,
    )
    return list(runner)


def texts(replies: list[Any]) -> list[Any]:
    return [
        (block.type, getattr(block, "text", None), getattr(block, "input", None))
        for reply in replies
        for block in reply.content
    ]


def test_the_tool_runner_sends_each_message_once(
    client: anthropic.Anthropic, recorder: Recorder
) -> None:
    replies = run_tools(client)
    assert recorder.thread_types() == ["create", "continue"]
    assert recorder.roles() == [["user"], ["user"]]
    assert "system" not in recorder.bodies[1]
    assert "tools" not in recorder.bodies[1]
    assert replies[0].stop_reason == "tool_use"
    assert replies[1].usage.cache_read_input_tokens > 0
    assert texts(replies) == texts(run_tools(client, thread=False))


def test_a_thread_answers_as_if_everything_was_sent(
    client: anthropic.Anthropic, recorder: Recorder
) -> None:
    """Three turns, one of them a stream; the last has the reply to the whole conversation."""
    thread = thread_on(client)
    replies = [thread.send(user("Tell me more"))]
    with thread.stream(user("And then?")) as stream:
        stream.until_done()
        replies.append(stream.get_final_message())
    replies.append(thread.send(user("Why?")))
    assert recorder.thread_types() == ["create", "continue", "continue"]
    assert recorder.roles() == [["user"]] * 3
    assert thread.previous_message_id == replies[-1].id
    whole = client.beta.messages.create(
        model="tiny",
        max_tokens=12,
        system=SYSTEM,
        messages=list(thread.messages)[:-1],
        extra_body=GREEDY,
    )
    assert texts([whole]) == texts(replies[-1:])
    assert whole.usage.cache_read_input_tokens > 0


def test_a_lost_thread_is_sent_again_and_goes_on(
    client: anthropic.Anthropic, recorder: Recorder
) -> None:
    """The SDK starts a new thread with all messages, also where its caller did not allow it to go
    on without one. Here another request has continued the thread, and took its place.
    """
    thread = thread_on(client)
    thread.send(user("Tell me more"))
    client.beta.messages.create(
        model="tiny",
        max_tokens=1,
        messages=[user("Aside")],
        thread={"type": "continue", "previous_message_id": thread.previous_message_id},
    )
    thread.send(user("And then?"))
    thread.send(user("Why?"))
    assert recorder.thread_types() == ["create", "continue", "continue", "create", "continue"]
    assert recorder.roles()[-2:] == [["user", "assistant", "user"], ["user"]]


def test_an_unknown_thread_has_the_sdks_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.beta.messages.create(
            model="tiny",
            max_tokens=1,
            messages=[user("Hi")],
            thread={"type": "continue", "previous_message_id": "msg_unknown"},
        )
    body: Any = raised.value.body
    assert body["error"]["details"] == {"error_code": "thread_not_found"}


def test_the_tool_runner_falls_back_where_threads_are_refused(
    refusing: str, client: anthropic.Anthropic
) -> None:
    recorder = Recorder(refusing)
    with recorder.client() as refused:
        replies = run_tools(refused)
    assert recorder.thread_types() == ["create", "", ""]
    assert recorder.roles()[1:] == [["user"], ["user", "assistant", "user"]]
    assert all(body["system"] == SYSTEM and body["tools"] for body in recorder.bodies)
    assert texts(replies) == texts(run_tools(client))


def test_a_thread_falls_back_where_threads_are_refused(refusing: str) -> None:
    recorder = Recorder(refusing)
    with recorder.client() as refused:
        thread = thread_on(refused, unsupported_request_behavior="continue_unthreaded")
        thread.send(user("Tell me more"))
        thread.send(user("And then?"))
    assert recorder.thread_types() == ["create", "", ""]
    assert recorder.roles()[1:] == [["user"], ["user", "assistant", "user"]]


def test_a_thread_that_is_refused_raises_by_default(refusing: str) -> None:
    """The SDK raises for a thread that cannot be kept, so a lost one has another code."""
    with Recorder(refusing).client() as refused, pytest.raises(anthropic.BadRequestError):
        thread_on(refused).send(user("Tell me more"))


def test_a_thread_is_filled_before_its_first_turn(client: anthropic.Anthropic) -> None:
    """``max_tokens`` 0 evaluates the prompt and answers nothing; the turn that follows resumes."""
    thread = thread_on(client)
    filled = thread.send(user("Fill the cache with these words."), max_tokens=0)
    assert filled.content == []
    assert filled.stop_reason == "max_tokens"
    assert filled.usage.output_tokens == 0
    reply = thread.send(user("Now answer"))
    assert reply.usage.cache_read_input_tokens > 0
    assert reply.usage.output_tokens > 0


def test_usage_adds_up_to_the_prompt(client: anthropic.Anthropic) -> None:
    messages = [user("Count me. " * 40)]
    first = client.beta.messages.create(
        model="tiny",
        max_tokens=1,
        system="You count what is written and what is read. " * 8,
        messages=messages,
        cache_control={"type": "ephemeral", "ttl": "1h"},
    )
    counted = client.beta.messages.count_tokens(
        model="tiny", system="You count what is written and what is read. " * 8, messages=messages
    )
    usage = first.usage
    assert usage.cache_creation_input_tokens > 0
    assert counted.input_tokens == (
        usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    )
