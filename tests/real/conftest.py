"""Real models on real servers: SmolLM2 in every run, all three with PYCTL_REAL (`make real`).

A test whose model is not in the cache of tools/real_models.py is skipped, and without LLAMA_SERVER
each that compares with a llama-server. Replies are greedy, of one thread, and nothing is timed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from pyctl.measure.server_process import ServerProcess
from tests.client import Client, ServerClient, source_of
from tests.process.conftest import Server, start
from tools.real_models import MODELS, path_of

__all__ = ["start"]

NAMES = tuple(MODELS) if "PYCTL_REAL" in os.environ else ("smollm2",)
TALKERS = [name for name in NAMES if name != "gemma3"]
"""Models that were trained to answer; Gemma is a base model without a template."""

LLAMA_SERVER = os.environ.get("LLAMA_SERVER", "")

OTHER_CUTS = (96, 40)
"""Sizes of batches (-ub) that end elsewhere than those of `start`, which have up to 128 tokens."""

CODE = '''\
class Meter:
    """Counts litres of one pipe."""

    def __init__(self, name, limit):
        self.name = name
        self.limit = limit
        self.litres = 0

    def add(self, litres):
        if litres < 0:
            raise ValueError("litres cannot be negative")
        self.litres = self.litres + litres
        if self.litres > self.limit:
            print("the meter", self.name, "is above its limit of", self.limit)

    def reset(self):
        self.litres = 0

    def report(self):
        return "meter " + self.name + ": " + str(self.litres) + " litres"
'''


@dataclass(frozen=True)
class Reply:
    """``tokens`` are of each token its id, its log-probability, and the ten likeliest ids with
    theirs.
    """

    tokens: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]
    text: str
    source: str
    n_cached: int
    n_prompt: int

    @property
    def ids(self) -> list[int]:
        return [token for token, *_ in self.tokens]

    def near_tie(self, other: Reply) -> float | None:
        """Return how much likelier this reply's token was than the next where ``other`` first has
        another token; None if it has the same tokens.
        """
        for (ours, _, top), (theirs, *_) in zip(self.tokens, other.tokens, strict=False):
            if ours != theirs:
                return top[0][1] - top[1][1]
        return None if len(self.tokens) == len(other.tokens) else float("inf")

    def margin_change(self, other: Reply) -> float:
        """Return the largest change in ``other`` of the distance of the two best tokens, up to the
        place where the two part.

        Distances are those of log-probabilities. A place is left out if ``other`` does not list
        both tokens.
        """
        largest = 0.0
        for (ours, _, our_top), (theirs, _, their_top) in zip(
            self.tokens, other.tokens, strict=False
        ):
            (best, best_logprob), (second, second_logprob) = our_top[:2]
            listed = dict(their_top)
            if best in listed and second in listed:
                change = (best_logprob - second_logprob) - (listed[best] - listed[second])
                largest = max(largest, abs(change))
            if ours != theirs:
                break  # what follows has another text before it
        return largest


def client_of(server: Server | ServerProcess) -> ServerClient:
    """Return a client of pyctl or of llama-server."""
    return Client.to_server(server.url, timeout=280)


Asked: TypeAlias = "Sequence[dict[str, Any]] | str"
"""Messages, or a raw prompt."""


def ask(server: Server | ServerProcess, asked: Asked, n: int = 16, **fields: Any) -> Reply:
    """Return a greedy reply of up to ``n`` tokens to messages, or to a raw prompt."""
    client = client_of(server)
    if isinstance(asked, str):
        body = {"prompt": asked, "n_predict": n, "temperature": 0, "n_probs": 10, **fields}
        response = client.post("/completion", body)
        assert response.status_code == 200, response.text
        found = response.json()
        text = found["content"]
        entries = found["completion_probabilities"]
        timings = found["timings"]
    else:
        best = {"logprobs": True, "top_logprobs": 10}
        reply = client.chat([*asked], max_tokens=n, temperature=0, **{**best, **fields})
        response = reply.response
        text = reply.text
        entries = reply.logprobs["content"]
        timings = reply.timings
    tokens = tuple(
        (
            entry["id"],
            entry["logprob"],
            tuple((top["id"], top["logprob"]) for top in entry["top_logprobs"]),
        )
        for entry in entries
    )
    source = source_of(response) if "x-pyctl-cache" in response.headers else ""
    return Reply(tokens, text, source, timings["cache_n"], timings["cache_n"] + timings["prompt_n"])


def margin_noise(
    start: Callable[..., Server],
    flags: Sequence[str],
    cold: Collection[tuple[Asked, Reply]],
    n: int = 16,
) -> float:
    """Return the largest change of a margin between cold replies to the same prompts in batches
    that end elsewhere.

    ``flags`` are the model and the flags of the server that gave the replies of ``cold``, each with
    what was asked. A reply may part from a cold one where the two best tokens are no further apart
    than this: rounding can exchange them there.
    """
    largest = 0.0
    for n_ubatch in OTHER_CUTS:
        server = start(*flags, "-ub", str(n_ubatch))
        for asked, reply in cold:
            other = ask(server, asked, n, cache_prompt=False)
            assert other.n_cached == 0
            largest = max(largest, reply.margin_change(other))
        server.stop()
    return largest


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """model_path("smollm2") -> its file, in place of the tiny models' that servers have
    elsewhere.
    """

    def get(name: str) -> Path:
        if not path_of(name).is_file():
            pytest.skip(f"{name} is not there: python -m tools.real_models {name}")
        return path_of(name)

    return get


@pytest.fixture(scope="module")
def start_peer(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., ServerProcess]]:
    """start_peer("smollm2", ...) -> a llama-server with the flags that `start` gives pyctl.

    Its weights are not repacked, as pyctl's are not where the processor has AMX: llama-server
    crashes there.
    """
    with ExitStack() as opened:

        def run(name: str, *flags: str) -> ServerProcess:
            log = tmp_path_factory.mktemp("peer") / "log"
            command = [
                LLAMA_SERVER,
                "-m",
                str(model_path(name)),
                *shlex.split("-c 8192 -t 1 -ub 128 -nr"),
            ]
            return opened.enter_context(ServerProcess([*command, *flags], log))

        yield run
