"""The largest difference between the logits of rewound or restored runs and a cold run, on any
model and device.

Runs are restored from RAM and from disk. The last column, the distance of two different prompts, is
not 0.

    python -m bench.exact                              # the built-in tiny model
    python -m bench.exact -m model.gguf --tokens 3000

Every other number should be 0. The tests check tiny models; this script is for full-size models on
a GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.common import add_model, parse, parser_of, show, tell
from pyctl.cache.plan import batch_ends
from pyctl.cache.reads import finish
from pyctl.cache.snapshot import PromptMatch, Segment, Snapshot
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.writer import StoreWriter
from pyctl.llama.library.pinned_memory import reserve_pinned
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.model_files import builtin_model
from pyctl.prompt import Prompt, Tokens

Logits = dict[int, np.ndarray]

SETTINGS = (("f16", "on"), ("q8_0", "on"), ("q4_0", "on"), ("f16", "off"))
"""KV type and flash attention."""


def run(backend: LlamaBackend, tokens: Tokens, ends: list[int], start: int = 0) -> Logits:
    """Evaluate from ``start`` on; the logits at every batch end after it."""
    found = {}
    for end in ends:
        if end > start:
            backend.evaluate(0, tokens[start:end], start)
            found[end] = backend.logits(0)
            start = end
    return found


def difference(warm: Logits, cold: Logits) -> float:
    """Return the largest difference; nan if any logit is not a number."""
    return float(np.max([np.abs(logits - cold[end]).max() for end, logits in warm.items()]))


COLUMNS = [
    "cold again",
    "after saving",
    "rewound",
    "restored",
    "restored in part",
    "from disk",
    "other prompt",
]


def measure(loaded: Loaded, prompt: Prompt) -> list[float]:
    """Return differences, by COLUMNS: of a second cold run, of one that saved at each boundary, and
    of those that resumed.
    """
    backend = loaded.backend
    tokens = prompt.tokens
    cuts = list(prompt.boundaries)
    ends = batch_ends(prompt, backend.facts.n_ubatch)
    cold = run(backend, tokens, ends)
    backend.memory.clear(0)
    found = [difference(run(backend, tokens, ends), cold)]
    backend.memory.clear(0)
    segments: list[Segment] = []
    states = {}
    start = 0
    for cut in cuts:
        run(backend, tokens, [end for end in ends if end <= cut], start)
        rows = backend.memory.save_rows(0, start, cut)
        segments.append(
            Segment(start, tokens[start:cut], rows.block, segments[-1] if segments else None)
        )
        states[cut] = backend.memory.save_state(0, cut)
        start = cut
    backend.memory.synchronize()
    found.append(difference(run(backend, tokens, ends, start), cold))
    known = PromptMatch(tokens)
    saved = {
        cut: Snapshot(known.prefix(cut), segments[i], states[cut]) for i, cut in enumerate(cuts)
    }

    def resumed(snapshot: Snapshot, keep: int) -> float:
        """Return the difference of a run that resumes at ``snapshot`` and keeps ``keep`` live
        rows.
        """
        backend.memory.rewind(0, keep)
        backend.memory.restore(0, keep, snapshot.spans(keep, snapshot.n), snapshot.state)
        return difference(run(backend, tokens, ends, snapshot.n), cold)

    # Rewound in place, restored from nothing, and from within a batch on.
    found += [
        resumed(saved[cuts[2]], cuts[2]),
        resumed(saved[cuts[3]], 0),
        resumed(saved[cuts[1]], cuts[0] + 7),
    ]
    found.append(resumed(through_disk(saved[cuts[3]], loaded.info.fingerprint, tokens), 0))
    backend.memory.clear(0)
    other = run(backend, tokens[::-1].copy(), ends)
    return [*found, float(min(np.abs(logits - cold[end]).max() for end, logits in other.items()))]


def through_disk(snapshot: Snapshot, fingerprint: str, tokens: Tokens) -> Snapshot:
    """Return ``snapshot``, read back from disk as in another process."""
    with tempfile.TemporaryDirectory() as name:
        with closing(CacheDirectory(Path(name))) as directory:
            for _ in StoreWriter(ModelFolder(directory, fingerprint)).write(snapshot):
                continue  # all rows are in RAM
        with closing(CacheDirectory(Path(name))) as directory:
            reader = StoreReader(ModelFolder(directory, fingerprint))
            pending = finish(reader.open(snapshot.prefix, tokens))
            assert pending is not None
            return finish(pending.complete())


def differences(
    model: str, n: int, n_ubatch: int, n_threads: int
) -> Iterator[tuple[tuple[str, str], list[float]]]:
    """Yield the findings of `measure` in each of SETTINGS, for a prompt of ``n`` tokens. SystemExit
    for too few.
    """
    tokens = np.random.default_rng(5).integers(0, 200, n)
    prompt = Prompt.from_ids(tokens, [n // 10, n // 4, n // 2, n * 9 // 10])
    if missing := {*prompt.boundaries} - {*batch_ends(prompt, n_ubatch)}:
        raise SystemExit(
            f"no batch ends at {min(missing)}, a place to resume from: give other --tokens or "
            "another -ub"
        )
    for kv, flash in SETTINGS:
        settings = ModelSettings(
            path=model, n_ctx=n + 64, n_ubatch=n_ubatch, type_k=kv, type_v=kv, flash_attn=flash
        )
        loaded = load(replace(settings, n_threads=n_threads))
        reserve_pinned(None)
        yield (kv, flash), measure(loaded, prompt)
        loaded.backend.unload()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the largest difference of logits of each way to resume, a row per kind of KV and flash
    attention. SystemExit if any but the last column is not 0.
    """
    parser = parser_of(__doc__)
    add_model(parser, str(builtin_model()))
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("-ub", type=int, default=512)
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    options = parse(parser, argv, tokens=640, threads=1)
    found = list(differences(options.model, options.tokens, options.ub, options.threads))
    if options.json:
        tell(
            [
                {"kv": kv, "flash": flash, "differences": dict(zip(COLUMNS, row, strict=True))}
                for (kv, flash), row in found
            ]
        )
        return
    title = "Largest difference of logits from a cold run"
    rows = [[*setting, *row] for setting, row in found]
    weights = f"real, {Path(options.model).stem}"
    show(
        title,
        ["KV", "flash", *COLUMNS],
        rows,
        keep="exact" if options.keep else "",
        weights=weights,
    )
    if any(row[:-1] != [0.0] * (len(COLUMNS) - 1) for _, row in found):
        raise SystemExit("a run that was resumed is not the cold one")


if __name__ == "__main__":
    main()
