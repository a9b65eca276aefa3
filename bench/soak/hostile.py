"""Bodies that clients send by mistake or by malice, and connections that lead nowhere."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bench.soak.findings import Findings
from bench.soak.talk import CHAT, NO_THINKING, Talker
from bench.soak.target import Target

QUESTION = {
    "messages": [{"role": "user", "content": "What is the answer?"}],
    "max_tokens": 1,
    "temperature": 0,
}
ANSWER_SECONDS = 120.0
N_IDLE = 50


class Hostile(NamedTuple):
    """A request, of a kind that `--without` may name."""

    kind: str
    name: str
    path: str
    body: bytes
    method: str = "POST"
    waits: bool = False
    """True if the request may have to wait for its turn at the engine before it is refused."""


def _chat(kind: str, name: str, **fields: Any) -> Hostile:
    return Hostile(kind, name, CHAT, json.dumps({**QUESTION, **fields}).encode())


def _schema(name: str, schema: Any) -> Hostile:
    return _chat(
        "schemas",
        name,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )


def _repeated(depth: int, make: Callable[[Any], Any], inner: Any) -> Any:
    for _ in range(depth):
        inner = make(inner)
    return inner


def grammars() -> Iterator[Hostile]:
    """Yield grammars that were found to kill or to hang a server, and simpler mistakes."""
    doubled = (
        "root ::= a1 | a1\n"
        + "".join(f"a{i} ::= a{i + 1} | a{i + 1}\n" for i in range(1, 45))
        + 'a45 ::= "x"'
    )
    tower = "".join(
        ("root" if i == 0 else f"r{i}")
        + " ::= "
        + "(" * 1900
        + (f"r{i + 1}" if i < 299 else '"a"')
        + ")" * 1900
        + "\n"
        for i in range(300)
    )
    named = {
        "a token rule": "root ::= . !<[0]>",
        "another token rule": "root ::= [a-z ] <[300]>",
        "swapped bounds": 'root ::= "a"{5,2}',
        "hidden left recursion": 'root ::= b root "x" | "y"\nb ::= a\na ::= "" | "z"',
        "left recursion": 'root ::= root "a" | "b"',
        "doubled rules": doubled,
        "quotes in comments": '# "\nroot ::= ' + "(" * 200_000 + '"a"' + ")" * 200_000 + ' # "\n',
        "a tower of parentheses": tower,
        "brackets": "root ::= " + "[" * 60_000,
        "an open one": "root ::= (",
        "huge repetition": 'root ::= "a"{1000000}',
        "nested repetition": "root ::= " + _repeated(9, lambda inner: f"({inner}){{9}}", '"a"'),
        "unknown rule": "root ::= nothing",
        "no root": 'x ::= "a"',
        "NUL": 'root ::= "\x00"',
        "10,000 rules": "".join(f'r{i} ::= r{i + 1} "a"\n' for i in range(10_000))
        + 'r10000 ::= "b"\nroot ::= r0',
        "backslashes": 'root ::= "' + "\\" * 100_001 + '"',
    }
    for name, text in named.items():
        yield _chat("grammars", name, grammar=text)


def schemas() -> Iterator[Hostile]:
    """Yield schemas that grow when they are read."""
    both = ["object", "object"]
    yield _schema(
        "types twice",
        _repeated(40, lambda s: {"type": both, "properties": {"a": s}}, {"type": "string"}),
    )
    fan = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    yield _schema(
        "references that fan out",
        {"$defs": {**fan, "d40": {"type": "object"}}, "$ref": "#/$defs/d0"},
    )
    yield _schema(
        "a long key", {"type": "object", "properties": {"k" * 20_000: {"type": "string"}}}
    )
    alike = {f"{'same' * 10}{i}": {"type": "string"} for i in range(4000)}
    yield _schema("4,000 keys alike", {"type": "object", "properties": alike})
    yield _schema("deep", _repeated(900, lambda s: {"type": "array", "items": s}, {}))
    yield _schema("reference to itself", {"$ref": "#"})
    yield _schema("huge bounds", {"type": "string", "minLength": 10**9, "maxLength": 10**9})
    yield _schema("huge list", {"type": "array", "items": {"type": "integer"}, "minItems": 10**7})
    yield _schema("a pattern", {"type": "string", "pattern": "^(((a{1,99}){1,99}){1,99}){1,99}$"})
    yield _schema("a bad pattern", {"type": "string", "pattern": "^(((((("})
    yield _schema("many alternatives", {"enum": [f"value {i}" for i in range(50_000)]})
    yield _schema("no schema", "nothing")
    for name, parameters in (
        ("a text", "x"),
        ("deep", _repeated(300, lambda s: {"properties": {"a": s}}, {})),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        yield _chat("schemas", f"tool parameters: {name}", tools=[tool], tool_choice="required")


def numbers() -> Iterator[Hostile]:
    """Yield counts that cost without bound."""
    yield _chat("counts", "n", n=10**9)
    yield Hostile(
        "counts",
        "2,000 prompts times 128",
        "/v1/completions",
        json.dumps({"prompt": ["a"] * 2000, "n": 128, "max_tokens": 1}).encode(),
    )
    yield _chat("counts", "n_probs", n_probs=10**6)
    yield _chat("counts", "top_logprobs", logprobs=True, top_logprobs=10**6)
    yield _chat(
        "counts",
        "breakers",
        dry_sequence_breakers=[f"b{i}" for i in range(50_000)],
        dry_multiplier=1,
    )
    yield _chat("counts", "stops", stop=[f"s{i}" for i in range(300_000)])
    yield _chat("counts", "a long stop", stop=["a" * 1_000_000])
    yield _chat("counts", "biases", logit_bias=[[i, 1] for i in range(100_000)])
    yield _chat("counts", "samplers", samplers=["top_k"] * 50_000)
    yield Hostile(
        "counts",
        "a long prompt",
        "/completion",
        json.dumps({"prompt": "a " * 2_000_000, "n_predict": 1}).encode(),
    )
    stamp = {"model": "x", "system": "x-anthropic-billing-header:" * 16_000, "max_tokens": 1}
    stamped = {**stamp, "messages": [{"role": "user", "content": "a"}]}
    yield Hostile("counts", "stamps", "/v1/messages/count_tokens", json.dumps(stamped).encode())
    turns = [
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a" * 200}],
        }
    ]
    yield Hostile(
        "counts",
        "40,000 items",
        "/v1/responses",
        json.dumps({"model": "x", "input": turns * 40_000, "max_output_tokens": 1}).encode(),
    )


def texts() -> Iterator[Hostile]:
    """Yield bodies that are no JSON, too deep, or of other types."""
    chat = json.dumps(QUESTION)[:-1]
    yield Hostile("json", "a brace", CHAT, b"{")
    yield Hostile("json", "garbage", CHAT, b"\xff" * 1000)
    yield Hostile("json", "NUL", "/completion", b'{"prompt":"\\u0000","n_predict":1}')
    yield Hostile("json", "surrogates", CHAT, f'{chat},"stop":"\\ud800"}}'.encode())
    yield Hostile(
        "json",
        "too large",
        CHAT,
        b'{"messages":[{"role":"user","content":"' + b"a" * (40 << 20) + b'"}]}',
    )
    for depth in (900, 100_000):
        yield Hostile("json", f"{depth} lists", CHAT, b"[" * depth + b"]" * depth)
        yield Hostile(
            "json",
            f"{depth} lists in a field",
            CHAT,
            f'{chat},"stop":{"[" * depth}{"]" * depth}}}'.encode(),
        )
    values = (
        "NaN",
        "-Infinity",
        "1e999",
        "1" + "0" * 400,
        "-9223372036854775809",
        '"x"',
        "{}",
        "[[]]",
        "false",
        '"\\u0000"',
    )
    names = (
        "temperature",
        "top_k",
        "seed",
        "max_tokens",
        "n",
        "stop",
        "messages",
        "logit_bias",
        "tools",
        "id_slot",
    )
    for name in names:
        for value in values:
            limit = "" if name == "max_tokens" else ',"max_tokens":1'
            yield Hostile(
                "json", f"{name}: {value[:20]}", CHAT, f'{chat}{limit},"{name}":{value}}}'.encode()
            )
    yield _chat("json", "an unknown role", messages=[{"role": "root", "content": "a"}])
    yield _chat(
        "json",
        "an image",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
    )
    yield _chat(
        "json", "a bad template value", chat_template_kwargs={"enable_thinking": {"a": [1] * 100}}
    )
    yield Hostile(
        "json", "tokens out of range", "/completion", b'{"prompt":[999999999,-5],"n_predict":1}'
    )


def paths() -> Iterator[Hostile]:
    """Yield addresses and names with control characters of terminals and logs."""
    for path in (
        "/v1/models/%1b%5d0;owned%07",
        "/v1/models/a%0a12:00:00%20forged",
        "/slots/%1b%5b2J",
        "/%00",
        "//props",
    ):
        yield Hostile("paths", path, path, b"", "GET")
    for name in (
        "../../etc/passwd",
        "a/b",
        "a\x00b",
        "a" * 300,
        "a" * 252,
        "\x1b]0;owned\x07",
        "",
        ".",
        "CON",
    ):
        body = json.dumps({"filename": name}).encode()
        path = "/slots/0?action=restore"
        yield Hostile(
            "paths", f"slot file {name[:20]!r}", path, body, waits=name == "CON" or len(name) == 252
        )
    yield Hostile("paths", "slot 99", "/slots/99?action=erase", b"{}")
    yield Hostile(
        "paths", "a strange pin", "/cache/pin", b'{"id":"\\u001b]0;owned\\u0007","pinned":true}'
    )
    yield _chat(
        "paths",
        "escapes in the text",
        messages=[{"role": "user", "content": "\x1b]0;owned\x07\x1b[2J" * 20}],
    )
    yield _chat("paths", "escapes in a model's name", model="\x1b]52;c;aGk=\x07\n12:00:00 forged")


def corpus(without: Sequence[str]) -> list[Hostile]:
    """Return the bodies of all kinds but those in ``without``."""
    every = (*grammars(), *schemas(), *numbers(), *texts(), *paths())
    return [hostile for hostile in every if hostile.kind not in without]


class Attacker:
    """Hostile clients, each a method on a separate thread; a reply may take ``patience``
    seconds.
    """

    def __init__(
        self,
        target: Target,
        findings: Findings,
        talkers: Sequence[Talker],
        seed: int,
        patience: float,
    ) -> None:
        self.target = target
        self.findings = findings
        self.talkers = talkers
        self.patience = patience
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def send_bodies(self, bodies: Sequence[Hostile]) -> None:
        """Send the hostile bodies one after the other, in random order, again and again."""
        while bodies:
            with self._lock:
                order = self._random.sample(bodies, len(bodies))
            for hostile in order:
                if not (life := self.target.ready()):
                    return
                self._send(hostile, life)
                time.sleep(0.05)

    def _send(self, hostile: Hostile, life: int) -> None:
        """Send a hostile request and judge its answer. A violation is a 500, a refusal that takes
        longer than ``patience`` seconds, or a lost connection while the life goes on.
        """
        self.findings.count("requests")
        name = self.target.hint = f"{hostile.kind}: {hostile.name}"
        began = time.monotonic()
        try:
            status = self._status(hostile)
        except OSError as error:
            if self.target.lives(life):
                time.sleep(0.5)
                if self.target.lives(life):
                    self.findings.violate(
                        f"{name}: {error!r} after {time.monotonic() - began:.1f} s"
                    )
            return
        took = time.monotonic() - began
        self.findings.count(f"hostile: {status}")
        if not self.target.lives(life):
            return
        if status == 500:
            self.findings.violate(f"{name}: 500")
        if status != 200:
            self.findings.longest("wait" if hostile.waits else "refusal", took, name)
            if took > self.patience and not hostile.waits:
                self.findings.violate(f"{name}: {status} after {took:.1f} s")

    def _status(self, hostile: Hostile) -> int:
        """Send the request and return the status of its answer. OSError if there is no answer."""
        head = f"{hostile.method} {hostile.path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        head += f"Content-Length: {len(hostile.body)}\r\n\r\n"
        with socket.create_connection(
            ("127.0.0.1", self.target.port), timeout=ANSWER_SECONDS
        ) as connection:
            answer = b""
            try:
                connection.sendall(head.encode() + hostile.body)
            except OSError:
                # It may have answered before everything was sent.
                answer = b""
            while len(answer) < 12:
                part = connection.recv(4096)
                if not part:
                    raise OSError("closed without an answer")
                answer += part
        return int(answer.split(b" ", 2)[1][:3])

    def vanish(self) -> None:
        """Repeat requests of other clients, and disconnect in the prefill or in the decode, some
        with a reset.
        """
        while life := self.target.ready():
            with self._lock:
                rng = random.Random(self._random.random())
            talker = rng.choice(self.talkers)
            messages = talker.latest
            fields = {
                **NO_THINKING,
                **talker.named,
                "max_tokens": 400,
                "ignore_eos": True,
                "stream": rng.random() < 0.7,
                "n": rng.choice((1, 1, 3)),
            }
            if not messages:
                time.sleep(0.1)
                continue
            body = json.dumps(
                {
                    **fields,
                    "messages": [
                        *messages,
                        {"role": "user", "content": "word " * rng.randint(1, 200)},
                    ],
                }
            ).encode()
            head = (
                f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            )
            message = head + body
            cut = len(message) if rng.random() < 0.85 else rng.randrange(len(message))
            self.findings.count("requests")
            self.findings.count("disconnects")
            try:
                with socket.create_connection(
                    ("127.0.0.1", self.target.port), timeout=20
                ) as connection:
                    connection.sendall(message[:cut])
                    connection.settimeout(rng.choice((0.01, 0.1, 0.5, 1.5)))
                    try:
                        for _ in range(rng.randint(0, 6)):
                            if not connection.recv(2048):
                                break
                    except TimeoutError:
                        pass
                    if rng.random() < 0.5:
                        connection.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
            except OSError as error:
                if not isinstance(
                    error, ConnectionResetError | BrokenPipeError
                ) and not self.target.ends(life):
                    self.findings.violate(f"a client that vanishes: {error!r}")
            time.sleep(rng.uniform(0, 0.4))

    def idle(self) -> None:
        """Open connections and send nothing, or one byte at a time."""
        held: list[socket.socket] = []
        while self.target.ready():
            while len(held) > N_IDLE:
                held.pop(0).close()
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", self.target.port), timeout=20))
                if len(held) % 2:
                    held[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHo")
            for connection in held[::7]:
                try:
                    connection.sendall(b"s")
                except OSError:
                    held.remove(connection)
                    connection.close()
            time.sleep(0.25 if len(held) >= N_IDLE else 0.01)
        for connection in held:
            connection.close()
