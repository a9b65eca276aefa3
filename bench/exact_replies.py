"""Replies compared with a cold run's, token for token and bit for bit, on pyctl and llama-server.

    python -m bench.exact_replies -m smollm2.gguf --llama-server FILE
    DIR/python -m bench.exact_replies -m smollm2.gguf --llama-server DIR/lib/llama-server --flags
    "-ngl 99"

Each of ``--conversations`` has three turns. With one client it also has a repeated
request, a branch and an edit, and between conversations the server ends by SIGTERM and by SIGKILL,
with its cache on disk. With several clients they take the conversations at the same time. Then a
second server with the same flags answers every prompt anew, one at a time and without its cache.

*Same bits*: every token and every log-probability that the server sent are equal. *Cached* counts
prompt tokens that the server did not evaluate. Rates are the client's: of one reply, and with
several clients of all together.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bench.common import add_model, parse, parser_of, show, words
from pyctl.measure.client import AskedServer, Messages, TimedReply
from pyctl.measure.server_process import PYCTL_SERVE
from pyctl.model_files import builtin_model

N_PREDICT = 40
"""Tokens of a reply, so that one differing bit has room to change a token."""

N_DOCUMENT = 900
"""Characters of the text that a conversation is about: several batches of a small model."""

ENDS = {3: signal.SIGTERM, 7: signal.SIGKILL}
"""After which conversation of a single client its server ends, and how."""

QUESTIONS = (
    "Summarize the text above in two sentences.",
    "Which word of it is the longest? Explain.",
    "Now write a short story about that word.",
)
OTHER_QUESTION = "Translate the first words into French."

COLUMNS = (
    "server",
    "clients",
    "replies",
    "same bits",
    "same tokens",
    "cached",
    "of prompt tokens",
    "wall s",
    "first token ms",
    "decode tokens/s",
)


@dataclass(frozen=True)
class Mode:
    """A server under test: the ``name`` in the table and its command without the model."""

    name: str
    command: tuple[str, ...]
    is_pyctl: bool


@dataclass
class Answered:
    """The requests of one run with their replies, in the order of the replies."""

    replies: list[tuple[Messages, TimedReply]] = field(default_factory=list)
    wall_s: float = 0.0


def modes_of(options: argparse.Namespace) -> list[Mode]:
    """Return the servers to compare: pyctl by default, with --exact, with --exact and drafts,
    llama-server.
    """
    flags = tuple(options.flags)
    ours = tuple(PYCTL_SERVE)
    modes = [
        Mode("pyctl", (*ours, *flags), True),
        Mode("pyctl --exact", (*ours, *flags, "--exact"), True),
        Mode("pyctl --exact, drafts", (*ours, *flags, "--exact", "--spec-type", "cache"), True),
    ]
    if options.llama_server:
        modes.append(Mode("llama-server", (*shlex.split(options.llama_server), *flags), False))
    return [mode for mode in modes if not options.modes or mode.name in options.modes]


class Conversations:
    """Asks all conversations of one run, by ``n_clients`` at a time."""

    def __init__(self, server: AskedServer, n_clients: int, n_conversations: int) -> None:
        self._server = server
        self._n_clients = n_clients
        self._n_conversations = n_conversations
        self.answered = Answered()

    def run(self) -> Answered:
        """Ask everything; the server runs before and after."""
        began = time.perf_counter()
        numbers = range(self._n_conversations)
        if self._n_clients == 1:
            for number in numbers:
                self._alone(number)
        else:
            with ThreadPoolExecutor(self._n_clients) as clients:
                list(clients.map(self._turns, numbers))
        self.answered.wall_s = time.perf_counter() - began
        return self.answered

    def _alone(self, number: int) -> None:
        """Send three turns, then the requests of a person in between: repeat, branch, edit,
        restart.
        """
        messages = self._turns(number)
        self._ask(messages[:3])
        self._ask([*messages[:3], _user(OTHER_QUESTION)])
        if number % 6 == 0:
            self._ask([_user(f"{messages[0]['content']} Be brief."), *messages[1:5]])
        if number in ENDS:
            self._server.end(ENDS[number])
            self._server.start()
            self._ask([*messages, _user("Thank you. Why?")])

    def _turns(self, number: int) -> Messages:
        """Send three turns of conversation ``number``; return all its messages."""
        text = words(f"conversation {number}", N_DOCUMENT)
        messages: Messages = []
        for turn, question in enumerate(QUESTIONS):
            messages.append(_user(f"{text}\n\n{question}" if turn == 0 else question))
            messages.append({"role": "assistant", "content": self._ask(messages).text})
        return messages

    def _ask(self, messages: Messages) -> TimedReply:
        reply = ask(self._server, messages)
        self.answered.replies.append((list(messages), reply))
        return reply


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(server: AskedServer, messages: Messages, **fields: Any) -> TimedReply:
    """Send ``messages`` and return the reply, with the log-probability of each token."""
    return server.request(messages, N_PREDICT, logprobs=True, top_logprobs=1, **fields)


def cold(server: AskedServer, answered: Answered) -> list[TimedReply]:
    """Return the replies of a server that is alone and reuses nothing, each different prompt
    once.
    """
    known: dict[str, TimedReply] = {}
    for messages, _ in answered.replies:
        key = repr(messages)
        if key not in known:
            known[key] = ask(server, messages, cache_prompt=False)
    return [known[repr(messages)] for messages, _ in answered.replies]


def row_of(
    mode: Mode, n_clients: int, answered: Answered, expected: Sequence[TimedReply]
) -> list[object]:
    """Return the cells of one run."""
    warm = [reply for _, reply in answered.replies]
    pairs = list(zip(warm, expected, strict=True))
    n_same_bits = sum(one.probs == other.probs and one.text == other.text for one, other in pairs)
    n_same_tokens = sum(_tokens(one) == _tokens(other) for one, other in pairs)
    n_cached = sum(reply.cached for reply in warm)
    n_prompt = sum(reply.cached + reply.evaluated for reply in warm)
    n_predicted = sum(reply.n_predicted for reply in warm)
    rates = [reply.rate for reply in warm if reply.rate is not None]
    rate = statistics.median(rates) if n_clients == 1 else n_predicted / answered.wall_s
    first_ms = statistics.median(reply.first_ms for reply in warm)
    return [
        mode.name,
        n_clients,
        len(warm),
        n_same_bits,
        n_same_tokens,
        f"{n_cached:,}",
        f"{n_prompt:,}",
        f"{answered.wall_s:.1f}",
        f"{first_ms:,.0f}",
        f"{rate:,.0f}",
    ]


def _tokens(reply: TimedReply) -> list[str]:
    """Return the likeliest token of each place, which a greedy reply has."""
    return [max(probs, key=lambda token: probs[token]) for probs in reply.probs]


def measure(mode: Mode, options: argparse.Namespace, n_clients: int, work: Path) -> list[object]:
    """Ask one mode's server everything, then a second one cold."""
    name = f"{mode.name.replace(' ', '-')}-{n_clients}"
    command = [*mode.command, "-m", options.model, "-t", str(options.threads), "-np", "4"]
    kept = (
        ["--kv-cache-dir", str(work / name), "--kv-cache-min-tokens", "64"] if mode.is_pyctl else []
    )
    server = AskedServer(mode.name, [*command, *kept], work / f"{name}.log")
    with server:
        answered = Conversations(server, n_clients, options.conversations).run()
    unkept = ["--no-kv-cache"] if mode.is_pyctl else []
    second = AskedServer(mode.name, [*command, *unkept], work / f"{name}-cold.log")
    with second:
        expected = cold(second, answered)
    return row_of(mode, n_clients, answered, expected)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per mode and number of clients, with the error's text if a server failed.
    SystemExit if a reply with --exact differs from a cold run's.
    """
    parser = parser_of(__doc__)
    add_model(parser, str(builtin_model()))
    parser.add_argument("--llama-server", default="", metavar="COMMAND")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--modes", nargs="+", default=[], metavar="NAME", help="of the first column"
    )
    parser.add_argument(
        "--flags", type=shlex.split, default=[], help="for all servers, in one argument"
    )
    parser.add_argument("--conversations", type=int, default=12)
    quick = {"conversations": 2, "clients": [1, 2], "modes": ["pyctl --exact"]}
    options = parse(parser, argv, **quick)
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="exact-replies-") as work:
        for mode in modes_of(options):
            for n_clients in options.clients:
                try:
                    rows.append(measure(mode, options, n_clients, Path(work)))
                except (OSError, HTTPException, ValueError) as error:
                    rows.append(
                        [mode.name, n_clients, str(error)[-200:], *[""] * (len(COLUMNS) - 3)]
                    )
                print(*rows[-1], flush=True)
    weights = (
        "random" if options.model == str(builtin_model()) else f"real, {Path(options.model).stem}"
    )
    show(
        "Replies compared with a cold run's",
        COLUMNS,
        rows,
        keep="exact-replies" * options.keep,
        weights=weights,
    )
    if any("--exact" in str(row[0]) and row[2] != row[3] for row in rows):
        raise SystemExit("with --exact a reply differs from a cold run's")


if __name__ == "__main__":
    main()
