"""Snapshots with known bytes, and comparing what comes back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.reads import finish
from pyctl.cache.snapshot import NOTHING, Block, Prefix, PromptMatch, Segment, Snapshot, State
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.file_format import RULES, SIZES, StateName
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.writer import StoreWriter
from pyctl.errors import NotWrittenError, StateError
from pyctl.prompt import Tokens, as_tokens

ROW = 48
"""Bytes of rows per token."""

DRAFT_BASE = 64
DRAFT_ROW = 6
DRAFT_STATE = 84
"""Bytes of a draft model's blocks: at their beginning, per token, and of its part of a state."""


class DirectStore:
    """The folder of one model, read and written on the calling thread, without a queue."""

    def __init__(
        self,
        path: Path,
        fingerprint: str = "model",
        budget: int | None = None,
        *,
        daily_bytes: int | None = None,
        sizes: BlockSizes | None = None,
        space: Callable[[int], Block] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        self.directory = CacheDirectory(path, budget)
        self.folder = ModelFolder(self.directory, fingerprint, sizes)
        self.reader = StoreReader(self.folder, space)
        self.writer = StoreWriter(self.folder, daily_bytes)

    @property
    def home(self) -> Path:
        return self.folder.path

    @property
    def damaged(self) -> int:
        return self.reader.n_damaged

    def contains(self, prefix: Prefix) -> bool:
        return self.folder.contains(prefix)

    def lengths(self) -> frozenset[int]:
        return self.folder.lengths

    def write(self, snapshot: Snapshot, label: str = "", *, spilled: bool = False) -> int:
        """Return bytes written; 0 also if the rows were given up or there is no room."""
        writing = self.writer.write(snapshot, label, spilled=spilled)
        try:
            while True:
                next(writing)
        except StopIteration as end:
            return int(end.value)
        except NotWrittenError:
            return 0

    def read(self, prefix: Prefix, tokens: Tokens) -> Snapshot | None:
        """Return the snapshot once all of it is here; None for a miss."""
        pending = finish(self.reader.open(prefix, tokens))
        try:
            return finish(pending.complete()) if pending is not None else None
        except StateError:
            return None

    def touch(self, prefix: Prefix) -> None:
        with self.directory.changing() as transaction:
            transaction.touch(self.folder.key(StateName.from_prefix(prefix)))

    def close(self) -> None:
        self.directory.close()


def rows_for(tokens: Tokens, start: int) -> Block:
    """Return rows that only these tokens at these positions have."""
    values = np.repeat(
        tokens.astype(np.int64) * 7919 + np.arange(start, start + tokens.size) * 104_729, ROW
    )
    return (values + np.arange(values.size)).astype(np.uint8)


def segment(
    tokens: Sequence[int],
    parent: Segment | None = None,
    start: int | None = None,
    rows: bool = True,
) -> Segment:
    """Return the next segment after ``parent``, or from ``start`` on; an end in its middle and at
    its end.
    """
    ids = as_tokens(tokens)
    if start is None:
        start = parent.end if parent else 0
    ends = tuple(sorted({start + max(1, ids.size // 2), start + ids.size}))
    return Segment(start, ids, rows_for(ids, start) if rows else NOTHING, parent, ends)


def snapshot(
    at: Segment, n: int | None = None, exact: bool = True, state: int | None = 500
) -> Snapshot:
    """Return a snapshot at the end of ``at``, or within it; ``state`` bytes."""
    n = at.end if n is None else n
    probe = Snapshot(Prefix(b"", n), at, State())
    prefix = PromptMatch(probe.last_tokens(probe.n)).prefix(n)
    blob = np.random.default_rng(n).integers(0, 256, state, dtype=np.uint8) if state else NOTHING
    return Snapshot(prefix, at, State.from_parts(blob), exact)


def conversation(
    seed: int, turns: int = 3, step: int = 20, parent: Segment | None = None
) -> list[Snapshot]:
    """Return a snapshot after each turn."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(turns):
        parent = segment(random.integers(0, 1000, step).tolist(), parent)
        found.append(snapshot(parent))
    return found


def draft_block(size: int, seed: int) -> Block:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def drafting(made: list[Snapshot]) -> list[Snapshot]:
    """Return the same conversation, evaluated with a draft model beside the model."""
    found: list[Snapshot] = []
    for each in made:
        link = each.segment
        parent = found[-1].segment if found else None
        rows = draft_block(DRAFT_BASE + DRAFT_ROW * link.tokens.size, link.end)
        copy = Segment(link.start, link.tokens, link.rows, parent, link.batch_ends, draft_rows=rows)
        state = State.from_parts(each.state.recurrent, draft_block(DRAFT_STATE, each.n + 1))
        found.append(Snapshot(each.prefix, copy, state, each.exact))
    return found


def flat(given: Snapshot) -> list[tuple[object, ...]]:
    return [
        (
            link.start,
            last,
            link.tokens.tolist(),
            link.batch_ends,
            link.rows.tobytes(),
            link.draft_rows.tobytes(),
        )
        for link, last in given.chain.items()
    ]


def check_equal(found: Snapshot | None, expected: Snapshot) -> None:
    assert found.prefix == expected.prefix
    assert found.state.recurrent.tobytes() == expected.state.recurrent.tobytes()
    assert found.state.draft.tobytes() == expected.state.draft.tobytes()
    assert found.exact == expected.exact
    assert flat(found) == flat(expected)
    assert found.batch_ends == expected.batch_ends


def check_read(store: DirectStore, expected: Snapshot) -> None:
    assert store.contains(expected.prefix)
    assert expected.n in store.lengths()
    check_equal(
        store.read(expected.prefix, as_tokens([*expected.last_tokens(expected.n), 5, 6])), expected
    )


def on_disk(directory: Path) -> list[Path]:
    """Return every file of every fingerprint, but for the few bytes that say under which rules and
    how large parts are.
    """
    homes = [home for home in directory.iterdir() if home.is_dir()]
    return sorted(
        path for home in homes for path in home.iterdir() if path.name not in (RULES, SIZES)
    )


@contextmanager
def failing(call: str, after: int, lasts: int, number: int) -> Iterator[None]:
    """Let ``lasts`` calls of `os` fail, ``after`` others have succeeded."""
    real = getattr(os, call)
    n_calls = 0

    def run(*args: object, **options: object) -> object:
        nonlocal n_calls
        n_calls += 1
        if after < n_calls <= after + lasts:
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    with patch.object(os, call, run):
        yield


def check_directory(store: DirectStore) -> None:
    """Check that index and files agree, that nothing is left over, and that the budget holds."""
    report = store.directory.verify()
    assert report.is_consistent, report
    assert not report.foreign
    files = on_disk(store.directory.path)
    assert sum(path.stat().st_size for path in files) == store.directory.n_bytes == report.n_bytes
    assert store.directory.budget is None or store.directory.n_bytes <= store.directory.budget


def opened(store: DirectStore, expected: Snapshot, base: Snapshot | None) -> Snapshot:
    pending = finish(
        store.reader.open(
            expected.prefix, as_tokens([*expected.last_tokens(expected.n), 5, 6]), base
        )
    )
    return finish(pending.complete())
