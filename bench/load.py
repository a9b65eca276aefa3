"""Where the seconds of a load go: one of several models, loaded for the first time, and after it made way for another.

    python -m bench.load                                  # 64 tiny layers, the vocabulary of a real model
    python -m bench.load -m model.gguf --flags="-c 32768" # on a GPU, too
    python -m bench.load --against ../other               # both checkouts in turn

Two names of one file, of which one is loaded at a time, so that each load is a switch. The rows below a load are calls
of llama.cpp and of the fingerprint within it, on whichever thread; what is left is the engine, the template and Python.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as api

from bench.common import add_model, parse, parser_of, show, shown, tell
from bench.compare import add_comparison, compare
from pyctl.cli import assemble
from pyctl.cli.arguments import parse_serve
from pyctl.cli.serve_command import several
from pyctl.llama import llama_backend, loader
from pyctl.llama.fingerprint import fingerprint
from pyctl.llama.library import redirect_log
from tools.generator import SHAPES, read_vocab, write_model

VOCABULARY = Path(__file__).parents[1] / "vendor" / "llama.cpp" / "models" / "ggml-vocab-qwen35.gguf"

LOADS = ("first load", "first load of another", "load again", "load of another again")

Record = dict[str, Any]


class Spent:
    """Seconds and calls by what was called."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._calls: dict[str, int] = defaultdict(int)

    def clock(self, name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, counted as what ``name`` of its arguments says."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, what = time.perf_counter(), name(*args)
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[what] += time.perf_counter() - began
                self._calls[what] += 1

        return timed

    def take(self) -> list[tuple[str, float, int]]:
        """All since the last call."""
        found = [(what, self._seconds[what], self._calls[what]) for what in sorted(self._seconds)]
        self._seconds.clear()
        self._calls.clear()
        return found


def kind_of(path: bytes, params: Any) -> str:
    """What a model is opened for."""
    if params.vocab_only:
        return "vocabulary"
    return "model without weights" if params.no_alloc else "model"


def clocked(spent: Spent) -> None:
    """Count the expensive calls of this process."""
    api.llama_model_load_from_file = spent.clock(kind_of, api.llama_model_load_from_file)
    api.llama_init_from_model = spent.clock(lambda *_: "context", api.llama_init_from_model)
    setattr(loader, "fingerprint", spent.clock(lambda *_: "fingerprint", fingerprint))  # noqa: B010  # not exported
    backend = llama_backend.LlamaBackend
    for owner, name, what in (
        (backend, "_open_memory", "first token and checks"),
        (assemble, "reserve_pinned", "pinned memory"),
        (assemble, "_chat_format", "template and disk"),
    ):
        setattr(owner, name, spent.clock(lambda *_, what=what: what, getattr(owner, name)))


def measure(path: str, flags: Sequence[str]) -> list[Record]:
    """A record for each load, and for what it spent."""
    spent, found = Spent(), list[Record]()
    clocked(spent)
    with tempfile.TemporaryDirectory() as directory:
        preset = Path(directory) / "models.ini"
        preset.write_text("".join(f"[{name}]\nmodel = {path}\n" for name in ("one", "two")), encoding="utf-8")
        argv = ["--models-preset", str(preset), "--models-max", "1", "--models-patience", "0", "--no-kv-cache", *flags]
        models = several(parse_serve(argv, {}), argv, {})
        assert models is not None
        thread = threading.Thread(target=models.run, daemon=True)
        thread.start()
        spent.take()
        for load, name in zip(LOADS, ("one", "two", "one", "two"), strict=True):
            began = time.perf_counter()
            models.ask(models.named(name)).result().close()
            took = time.perf_counter() - began
            found.append({"load": load, "what": "all", "s": took, "calls": 1.0})
            found += [{"load": load, "what": what, "s": s, "calls": float(n)} for what, s, n in spent.take()]
            time.sleep(2.0)  # what it prepares behind the load is not part of the next one
            spent.take()
        models.close()
        thread.join()
    return found


@contextmanager
def model_of(given: str | None, *, small: bool) -> Iterator[str]:
    """The file that was given, or one that is made."""
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory() as directory:
        path, shape = Path(directory) / "deep.gguf", SHAPES["tiny-hybrid-nextn"]
        if small or not VOCABULARY.exists():
            write_model(path, shape)
        else:
            write_model(path, replace(shape, num_layers=64, vocab_size=248_320), vocab=read_vocab(VOCABULARY))
        yield str(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_model(parser, None)
    add_comparison(parser)
    parser.add_argument("--flags", default="-c 32768", help="of the models, in one argument")
    options = parse(parser, argv, flags="-c 1024")
    redirect_log()
    with model_of(options.model, small=options.quick) as path:
        if options.against:
            return compare("bench.load", ["-m", path, f"--flags={options.flags}"], options.against, options.rounds)
        found = measure(path, options.flags.split())
    if options.json:
        return tell(found)
    rows = [[r["load"] if r["what"] == "all" else "", r["what"], f"{r['calls']:.0f}", shown(r["s"])] for r in found]
    show("Loads of one of several models", ["", "", "calls", "s"], rows, keep="load" if options.keep else "")


if __name__ == "__main__":
    main()
