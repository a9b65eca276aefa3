"""Workloads on real servers with a tiny model: evaluated tokens against the floor, within the same
RAM.

    python -m bench.replay
    python -m bench.replay --llama-server /path/to/llama-server --gib 4 8 16
    python -m bench.replay --llama-server /path/to/llama-server --servers llama-server --only
    claude_code

The model has the 27B's ratio of state to rows, and budgets are in bytes of the 27B. The floor of a
request is its tokens less those that any request before it, or its reply, had in the same places; a
request is "late" if it evaluated more than twice its floor and 64 tokens. Half of llama-server's
budget goes to its cache (--cache-ram), half to the checkpoints of its sequences, which it does not
count. Otherwise both run with their defaults. Seconds are the evaluated tokens' with a 27B on an
RTX 3090 (bench/gpu_seconds.py), in total and at most, without copies.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.budgets import SCALE, TEMPLATE, is_late
from bench.common import parse, parser_of, show
from bench.gpu_seconds import DEVICES
from bench.sessions import AGENTS, BUDGETED, PLAIN, WORKLOADS, Message, Reply
from bench.simulated import Known, Turn
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from pyctl.prompt import as_tokens
from tools.generator import QWEN36_27B, TINY_FAT, cached_model

N_CTX = 65536
N_SEQS = 4
"""Sequences that both servers have by default."""

CARD = next(device for device in DEVICES if device.name.endswith("RTX 3090"))

GROUPS = {**WORKLOADS, **BUDGETED, **AGENTS}


class Served:
    """Answers from a server that has seen nothing yet; ``turns`` are the requests so far."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._client = httpx.Client(base_url=server.url, timeout=300)
        self._known = Known()
        self.turns: list[Turn] = []

    def _post(self, path: str, body: Message) -> Any:
        return self._client.post(path, json=body).raise_for_status().json()

    def _tokens(self, content: str) -> list[int]:
        return list(self._post("/tokenize", {"content": content, "parse_special": True})["tokens"])

    def chat(
        self, messages: Sequence[Message], reply: Reply = PLAIN, tools: Sequence[Message] = ()
    ) -> Message:
        """Send a conversation and return the reply as the message that a client sends back. The
        prompt is tokenised by the server itself, and compared with earlier ones to count the turn.
        """
        how = {
            "messages": messages,
            "tools": list(tools),
            "chat_template_kwargs": {"enable_thinking": reply.thought > 0},
        }
        prompt = self._tokens(self._post("/apply-template", how)["prompt"])
        body = {
            **how,
            "max_tokens": reply.n,
            "temperature": 0,
            "ignore_eos": True,
            "tool_choice": "none",
        }
        answer = self._post("/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        found = {"role": "assistant", "content": message.get("content") or ""}
        said = found["content"]
        if thought := message.get("reasoning_content"):
            found["reasoning_content"] = thought
            said = f"{thought}\n</think>\n\n{said}" if said else thought
        self._count(prompt, said, answer["timings"])
        return found

    def complete(self, prompt: str, reply: Reply = PLAIN) -> str:
        body = {"prompt": prompt, "n_predict": reply.n, "temperature": 0, "ignore_eos": True}
        answer = self._post("/completion", body)
        self._count(self._tokens(prompt), answer["content"], answer["timings"])
        return str(answer["content"])

    def restart(self) -> None:
        self._client.close()
        self._server.stop()
        self._server.start()
        self._client = httpx.Client(base_url=self._server.url, timeout=300)

    def _count(self, prompt: list[int], said: str, timings: dict[str, Any]) -> None:
        if timings["prompt_n"] + timings["cache_n"] != len(prompt):
            raise SystemExit(f"{timings} do not add up to {len(prompt)} tokens")
        tokens = as_tokens(prompt)
        n = len(prompt)
        n_new = timings["prompt_n"]
        seconds = {CARD.name: CARD.prompt(n - n_new, n)}
        self.turns.append(Turn(n, self._known.shared(tokens), n_new, seconds=seconds))
        self._known.add(as_tokens([*prompt, *self._tokens(said)]))


def command_of(
    program: Sequence[str], model: Path, gib: float, more: Sequence[str], *, counts_all: bool
) -> list[str]:
    """Return ``program`` within ``gib`` of the 27B, with all that lies in RAM counted."""
    mib = int(gib * 1024 / SCALE)
    flags = ["-m", str(model), "-c", str(N_CTX), "-t", "1", "--jinja", *more]
    if TEMPLATE.is_file():
        flags += ["--chat-template-file", str(TEMPLATE)]
    if counts_all:
        return [*program, *flags, "--cache-ram", str(mib)]
    checkpoints = int(mib * 2**20 / 2 / N_SEQS / (QWEN36_27B.state_bytes / SCALE))
    return [*program, *flags, "--cache-ram", str(mib // 2), "--ctx-checkpoints", str(checkpoints)]


def replayed(command: Sequence[str], log: Path, workload: str) -> list[Turn]:
    """Return the turns of ``workload`` with a server that is started for it."""
    with ServerProcess(command, log) as server:
        served = Served(server)
        GROUPS[workload](served)
        return served.turns


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per workload and budget, then sums: for each server the ratio of evaluated tokens
    to the floor, late requests, the worst one, and seconds on a GPU.
    """
    parser = parser_of(__doc__)
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument(
        "--servers", nargs="+", default=["pyctl", "llama-server"], choices=("pyctl", "llama-server")
    )
    parser.add_argument(
        "--only", nargs="+", default=list(GROUPS), choices=GROUPS, metavar="WORKLOAD"
    )
    parser.add_argument(
        "--gib", nargs="+", type=float, default=[8.0], help="budgets, in bytes of the 27B"
    )
    parser.add_argument(
        "--flags", default="", help='flags of both servers, such as --flags="-ngl 99"'
    )
    arguments = parse(parser, argv, only=["regenerate"])
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = cached_model(TINY_FAT, directory)
        binary = arguments.llama_server
        known = {"pyctl": PYCTL_SERVE, **({"llama-server": (binary,)} if binary else {})}
        programs: dict[str, Sequence[str]] = {
            name: known[name] for name in arguments.servers if name in known
        }
        everything: dict[tuple[float, str], list[Turn]] = {}
        for workload in arguments.only:
            for gib in arguments.gib:
                cells: list[object] = []
                for program, command in programs.items():
                    full = command_of(
                        command, model, gib, arguments.flags.split(), counts_all=program == "pyctl"
                    )
                    turns = replayed(full, directory / f"{program}.log", workload)
                    everything.setdefault((gib, program), []).extend(turns)
                    cells += cells_of(turns)
                rows.append([workload.replace("_", " "), f"{gib:g}", len(turns), *cells])
                print(*rows[-1], flush=True)
        for gib in arguments.gib:
            totals = [everything[gib, program] for program in programs]
            rows.append(
                [
                    "all",
                    f"{gib:g}",
                    len(totals[0]),
                    *(cell for turns in totals for cell in cells_of(turns)),
                ]
            )
    columns = ["workload", "GiB", "requests"]
    for program in programs:
        columns += [f"{program}: ratio", "late", "worst", f"s, {CARD.name}"]
    title = "Prompt tokens evaluated per token of the floor, and seconds on a GPU"
    show(title, columns, rows, keep="replay" if arguments.keep else "")


def cells_of(turns: Sequence[Turn]) -> list[object]:
    """Return the ratio of evaluated tokens to the floor, late requests, the worst (tokens evaluated
    by its floor), and seconds.
    """
    evaluated = sum(turn.n_evaluated for turn in turns)
    floor = sum(turn.floor for turn in turns)
    worst = max(turns, key=lambda turn: turn.n_evaluated - 2 * turn.floor)
    took = [turn.seconds[CARD.name] for turn in turns]
    seconds = f"{sum(took):.1f} ({max(took):.1f})"
    return [
        f"{evaluated / floor:.2f}",
        sum(map(is_late, turns)),
        f"{worst.n_evaluated}/{worst.floor}",
        seconds,
    ]


if __name__ == "__main__":
    main()
