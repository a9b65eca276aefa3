"""Conversations that grow, asked by all APIs; each greedy reply is compared with the judge's."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.common import words
from bench.soak.findings import Findings
from bench.soak.judge import Judge
from bench.soak.target import Target
from tools.needles import Fact, filler, new_fact

Message = dict[str, Any]

CHARS_PER_TOKEN = 3.0
WAYS = (
    "chat",
    "chat",
    "chat stream",
    "chat stream",
    "n",
    "completion",
    "messages",
    "messages stream",
    "responses",
    "responses stream",
    "schema",
    "sampled",
)
PATHS = {"messages": "/v1/messages", "responses": "/v1/responses", "completion": "/completion"}
CHAT = "/v1/chat/completions"
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["name", "code", "place"]},
    },
    "required": ["word", "kind"],
    "additionalProperties": False,
}


def _tool(name: str, description: str, parameter: str) -> Message:
    properties = {parameter: {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [parameter]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


TOOLS = {
    "get_weather": (
        _tool("get_weather", "The weather of a town.", "city"),
        "What is the weather in Oslo?",
    ),
    "look_up": (
        _tool("look_up", "The phone number of a person.", "name"),
        "Look up the number of Vera.",
    ),
    "find_thing": (_tool("find_thing", "Where a thing lies.", "thing"), "Find the old map."),
}
"""Definitions by name, and a question for each."""


class LostError(Exception):
    """The request has no answer, because the server was ended or refused it with a time to try
    again.
    """


@dataclass
class Talk:
    """A conversation, and its next messages."""

    seed: int
    max_tokens: int
    tools: bool = False
    pictures: Sequence[str] = ()
    """Addresses of images that the user's messages may have."""
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._facts: list[Fact] = []
        self.names = self.random.sample(sorted(TOOLS), 2)
        head = f"You are a helpful assistant. {words(self.seed, self._head())}".strip()
        self.messages = [{"role": "system", "content": head}]

    def _head(self) -> int:
        """Return the number of characters of filler in the system message, so that some
        conversations are long at once.
        """
        return int(self.random.choice((0.0, 0.1, 0.4, 0.7)) * self.max_tokens * CHARS_PER_TOKEN)

    @property
    def full(self) -> bool:
        """True if another turn could exceed the limit of its length."""
        n_chars = sum(
            len(json.dumps(message))
            for message in self.messages
            if isinstance(message["content"], str)
        )
        return n_chars > self.max_tokens * CHARS_PER_TOKEN

    def ask(self) -> None:
        """Add the user's next message."""
        if self.tools and self.random.random() < 0.7:
            text = TOOLS[self.random.choice(self.names)][1]
        elif self._facts and self.random.random() < 0.3:
            text = self.random.choice(self._facts).asked(self.random)
        elif self.random.random() < 0.4:
            self._facts.append(new_fact(self.random))
            text = self._facts[-1].told(self.random)
        else:
            text = filler(self.random)[0]
        content: Any = text
        if self.pictures and self.random.random() < 0.3:
            url = {"url": self.random.choice(self.pictures)}
            content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})

    def back(self) -> None:
        """Forget the last turns, as a user does who edits an earlier message."""
        users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if len(users) > 2:
            del self.messages[self.random.choice(users[1:]) :]

    def answer(self, content: str, calls: list[dict[str, Any]]) -> None:
        """Add the reply, and the results of its calls."""
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)
        for call in calls:
            result = json.dumps({"result": words((self.seed, len(self.messages)), 30)})
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


class Talker:
    """A client thread: holds several conversations in turn and checks the replies."""

    def __init__(
        self, target: Target, judge: Judge, findings: Findings, seed: int, max_tokens: int
    ) -> None:
        self.target = target
        self.judge = judge
        self.findings = findings
        self.random = random.Random(seed)
        self.max_tokens = max_tokens
        self.talks: list[Talk] = []
        self.named: dict[str, str] = {}
        """The key "model" of requests where a server has several."""
        self.pictures: Sequence[str] = ()
        self.latest: list[Message] = []
        """Some conversation that was asked lately: vanishing clients request it as well."""

    def run(self) -> None:
        """Hold conversations until the soak is over."""
        with httpx.Client(timeout=240) as client:
            while life := self.target.ready():
                talk = self._next()
                way = (
                    "tools"
                    if talk.tools and self.random.random() < 0.6
                    else self.random.choice(WAYS)
                )
                try:
                    self._turn(client, life, talk, way)
                except LostError:
                    talk.messages.pop()
                    time.sleep(0.3)

    def _next(self) -> Talk:
        self.talks = [talk for talk in self.talks if not talk.full]
        if len(self.talks) < 2:
            seed = self.random.randrange(2**32)
            tools = self.random.random() < 0.3
            self.talks.append(Talk(seed, self.max_tokens, tools, self.pictures))
        talk = self.random.choice(self.talks)
        if self.random.random() < 0.1:
            talk.back()
        talk.ask()
        return talk

    def _turn(self, client: httpx.Client, life: int, talk: Talk, way: str) -> None:
        """Request a reply in the form of ``way``, compare it with the judge's, and append it to
        ``talk``. A sampled reply is not compared.
        """
        self.latest = list(talk.messages)
        n_predict = self.random.choice((8, 24, 48))
        body: dict[str, Any] = {
            "messages": list(talk.messages),
            "max_tokens": n_predict,
            "temperature": 0,
            **self.named,
            **NO_THINKING,
        }
        if way == "tools":
            forced = self.random.choice(talk.names)
            body["tools"] = [TOOLS[name][0] for name in talk.names]
            body["tool_choice"] = {"type": "function", "function": {"name": forced}}
            body["max_tokens"] = 96
        elif way == "schema":
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
            body["max_tokens"] = 96
        elif way == "sampled":
            body |= {"temperature": 1.0, "seed": self.random.randrange(2**31)}
        plain = all(
            isinstance(message["content"], str) and message["role"] != "tool"
            for message in talk.messages
        )
        plain = plain and not any(message.get("tool_calls") for message in talk.messages)
        if not plain and way.partition(" ")[0] in PATHS:
            way = "chat"
        replies = self._asked(client, life, way, body)
        self.findings.count("replies")
        if way != "sampled":
            for content, calls in replies:
                self._compare(way, body, content, calls, is_exact=self._is_exact(life))
        talk.answer(*replies[0])

    def _asked(
        self, client: httpx.Client, life: int, way: str, body: dict[str, Any]
    ) -> list[tuple[str, list[Any]]]:
        """Send ``body`` and return content and calls of each choice."""
        self.findings.count("requests")
        kind, _, stream = way.partition(" ")
        if kind in ("tools", "schema", "sampled"):
            stream = self.random.choice(("", "stream"))
        try:
            path, sent = self._request(client, life, kind, body)
            if not stream:
                response = client.post(f"{self.target.url}{path}", json=sent)
                self._check(life, way, response)
                reply = response.json()
                self.findings.count(
                    "tokens drafted", int(reply.get("timings", {}).get("draft_n", 0))
                )
                return _whole(kind, reply)
            with client.stream(
                "POST", f"{self.target.url}{path}", json={**sent, "stream": True}
            ) as response:
                if response.status_code != 200:
                    response.read()
                self._check(life, way, response)
                return self._streamed(life, way, response)
        except (httpx.TransportError, httpx.StreamError) as error:
            self._lost(life, f"{way}: {error!r}")
            raise LostError from error

    def _request(
        self, client: httpx.Client, life: int, kind: str, body: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Return the path and the prompt of ``body`` for another API."""
        if kind == "n":
            return CHAT, {**body, "n": 2}
        if kind not in PATHS:
            return CHAT, body
        system, *messages = body["messages"]
        common = {"model": "x", **self.named, "temperature": 0, **NO_THINKING}
        if kind == "messages":
            limit = {"max_tokens": body["max_tokens"]}
            return PATHS[kind], {
                **common,
                **limit,
                "system": system["content"],
                "messages": messages,
            }
        if kind == "responses":
            limit = {"max_output_tokens": body["max_tokens"]}
            return PATHS[kind], {
                **common,
                **limit,
                "instructions": system["content"],
                "input": messages,
            }
        template = {"messages": body["messages"], **self.named, **NO_THINKING}
        rendered = client.post(f"{self.target.url}/apply-template", json=template)
        self._check(life, "/apply-template", rendered)
        prompt = rendered.json()["prompt"]
        return PATHS[kind], {
            "prompt": prompt,
            "n_predict": body["max_tokens"],
            "temperature": 0,
            **self.named,
        }

    def _check(self, life: int, way: str, response: httpx.Response) -> None:
        status = response.status_code
        if status == 200:
            return
        self.findings.count(f"status {status}")
        if status == 503:
            time.sleep(min(2.0, float(response.headers.get("retry-after", 1))))
            raise LostError
        self._lost(life, f"{way}: {status} {response.text[:300]}")
        raise LostError

    def _lost(self, life: int, what: str) -> None:
        if self.target.is_excused(what):
            self.findings.count("requests that found no memory")
        elif self.target.lives(life):
            # The life may have ended a moment ago without anybody having noticed.
            time.sleep(0.5)
            if not self.target.ends(life):
                self.findings.violate(what)
        self.findings.count("requests without a reply, at an end")

    def _streamed(
        self, life: int, way: str, response: httpx.Response
    ) -> list[tuple[str, list[Any]]]:
        """Return text and calls of each choice of a stream, of any of the APIs. Raises LostError
        for an error event and for a stream without an end, after `_lost` has recorded it.
        """
        replies: dict[int, tuple[list[str], dict[int, dict[str, Any]]]] = {}
        ended = False
        for data in _events(response):
            if error := data.get("error") or (data.get("response") or {}).get("error"):
                self._lost(life, f"{way}: an error in the stream: {str(error)[:300]}")
                raise LostError
            if data.get("type") in ("content_block_delta", "response.output_text.delta"):
                delta = data["delta"]
                text = delta if isinstance(delta, str) else delta.get("text", "")
                replies.setdefault(0, ([], {}))[0].append(text)
            ended = ended or data.get("type") in (
                "message_stop",
                "response.completed",
                "response.incomplete",
                "done",
            )
            for choice in data.get("choices") or ():
                texts, calls = replies.setdefault(choice["index"], ([], {}))
                texts.append(choice["delta"].get("content") or "")
                for part in choice["delta"].get("tool_calls") or ():
                    call = calls.setdefault(
                        part["index"],
                        {"type": "function", "function": {"name": "", "arguments": ""}},
                    )
                    call["id"] = part.get("id") or call.get("id")
                    for key, value in (part.get("function") or {}).items():
                        call["function"][key] += value
        if not ended:
            self._lost(life, f"{way}: a stream without an end")
            raise LostError
        return [
            ("".join(texts), list(calls.values())) for _, (texts, calls) in sorted(replies.items())
        ] or [("", [])]

    def _is_exact(self, life: int) -> bool:
        """Return whether a reply of that life must equal the judge's to the bit."""
        return self.judge.is_exact and life in self.target.exact_lives

    def _compare(
        self, way: str, body: dict[str, Any], content: str, calls: list[Any], *, is_exact: bool
    ) -> None:
        """Compare a reply with the judge's. Without ``is_exact``, a reply may differ at a near tie
        of two tokens, since batches in company round otherwise. A violation leaves its request in a
        file.
        """
        choice = self.judge.choice(body)
        right = choice["message"]
        if right.get("reasoning_content") and way == "completion":
            return  # which does not separate reasoning from content
        expected = (
            right["content"] or "",
            [call["function"] for call in right.get("tool_calls") or ()],
        )
        self.findings.count("replies compared")
        self.findings.count("replies compared with --exact", is_exact)
        sees = any(isinstance(message["content"], list) for message in body["messages"])
        self.findings.count("replies to images compared", sees)
        if (content, [call["function"] for call in calls]) == expected:
            return
        gap = self.judge.gap(body, content, whole=not calls)
        if gap < self.judge.tie and not is_exact:
            self.findings.count("replies that differ at a tie")
            return
        said = (content, [call["function"] for call in calls])
        asked = str(body["messages"][-1]["content"])
        (self.target.directory / f"differs-{self.findings.counts['requests']}.json").write_text(
            json.dumps(body)
        )
        self.findings.violate(
            f"{way}: said {said!r}, right is {expected!r}, {gap:.3f} likelier, after "
            f"{asked[-1000:]!r}"
        )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line == "data: [DONE]":
            yield {"type": "done"}
        elif line.startswith("data: "):
            yield json.loads(line[6:])


def _whole(kind: str, reply: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    if kind == "completion":
        return [(reply["content"], [])]
    if kind == "messages":
        return [("".join(block.get("text", "") for block in reply["content"]), [])]
    if kind == "responses":
        items = [item for item in reply["output"] if item["type"] == "message"]
        return [("".join(part["text"] for item in items for part in item["content"]), [])]
    messages = [
        choice["message"]
        for choice in sorted(reply["choices"], key=lambda choice: int(choice["index"]))
    ]
    return [(message["content"] or "", message.get("tool_calls") or []) for message in messages]
