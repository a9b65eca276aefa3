"""The gain of predicted outputs (``prediction``) when a model writes a whole file again.

    python -m bench.prediction                     # models of tools/real_models.py
    python -m bench.prediction -m MODEL... --tokens 400 --repeat 5

A chat asks for a file of Python with one name replaced, and the reply is greedy. Two servers,
without drafts and with those of `cache`, each answer without a prediction and with the old file as
one. Cached prompts and remembered texts are dropped before each reply, so `cache` copies from the
prompt alone. All four take turns. Rates are the server's own ("timings"), medians; "gain" is the
median of the ratios to the reply without drafts of the same round. Accepted and rejected are
``accepted_prediction_tokens`` and ``rejected_prediction_tokens`` of the last round. "same text"
counts the replies that equal the one without drafts: without --exact, a batch of another width may
decide a near tie otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import pyctl
from bench.common import parse, parser_of, show, shown
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from pyctl.model_files import builtin_model
from tools.real_models import MODELS, path_of

FILE = Path(pyctl.__file__).parent / "cache" / "block_sizes.py"

SERVERS = {"none": "none", "cache": "cache"}
"""Values of --spec-type by the name of the server."""

RENAMES = (("covered", "resumed"), ("state", "snapshot"), ("row", "cell"))
"""A name of the file and its replacement, one pair a round."""

COLUMNS = ("tokens/s", "gain", "reply tokens", "accepted", "rejected", "same text")


@dataclass
class Case:
    """The replies of one server, with or without a prediction."""

    rates: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, body: dict[str, Any]) -> None:
        """Add the answer ``body``."""
        self.rates.append(body["timings"]["predicted_per_second"])
        self.texts.append(body["choices"][0]["message"]["content"])
        self.usage = body["usage"]


def request_of(number: int, n_chars: int, n_tokens: int, *, predicts: bool) -> dict[str, Any]:
    """Return the body of round ``number``: the first ``n_chars`` of the file with one name
    replaced, in a reply of at most ``n_tokens``.
    """
    code = FILE.read_text(encoding="utf-8")[:n_chars]
    old, new = RENAMES[number % len(RENAMES)]
    task = (
        f"```python\n{code}\n```\n\nWrite this whole file again with `{old}` renamed to `{new}`. "
        "Answer with the file alone, in one block of Python."
    )
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": task}],
        "max_tokens": n_tokens,
        "temperature": 0,
    }
    if predicts:
        body["prediction"] = {"type": "content", "content": code}
    return body


def answer(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to ``body`` of a server that remembers no prompt."""
    httpx.delete(f"{server.url}/cache", timeout=60).raise_for_status()
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
    reply.raise_for_status()
    return dict(reply.json())


@contextmanager
def servers_of(model: str, flags: Sequence[str]) -> Iterator[dict[str, ServerProcess]]:
    """Yield the servers by name, with ``flags``."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for name, spec_type in SERVERS.items():
            command = [*PYCTL_SERVE, "-m", model, "--spec-type", spec_type, *flags]
            server = ServerProcess(command, directory / f"{name}.log")
            servers[name] = stack.enter_context(server)
        yield servers


def measure(model: str, options: argparse.Namespace) -> dict[tuple[str, bool], Case]:
    """Return the replies of ``model`` by server and by whether they were predicted."""
    cases = {(name, predicts): Case() for name in SERVERS for predicts in (False, True)}
    with servers_of(model, ("-c", "4096", "-np", "1")) as servers:
        for number in range(options.repeat):
            for (name, predicts), case in cases.items():
                body = request_of(number, options.chars, options.tokens, predicts=predicts)
                case.add(answer(servers[name], body))
    return cases


def rows_of(model: str, cases: dict[tuple[str, bool], Case]) -> Iterator[Sequence[object]]:
    """Yield a row for each of ``cases`` of ``model``."""
    plain = cases["none", False]
    for (name, predicts), case in cases.items():
        ratios = [rate / other for rate, other in zip(case.rates, plain.rates, strict=True)]
        n_same = sum(text == other for text, other in zip(case.texts, plain.texts, strict=True))
        details = case.usage.get("completion_tokens_details", {})
        yield (
            Path(model).stem,
            name,
            "yes" if predicts else "no",
            shown(statistics.median(case.rates)),
            f"{statistics.median(ratios):.2f}",
            case.usage["completion_tokens"],
            details.get("accepted_prediction_tokens", ""),
            details.get("rejected_prediction_tokens", ""),
            f"{n_same} of {len(case.texts)}",
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per model, server, and with or without a prediction. The models are the real ones
    that were trained to answer if their files are there, and else the built-in one.
    """
    parser = parser_of(__doc__)
    real = [str(path_of(name)) for name in MODELS if name != "gemma3" and path_of(name).is_file()]
    parser.add_argument("-m", "--models", nargs="+", default=real or [str(builtin_model())])
    parser.add_argument("--chars", type=int, default=1500, help="characters of the file")
    parser.add_argument("--tokens", type=int, default=440, help="the maximum tokens of a reply")
    parser.add_argument("--repeat", type=int, default=3)
    quick: dict[str, Any] = {"models": [str(builtin_model())], "chars": 200, "tokens": 8}
    options = parse(parser, argv, **quick, repeat=1)
    rows = [row for model in options.models for row in rows_of(model, measure(model, options))]
    show(
        "Predicted outputs in edits of a whole file, without a GPU",
        ["model", "drafts", "prediction", *COLUMNS],
        rows,
        keep="prediction" if options.keep else "",
        weights=f"real, {', '.join(Path(model).stem for model in options.models)}",
    )


if __name__ == "__main__":
    main()
