"""What a client sees of llama-server and of pyctl: every endpoint and documented field, asked of both.

    python -m bench.contract --llama-server /path/to/llama-server
    python -m bench.contract --llama-server ... --only '/v1/messages'

Both serve the same tiny model with the same flags. A reply is compared by status, content type, members with their
types, the values that clients branch on, and for a stream the sequence of its events. Wording of messages, ids, times
and the number of chunks do not count. With --keep the table goes to results/contract.md.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.common import RESULTS, machine
from bench.contract_fields import TEMPLATE
from bench.contract_probes import GROUPS, Probe, probes
from bench.contract_shape import differences, reduced, summary
from tools.generator import SHAPES, cached_model

FLAGS = ("-c", "8192", "-t", "1", "-ub", "128")

WRONG = "a value of the wrong kind is refused, where llama-server silently takes the default"
REASONS: tuple[tuple[str, str, str], ...] = (
    ("", r"^status: 500 / 4\d\d$", "bad input is the client's mistake: 4xx where llama-server fails with 500"),
    ("", r"extra (\S+\.)?timings\.(source|\w+_ms)$", "says what the cache did"),
    ("", r"extra (\S+\.)?(generation_settings|params)\.cache_prompt$", "shows whether the cache may be used"),
    ("/props", r"extra (full_cache|prefix_cache)$", "shows the cache's policy and size"),
    ("^/props", r"value of bos_token", "the model has no such token; llama-server shows what its id would be"),
    ("^/metrics", r"extra pyctl:", "the cache's own metrics"),
    ("", r"^status: 500 / 200$", "taken, where llama-server fails with 500"),
    (
        r"(='x'|=7|=\[7\]|kwargs=\[\]|='json'|messages=None|wrong add_special|fraction)(, streamed)?$",
        r"^status: 200 / 400$",
        WRONG,
    ),
    (r"(repeat|penalty)_last_n=-1", r"^status: 400 / 200$", "-1 is the whole context, as earlier releases had it"),
    ("", r"value of .*n_ctx: 4096 / 8192$", "each sequence may use the whole context"),
    ("/props", r"value of ui:", "there is no web interface"),
    ("/props", r"value of chat_template_caps.supports_typed_content", "found by rendering; llama-server misses a loop"),
    ("/props", r"value of chat_template: ", "ends as the file does"),
    ("", "header access-control-", "headers that browsers need to send a key from another origin"),
    ("(messages|input)=\\[\\]", "", "a conversation without messages is a mistake, as for OpenAI"),
    ("^/apply-template messages=list number 10$", "value of prompt", "the template itself joins parts of content"),
    ("", r"^(status: 0|type: RemoteProtocolError) / ", "llama-server ends"),
    ("json_schema=", "value of generation_settings.grammar", "a schema becomes another grammar for the same texts"),
    ("ignore_eos", r"logit_bias\[\]", "logit_bias is shown as it was asked for"),
    ("return_progress=True, streamed", r"tokens\[\]: 1 / 0", "progress comes without tokens"),
    ("n_probs=-1", "value of generation_settings.n_probs", "shown as what it means"),
    ("(n|n_cmpl)=99", r"^status: 400 / 200$", "taken one after another when there are fewer sequences"),
    (r"(n|n_cmpl)=2, streamed", "value of (choices.*)?index", "two replies at a time come in any order"),
    ("verbose=True", "(__verbose|preserved_tokens)", "what only developers of llama-server look at, in whole replies"),
    ("(max_tokens|n_predict)=0", "missing .*reasoning_content", "no token is made"),
    ("add_generation_prompt=False", "reasoning_content|content", "without a header the reply opens no reasoning block"),
    ("tools and response_format", "", "the reply follows the schema"),
    ("control unknown id", "", "a running reply cannot be steered"),
    ("^/v1/embeddings", "value of model", "the model's name, not its path"),
    ("^/ ", r"^status: 404 / 401$", "only health is public"),
    ("responses", r"extra ", "members of OpenAI's API that llama-server leaves out"),
    ("responses", r'status: "completed" / "incomplete"', "as OpenAI says it when the limit of tokens was reached"),
    ("previous_response_id", r"type of error\.code", "OpenAI's error, by which its SDK knows it"),
    ("^/v1/messages.* tools, any", "", "the reply begins with the call; llama-server lets the model talk before it"),
    ("^/v1/messages.*thinking={'type': 'disabled'}", "", "thinking is off when it is switched off"),
    ("^/v1/messages thinking", "", "the grammar is kept; llama-server drops it from requests of this API"),
    ("^/v1/messages stop sequence", 'stop_reason: "end_turn" / "stop_sequence"', "as Anthropic's API says it"),
    ("^/v1/messages", r"extra type$", "errors in the form of Anthropic's API"),
    ("^/v1/messages", r"extra (\S+\.)?usage\.", "counts of Anthropic's API that llama-server leaves out"),
)
"""Deliberate differences: what matches (endpoint and probe; one line of the difference), and why it is so."""


class Server:
    """A server process that is started when it is first asked, and again after it has ended by itself."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = command, log
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(timeout=30, headers={"accept-encoding": "identity"})
        self._broken = False

    def ask(self, probe: Probe) -> dict[str, Any]:
        """The reduced reply; status 0 if the server ended or sent no whole reply."""
        content = probe.body if isinstance(probe.body, bytes) or probe.body is None else json.dumps(probe.body)
        headers = {"content-type": "application/json", **probe.headers} if content is not None else probe.headers
        try:
            self._start()
            response = self._client.request(
                probe.method, probe.path or probe.endpoint, content=content, headers=headers
            )
            return reduced(response, response.content, cors="Origin" in probe.headers)
        except (httpx.TransportError, RuntimeError) as error:
            return {"status": 0, "type": type(error).__name__, "headers": {}, "body": None}

    def _start(self) -> None:
        if self._broken:
            raise RuntimeError("the server does not start")
        if self._process is not None and self._process.poll() is None:
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*self._command, "--port", str(port)], stdout=log, stderr=log)
        self._client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        for _ in range(300):
            for path in ("/health", "/pre/health"):
                try:
                    if self._client.get(path).is_success:
                        return
                except httpx.TransportError:
                    pass
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        self._broken = True
        raise RuntimeError("the server does not start")

    def close(self) -> None:
        self._client.close()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextmanager
def servers(commands: dict[str, list[str]], directory: Path) -> Iterator[dict[str, dict[str, Server]]]:
    """One server of each command for each group."""
    found: dict[str, dict[str, Server]] = {}
    for group, flags in GROUPS.items():
        found[group] = {}
        for name, command in commands.items():
            slots = directory / f"slots-{name}"
            slots.mkdir(exist_ok=True)
            filled = [flag.format(directory=f"{slots}/") for flag in flags]
            found[group][name] = Server([*command, *filled], directory / f"{name}-{group}.log")
    try:
        yield found
    finally:
        for both in found.values():
            for server in both.values():
                server.close()


def judge(probe: Probe, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A row: the verdict is same, reason or differs; what is left over counts."""
    where = f"{probe.endpoint} {probe.what}"
    left, reasons = [], []
    for line in differences(theirs, ours, probe.show):
        known = [why for place, what, why in REASONS if re.search(place, where) and re.search(what, line)]
        reasons += known[:1]
        if not known:
            left.append(line)
    verdict = "differs" if left else "reason" if reasons else "same"
    row: dict[str, Any] = {"endpoint": probe.endpoint, "what": probe.what, "method": probe.method, "verdict": verdict}
    return {**row, "differences": left, "reasons": list(dict.fromkeys(reasons)), "llama-server": theirs, "pyctl": ours}


def table(rows: Sequence[dict[str, Any]], title: str) -> str:
    """The rows as Markdown."""
    count = Counter(row["verdict"] for row in rows)
    lines = [f"# {title}", "", machine(), ""]
    lines += [
        f"{len(rows)} requests: {count['same']} same, {count['reason']} differ for a reason, {count['differs']} differ."
    ]
    lines += ["", "| endpoint | request | llama-server | pyctl | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        theirs, ours = summary(row["llama-server"]), summary(row["pyctl"])
        notes = "; ".join([*row["differences"][:4], *row["reasons"]])
        if len(row["differences"]) > 4:
            notes += f"; and {len(row['differences']) - 4} more"
        cells = (
            f"{row['method']} {row['endpoint']}",
            row["what"],
            theirs,
            "the same" if row["verdict"] == "same" else ours,
            f"{row['verdict']}{': ' if notes else ''}{notes}",
        )
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return text if len(text) <= 400 else f"{text[:397]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", metavar="BINARY", required=True)
    parser.add_argument("--shape", default="tiny-hybrid", choices=[name for name in SHAPES if name.startswith("tiny")])
    parser.add_argument("--only", metavar="REGEX", default="", help="probes whose endpoint and name match")
    parser.add_argument("--keep", action="store_true", help="write results/contract.md")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        template = directory / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        model = str(cached_model(SHAPES[arguments.shape], directory))
        flags = ["-m", model, *FLAGS, "--chat-template-file", str(template)]
        commands = {
            "llama-server": [arguments.llama_server, *flags],
            "pyctl": [sys.executable, "-m", "pyctl", "serve", *flags],
        }
        with servers(commands, directory) as groups:
            for probe in probes():
                if re.search(arguments.only, f"{probe.endpoint} {probe.what}"):
                    pair = groups[probe.group]
                    rows.append(judge(probe, pair["llama-server"].ask(probe), pair["pyctl"].ask(probe)))
    for row in rows:
        if row["verdict"] == "differs":
            print(f"{row['method']} {row['endpoint']} {row['what']}")
            for line in row["differences"]:
                print(f"    {line}")
    text = table(rows, "What a client sees of llama-server and of pyctl")
    print(next(line for line in text.splitlines() if " requests: " in line))
    if arguments.keep:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "contract.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
