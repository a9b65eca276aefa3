"""A server that is killed while it evaluates a long prompt: how much of the prompt is evaluated
again after the restart.

python -m bench.kill                  # 60,000 tokens, killed at 90 %: some minutes
python -m bench.kill --no-interim     # without interim snapshots
python -m bench.kill -m FILE.gguf     # another model than the tiny ones
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import add_model, parse, parser_of, show, words
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tools.generator import TINY_DENSE, TINY_HYBRID, cached_model

ANSWER_SECONDS = 3600
"""The maximum wait for an event of a server."""


class Killed(NamedTuple):
    """The result of one kill.

    Attributes:
        n_prompt: The tokens of the prompt.
        n_killed: The tokens that were evaluated when the process was killed.
        n_restored: The tokens that the restarted server read from disk.
        n_bytes: The bytes in the cache directory at the restart.
        is_same: Whether the reply equals the one without the cache.
    """

    n_prompt: int
    n_killed: int
    n_restored: int
    n_bytes: int
    is_same: bool

    @property
    def part_again(self) -> float:
        """The part of the evaluated tokens that was evaluated again."""
        return (self.n_killed - self.n_restored) / self.n_killed


def main(argv: Sequence[str] | None = None) -> None:
    """Kill a server for each model, and print a table."""
    parser = parser_of(__doc__)
    add_model(parser, None)
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens of the prompt, about")
    parser.add_argument("--part", type=float, default=0.9, help="evaluated part at the kill")
    parser.add_argument("--no-interim", action="store_true", help="write no interim snapshots")
    options = parse(parser, argv, tokens=3000)
    flags = ["--kv-cache-interim", "0"] if options.no_interim else []
    if options.quick:
        flags = flags or ["--kv-cache-interim", "0.1"]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name, path in _models(options, Path(directory)):
            killed = kill(path, Path(directory) / name, options, flags)
            rows.append(
                (
                    name,
                    f"{killed.n_prompt:,}",
                    f"{killed.n_killed:,}",
                    f"{killed.n_restored:,}",
                    f"{killed.n_killed - killed.n_restored:,}",
                    f"{100 * killed.part_again:.1f} %",
                    f"{killed.n_bytes / 2**20:.1f}",
                    killed.is_same,
                )
            )
    show(
        f"kill -9 at {100 * options.part:.0f} % of a prompt, and a restart",
        ["model", "prompt", "evaluated", "restored", "again", "part", "MiB on disk", "same reply"],
        rows,
        keep="kill" if options.keep else "",
    )


def _models(options: argparse.Namespace, directory: Path) -> Iterator[tuple[str, Path]]:
    if options.model is not None:
        yield Path(options.model).stem, Path(options.model)
        return
    for shape in (TINY_DENSE, TINY_HYBRID):
        yield shape.name, cached_model(shape, directory)


def kill(model: Path, directory: Path, options: argparse.Namespace, flags: Sequence[str]) -> Killed:
    """Kill a server on ``model`` while it evaluates a prompt, and ask a second one the same. The
    cache is in ``directory``.
    """
    n_ctx = options.tokens + 512
    base = [*PYCTL_SERVE, "-m", str(model), "-c", str(n_ctx), "-t", str(options.threads), "--exact"]
    cached = [*base, "--kv-cache-dir", str(directory / "kv"), *flags]
    environment = {"PYCTL_KV_CACHE": "on"}
    directory.mkdir()
    prompt = words(directory.name, options.tokens)
    first = ServerProcess(cached, directory / "killed.log", environment=environment)
    first.start()
    n_prompt, n_killed = _kill_at(first, prompt, options.part)
    n_bytes = sum(path.stat().st_size for path in (directory / "kv").rglob("*") if path.is_file())
    again = ServerProcess(cached, directory / "restarted.log", environment=environment)
    with again:
        *_, warm = _completion(again, prompt)
        # Without the cache, the same batches are evaluated: the reply has to be equal.
        *_, cold = _completion(again, prompt, cache_prompt=False)
    n_restored = warm["timings"]["cache_n"]
    return Killed(n_prompt, n_killed, n_restored, n_bytes, warm["content"] == cold["content"])


def _kill_at(server: ServerProcess, prompt: str, part: float) -> tuple[int, int]:
    """Kill ``server`` when it has evaluated this ``part`` of ``prompt``; return the tokens of the
    prompt, and of the part.
    """
    with closing(_completion(server, prompt, stream=True, return_progress=True)) as events:
        for event in events:
            progress = event.get("prompt_progress", {"processed": 0, "total": 1})
            if progress["processed"] >= part * progress["total"]:
                server.kill()
                return progress["total"], progress["processed"]
    raise RuntimeError("the prompt was evaluated before the server could be killed")


def _completion(server: ServerProcess, prompt: str, **fields: Any) -> Generator[dict[str, Any]]:
    """Yield the events of a greedy completion; the last, or without ``stream`` the only one, has
    the timings and, without ``stream``, the whole text.
    """
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{server.url}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        if not fields.get("stream"):
            yield json.load(answer)
            return
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])


if __name__ == "__main__":
    main()
