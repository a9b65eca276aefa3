"""Compare the cache's replies with a cold run, bit for bit, in every architecture of llama.cpp,
and measure the cost.

    python -m bench.families --keep                  # the whole zoo, to bench/results/families.md
    python -m bench.families --only tiny-gemma3      # some of it
    python -m bench.families --other DIR --keep  # models of each class of memory, also on
                                                     # that `pyctl setup --llama-cpp` put into DIR

Each model of `tools.generator.zoo` gets a client's requests: appended turns, edits, branches,
regenerated replies, shortened histories, three conversations in turn, prompts beyond the window,
and some of it again after a restart from disk; with KV in 8 bits, and two at a time, each alone
afterwards. A cell counts the replies that differ from a cold run to the bit, of how many, and the
largest difference of a log probability among the five best of each token. "early" is what an edit
of an early message changes there: a row with a small number proves less. Each model runs in a
separate process, since a failed assertion of llama.cpp ends it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from bench.common import parse, parser_of, show, tell
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Snapshot
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.disk import Disk, WriteLimits
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.writer import StoreWriter
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece, Request
from pyctl.engine.sampling import Sampling
from pyctl.errors import PyctlError
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.machine.environment import LIBRARY_PATH, MTMD_PATH
from pyctl.machine.libraries import BUILT
from pyctl.processes.module_command import module_command
from pyctl.prompt import Prompt, common_prefix
from tools.generator.families import FAMILIES, cached_family
from tools.generator.zoo import ZOO

N_CTX = 4096
N_UBATCH = 128
N_REPLY = 6
N_BEST = 5
START = 257
ASSISTANT = (97, 115)
"""Tokens of the byte vocabulary: the one that starts a message, and the name that opens a reply."""
MAX_SECONDS = 600
"""For one model; one that needs more is stuck."""

Message: TypeAlias = "tuple[int, int] | str"
"""Seed and length of a made-up message, or the name of the step whose reply it is."""


@dataclass(frozen=True)
class Step:
    """A request: the conversation that it sends, and a name for its relation to the requests before
    it.
    """

    name: str
    messages: tuple[Message, ...]


def _steps() -> list[Step]:
    """Return the requests of a model's client, in order. A message is (seed, length), or the name
    of a request, whose reply it is.
    """
    found: list[Step] = []

    def step(name: str, *messages: Message) -> tuple[Message, ...]:
        found.append(Step(name, messages))
        return messages

    opening: tuple[Message, ...] = ((1, 90), (2, 150))
    one = step("one turn", *opening)
    two = step("appended, 2", *one, "one turn", (3, 40))
    three = step("appended, 3", *two, "appended, 2", (4, 301))
    four = step("appended, 4", *three, "appended, 3", (5, 63), (6, 200))
    step("regenerated", *four)
    step("edited early", (1, 90), (7, 150), *four[2:])
    step("edited in the middle", *four[:4], (8, 280), *four[5:])
    step("edited late", *four[:-1], (9, 201))
    step("edited first", (1, 77), *four[1:])
    step("branched", *four[:-1], (10, 33))
    step("branched, longer", *three, "appended, 3", (11, 127))
    step("shortened to 3", *three)
    step("shortened to 1", *one)
    step("regenerated, 1", *one)
    for turn in range(3):
        for name, seed, first in (("a", 20, 131), ("b", 40, 400), ("c", 60, 64)):
            lengths = (first, 120, 65, 33, 190)[: 2 * turn + 1]
            step(f"in turn, {name}{turn}", *((seed + i, n) for i, n in enumerate(lengths)))
    step("back to 4", *four, "appended, 4", (12, 45))
    long = step("beyond the window", (80, 430), (81, 201), (82, 119))
    step("beyond, appended", *long, "beyond the window", (83, 90))
    step("beyond, regenerated", *long)
    step("beyond, edited", (80, 430), (84, 190), (82, 119))
    step("beyond, shortened", *long[:2])
    step("tiny", (90, 5))
    step("tiny, appended", (90, 5), "tiny", (91, 9))
    step("odd", (92, 257))
    step("odd, appended", (92, 257), "odd", (93, 3), (94, 511))
    return found


STEPS = _steps()
AGAIN = (
    "appended, 4",
    "edited early",
    "branched",
    "shortened to 3",
    "shortened to 1",
    "in turn, a2",
    "in turn, b2",
    "in turn, c2",
    "back to 4",
    "beyond, appended",
    "beyond, edited",
    "beyond, shortened",
    "odd, appended",
)
FEWER = (
    "one turn",
    "appended, 2",
    "appended, 3",
    "appended, 4",
    "regenerated",
    "edited early",
    "branched",
    "shortened to 3",
    "back to 4",
    "beyond the window",
    "beyond, appended",
    "beyond, edited",
    "beyond, shortened",
)


def prompt_of(messages: Iterable[Message], replies: Mapping[str, Answer]) -> Prompt:
    """Return the tokens of ``messages`` and a generation header; ``replies`` come from earlier
    steps.
    """
    tokens: list[int] = []
    for message in messages:
        if isinstance(message, str):
            tokens += [START, *ASSISTANT, *replies[message].tokens]
        else:
            seed, n = message
            tokens += [START, *np.random.default_rng(seed).integers(0, 250, n - 1).tolist()]
    tokens += [START, *ASSISTANT]
    return Prompt.from_ids(tokens, np.flatnonzero(np.array(tokens) == START))


@dataclass(frozen=True)
class Answer:
    """``best`` are id and log probability of each token of the reply and of the five best in its
    place.
    """

    tokens: tuple[int, ...]
    best: tuple[tuple[tuple[int, float], ...], ...]
    n_cached: int
    n_prompt: int

    def difference(self, other: Answer) -> float:
        """Return the largest difference of a log probability, up to the first token that differs;
        for a token that is not among the best of both, its least possible difference.
        """
        found = 0.0
        for one, two in zip(self.best, other.best, strict=False):
            mine = dict(one)
            its = dict(two)
            found = max(
                [found, *(abs(mine[token] - its[token]) for token in mine.keys() & its.keys())]
            )
            for these, those in ((mine, its), (its, mine)):
                minimum = min(those.values())
                found = max(
                    [
                        found,
                        *(value - minimum for token, value in these.items() if token not in those),
                    ]
                )
            if one[0][0] != two[0][0]:
                break
        return found


def answers(engine: Engine, prompts: Sequence[Prompt], **fields: object) -> list[Answer]:
    """Return replies to ``prompts``, sent at the same time; raises the error of a request that
    failed.
    """
    made: Any = {
        "sampling": Sampling(temperature=0.0),
        "max_tokens": N_REPLY,
        "n_probs": N_BEST,
        **fields,
    }
    handles = [RequestHandle(Request(prompt, **made)) for prompt in prompts]
    for handle in handles:
        engine.submit(handle)
    while engine.step():
        pass
    return [
        _answer(list(handle.drain()), prompt)
        for handle, prompt in zip(handles, prompts, strict=True)
    ]


def _answer(events: Sequence[object], prompt: Prompt) -> Answer:
    for event in events:
        if isinstance(event, Failed):
            raise event.error
    done = events[-1]
    pieces = [event for event in events if isinstance(event, Piece)]
    assert isinstance(done, Done)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    best = tuple(best for piece in pieces for best in piece.probs)
    return Answer(tokens, best, done.stats.n_cached, prompt.tokens.size)


def empty_engine(backend: LlamaBackend, directory: Path | None, *, exact: bool) -> Engine:
    """Return an engine whose sequences are empty, with a cache in RAM and, if asked for, in
    ``directory``.
    """
    tier = None
    if directory is not None:
        folder = ModelFolder(CacheDirectory(directory), backend.memory.identity)
        limits = WriteLimits(min_tokens=32, close_seconds=60)
        policy = DiskPolicy.parse("full")
        tier = Disk(StoreReader(folder), StoreWriter(folder), policy, limits)
    backend.memory.cells.release_all()
    for seq in range(backend.facts.n_seqs):
        backend.memory.clear(seq)
    return Engine(backend, RamCache(0, None), EngineSettings(exact=exact), tier)


def cold_answer(backend: LlamaBackend, prompt: Prompt) -> Answer:
    """Return the reply of an engine without a cache, on a backend that holds nothing afterwards."""
    for seq in range(backend.facts.n_seqs):
        backend.memory.clear(seq)
    engine = Engine(backend, RamCache(0, 0), EngineSettings(exact=True))
    (answer,) = answers(engine, [prompt], cache_prompt=False)
    assert answer.n_cached == 0
    for seq in range(backend.facts.n_seqs):
        backend.memory.clear(seq)
    return answer


@dataclass
class Tally:
    """Comparison of ``n`` replies with cold ones: the names of those that differ, and the largest
    difference.
    """

    n: int = 0
    unequal: list[str] = field(default_factory=list)
    largest: float = 0.0
    n_cached: int = 0
    n_prompt: int = 0

    def count(self, name: str, answer: Answer, cold: Answer) -> None:
        """Compare one reply."""
        self.n += 1
        self.n_cached += answer.n_cached
        self.n_prompt += answer.n_prompt
        if answer.best != cold.best:
            self.unequal.append(name)
            self.largest = max(self.largest, answer.difference(cold))

    @property
    def share(self) -> float:
        """The fraction of the prompts' tokens that was cached."""
        return self.n_cached / max(self.n_prompt, 1)


@dataclass(frozen=True)
class Sizes:
    """RAM of all snapshots, in bytes for each of ``n_tokens`` different tokens: as they are, and as
    rows once and one state for each of ``n_snapshots``; and likewise all files of the cache, 0 if
    they were not measured.
    """

    n_snapshots: int
    n_tokens: int
    per_token: float
    min_per_token: float
    disk_per_token: float = 0.0


@dataclass
class Record:
    """Results of one model; ``tallies`` by "KV mode", and the options that llama.cpp ``refused``,
    by KV.
    """

    name: str
    memory: str = ""
    tallies: dict[str, Tally] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    sizes: Sizes | None = None
    early: float = 0.0
    failure: str = ""


KINDS: Mapping[str, Mapping[str, Any]] = {
    "f16": {},
    "q8_0": {"type_k": "q8_0", "type_v": "q8_0"},
    "-np 2": {"n_seqs": 2},
}
MODES = {"default": False, "--exact": True}


def measure(name: str, path: Path) -> Record:
    """Measure a model: each kind of KV, with and without --exact. The first kind defines the
    prompts.
    """
    record = Record(name)
    prompts = dict[str, Prompt]()
    for kind, more in KINDS.items():
        given = {"n_ctx": N_CTX, "n_ubatch": N_UBATCH, "n_threads": 1, "n_seqs": 1, **more}
        try:
            loaded = load(ModelSettings(path=str(path), **given))
        except PyctlError as error:
            record.refused[kind] = str(error)
            continue
        try:
            if not prompts:
                _measure_first(record, kind, loaded.backend, prompts)
            else:
                _measure_further(record, kind, loaded.backend, prompts)
        finally:
            loaded.backend.unload()
    return record


def _measure_first(
    record: Record, kind: str, backend: LlamaBackend, prompts: dict[str, Prompt]
) -> None:
    """Measure everything, and the part found on disk after a restart; fill in ``prompts``, which
    hold replies of cold runs.
    """
    cold: dict[str, Answer] = {}
    for step in STEPS:
        prompts[step.name] = prompt_of(step.messages, cold)
        cold[step.name] = cold_answer(backend, prompts[step.name])
    record.memory = f"{backend.memory.kind} ({backend.memory.kv.type})"
    record.early = cold["edited early"].difference(cold["appended, 4"])
    for mode, exact in MODES.items():
        with tempfile.TemporaryDirectory() as directory:
            for pass_, names in ((f"{kind} {mode}", tuple(cold)), (f"restart {mode}", AGAIN)):
                engine = empty_engine(backend, Path(directory), exact=exact)
                tally = record.tallies[pass_] = Tally()
                for name in names:
                    tally.count(name, answers(engine, [prompts[name]])[0], cold[name])
                engine.prefix_cache.close()
                if record.sizes is None:
                    sizes = sizes_of(engine)
                    files = (path for path in Path(directory).rglob("*") if path.is_file())
                    n_bytes = sum(path.stat().st_size for path in files)
                    record.sizes = replace(sizes, disk_per_token=n_bytes / sizes.n_tokens)


def _measure_further(
    record: Record, kind: str, backend: LlamaBackend, prompts: Mapping[str, Prompt]
) -> None:
    """Measure fewer prompts, only from RAM; with several sequences first so many at a time, then
    one by one.
    """
    n_seqs = backend.facts.n_seqs
    cold = {name: cold_answer(backend, prompts[name]) for name in FEWER}
    for mode, exact in MODES.items():
        engine = empty_engine(backend, None, exact=exact)
        for pass_, together in {f"{kind} {mode}": n_seqs, f"{kind} again {mode}": 1}.items():
            tally = record.tallies[pass_] = Tally()
            for at in range(0, len(FEWER), together):
                names = FEWER[at : at + together]
                for name, answer in zip(
                    names, answers(engine, [prompts[name] for name in names]), strict=True
                ):
                    tally.count(name, answer, cold[name])
            if n_seqs == 1:
                break
        engine.prefix_cache.close()


def sizes_of(engine: Engine) -> Sizes:
    """Return the sizes of the snapshots of ``engine``. The sizes of a row and of a state are
    measured on a text that it evaluates.
    """
    cache = engine.prefix_cache.cache
    snapshots: list[Snapshot] = [*cache.snapshots(), *cache.prompt_ends]
    held = sum(segment.device_only_bytes for segment in cache.segments())
    n_tokens = distinct([np.array(snapshot.tail(snapshot.n)) for snapshot in snapshots])
    n_bytes, memory, (low, high) = cache.n_bytes + held, engine.backend.memory, (512, 1024)
    cache.clear()
    memory.cells.release_all()
    saved = []
    for n in (low, high):
        engine.prefix_cache.forget(engine.sequences[0])
        for start in range(0, n, N_UBATCH):
            tokens = np.random.default_rng(start).integers(0, 250, N_UBATCH).astype(np.int32)
            engine.backend.evaluate(0, tokens, start)
        rows = memory.save_rows(0, 0, n)
        state = memory.save_state(0, n)
        memory.synchronize()
        saved.append(int(rows.block.nbytes) + state.n_bytes)
    row = (saved[1] - saved[0]) / (high - low)
    minimum = (row + 4) * n_tokens + (saved[0] - row * low) * len(snapshots)
    return Sizes(len(snapshots), n_tokens, n_bytes / n_tokens, minimum / n_tokens)


def distinct(texts: Iterable[np.ndarray]) -> int:
    """Return the number of different tokens of ``texts``, each (n,) int32; a beginning that several
    share counts once.
    """
    ordered = sorted(
        (text.astype(np.int32) for text in texts), key=lambda text: text.astype(">i4").tobytes()
    )
    found = 0
    before = np.empty(0, np.int32)
    for text in ordered:
        found += text.size - common_prefix(before, text)
        before = text
    return found


PROGRAM = module_command("bench.families")
"""The command of this benchmark."""


def in_own_process(
    name: str, libraries: Path | None = None, program: Sequence[str] = PROGRAM
) -> Record:
    """Return the measurements of a separate process of ``program`` with ``libraries``, by default
    this one's; a failure names the assertion or the last line.
    """
    command = [*program, "--json", "--only", name]
    chosen = (
        {variable: str(libraries) for variable in (LIBRARY_PATH, MTMD_PATH)}
        if libraries is not None
        else {}
    )
    environ = {**os.environ, **chosen}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=MAX_SECONDS, env=environ
        )
    except subprocess.TimeoutExpired:
        return Record(name, failure=f"no end within {MAX_SECONDS} s")
    if done.returncode == 0:
        return msgspec.convert(json.loads(done.stdout.splitlines()[-1])["records"][0], Record)
    lines = done.stderr.splitlines()
    asserted = [
        line for line in lines if "GGML_ASSERT" in line or line.startswith(("pyctl.", "ValueError"))
    ]
    text = (asserted or lines[-1:] or [f"exit code {done.returncode}"])[0]
    return Record(name, failure=re.sub(r"^\S*/", "", text))


CELLS = {
    "default": "f16 default",
    "--exact": "f16 --exact",
    "restart": "restart default",
    "restart --exact": "restart --exact",
    "q8_0": "q8_0 default",
    "q8_0 --exact": "q8_0 --exact",
    "two at a time": "-np 2 default",
    "then alone --exact": "-np 2 again --exact",
}
"""Columns, and the tallies that they show."""
TITLE = (
    "The cache of every architecture against cold runs: "
    f"{len(STEPS)} requests, then {len(AGAIN)} of these again"
)
COLUMNS = (
    "model",
    "memory",
    *CELLS,
    "cached / from disk",
    "bytes per token, least, on disk",
    "early",
)


def row_of(record: Record) -> list[object]:
    """Return the cells of a model's line in the table."""
    if record.failure:
        return [record.name, record.failure, *[""] * (len(COLUMNS) - 2)]
    shares = " / ".join(
        f"{record.tallies[key].share:.0%}" for key in ("f16 default", "restart default")
    )
    sizes = record.sizes
    ram = f"{sizes.per_token:,.0f}, {sizes.min_per_token:,.0f}" if sizes else ""
    ram += f", {sizes.disk_per_token:,.0f}" if sizes and sizes.disk_per_token else ""
    cells = [cell(record, key) for key in CELLS.values()]
    return [
        record.name,
        record.memory,
        *cells,
        shares,
        ram,
        f"{record.early:.0e}" if record.early else "0",
    ]


def cell(record: Record, key: str) -> str:
    """Return "differing/all" replies, and the largest difference if some differ."""
    tally = record.tallies.get(key)
    if tally is None:
        return "refused" if key.split(" ")[0] in " ".join(record.refused) else ""
    return f"{len(tally.unequal)}/{tally.n}" + (f", {tally.largest:.0e}" if tally.unequal else "")


def summary(records: Sequence[Record]) -> list[str]:
    """Return the lines below the table: the number of models with equal replies, by mode."""
    whole = [record for record in records if not record.failure]
    lines = []
    for name, key in CELLS.items():
        tallies = [record.tallies[key] for record in whole if key in record.tallies]
        equal = sum(not tally.unequal for tally in tallies)
        lines.append(
            f"{name}: {equal} of {len(tallies)} models have the bits of a cold run in all replies"
        )
    lines += [
        f"{record.name}: {kind} refused: {text}"
        for record in whole
        for kind, text in record.refused.items()
    ]
    return lines


RELEASES = "The cache of each class of memory against cold runs, on two releases of llama.cpp"
RELEASE_COLUMNS = ("model", "memory", "release", *CELLS, "cached / from disk")


def version_with(libraries: Path | None) -> str:
    """Return llama.cpp's version as a process with ``libraries`` loads it, and the parts of the
    extension that do not fit it.
    """
    chosen = (
        {variable: str(libraries) for variable in (LIBRARY_PATH, MTMD_PATH)}
        if libraries is not None
        else {}
    )
    shown = subprocess.run(
        module_command("pyctl.cli.setup_check"),
        capture_output=True,
        check=True,
        env={**os.environ, **chosen},
    )
    facts = json.loads(shown.stdout)
    return "; ".join([facts["version"], *facts["losses"]])


def rows_of_pairs(
    pairs: Iterable[tuple[Record, Record]], names: Sequence[str]
) -> list[list[object]]:
    """Return two lines for each model: on the release of this environment, and on the other."""
    rows: list[list[object]] = []
    for pair in pairs:
        for record, name in zip(pair, names, strict=True):
            model, memory, *cells, shares, _, _ = row_of(record)
            rows.append([model, memory, name, *cells, shares])
    return rows


def compare(options: Any) -> list[str]:
    """Measure the models on both releases and show one table; returns the names of models that
    failed.
    """
    places = (None, options.other.resolve())
    versions = [version_with(place) for place in places]
    names = [re.sub(r".*llama\.cpp (\S+).*", r"\1", version) for version in versions]
    pairs = []
    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = [
            [pool.submit(in_own_process, model, place) for place in places]
            for model in options.only
        ]
        for here, there in tasks:
            pairs.append((here.result(), there.result()))
            for row in rows_of_pairs(pairs[-1:], names):
                print(" | ".join(map(str, row)), flush=True)
    notes = [f"{name}: {version}" for name, version in zip(names, versions, strict=True)]
    for i, name in enumerate(names):
        notes += [f"{name}, {line}" for line in summary([pair[i] for pair in pairs])]
    show(
        RELEASES,
        RELEASE_COLUMNS,
        rows_of_pairs(pairs, names),
        keep="families-releases" if options.keep else "",
        notes=notes,
    )
    return [
        f"{record.name} on {name}"
        for pair in pairs
        for record, name in zip(pair, names, strict=True)
        if record.failure
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per model as it is measured, then the table. With --json, print the records of
    this process; with --other, compare two builds. SystemExit with the names of models that failed.
    """
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ZOO), metavar="NAME")
    parser.add_argument(
        "--other",
        type=Path,
        metavar="DIR",
        help="also measure with the libraries in DIR, built by pyctl setup",
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="models at the same time"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="measure in this process; print the records for a program",
    )
    options = parse(parser, argv, only=["tiny-lfm2"], jobs=1)
    if options.json:
        with tempfile.TemporaryDirectory() as directory:
            found = [measure(name, cached_family(ZOO[name], directory)) for name in options.only]
        return tell([asdict(record) for record in found])
    everything = list(FAMILIES if options.other is not None else ZOO)
    if options.keep and options.only not in (None, everything):
        parser.error("--keep writes the whole table: leave out --only")
    options.only = options.only or everything
    if options.other is not None:
        if not (options.other / BUILT).exists():
            parser.error(f"{options.other} holds no libraries that pyctl setup built")
        if failed := compare(options):
            raise SystemExit(f"not measured: {', '.join(failed)}")
        return None
    measured = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for record in pool.map(in_own_process, options.only):
            measured.append(record)
            print(" | ".join(str(each) for each in row_of(record)), flush=True)
    rows = [row_of(record) for record in measured]
    show(TITLE, COLUMNS, rows, keep="families" if options.keep else "", notes=summary(measured))
    if failed := [record.name for record in measured if record.failure]:
        raise SystemExit(f"not measured: {', '.join(failed)}")
    return None


if __name__ == "__main__":
    main()
