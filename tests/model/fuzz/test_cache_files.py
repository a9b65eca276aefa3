"""Cache files with valid checksums and wrong numbers are misses and change no reply."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.disk.disk import Disk
from pyctl.disk.file_format import INDEX, parse
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import Prompt, as_tokens
from tests.model.fuzz.cases import fuzzed
from tests.unit.disk.lies import RawFile
from tests.unit.engine.draft_server import RememberedDrafts
from tests.unit.engine.drive import ask, tier_on

PROMPT = Prompt(as_tokens(np.random.default_rng(5).integers(0, 250, 200)), (70, 140, 190))

ODD = st.sampled_from(
    [
        0,
        1,
        2,
        7,
        63,
        64,
        69,
        71,
        127,
        128,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32,
        2**64 - 1,
        *(2**k for k in range(44, 64)),
    ]
)
"""Numbers at which something may wrap, and some near those that are right."""


@st.composite
def changes(draw: st.DrawFn, n_files: int) -> list[tuple[Any, ...]]:
    """Draw changes of files, each with the index of its file; half of the time a single one."""
    count = draw(st.sampled_from([1, 1, 1, 2, 3]))
    made: list[tuple[Any, ...]] = []
    for _ in range(count):
        at = draw(st.integers(0, n_files - 1))
        what = draw(
            st.sampled_from(
                [
                    "number",
                    "created",
                    "parent",
                    "part",
                    "size",
                    "content",
                    "head",
                    "ends",
                    "parts",
                    "stored",
                    "kind",
                ]
            )
        )
        made.append(
            (
                at,
                what,
                draw(st.integers(0, 2)),
                draw(ODD),
                draw(st.binary(max_size=12)),
                draw(st.floats()),
            )
        )
    return made


def change(
    file: RawFile, names: list[str], what: str, which: int, number: int, data: bytes, real: float
) -> None:
    """Apply one change to ``file`` in place; ``names`` are the names of all files."""
    part = file.parts[which % len(file.parts)]
    if what == "number":
        setattr(file, ("start", "end")[which % 2], number)
    elif what == "created":
        file.created = real
    elif what == "parent":
        file.parent = (b"", names[number % len(names)].encode(), data)[which]
    elif what == "part":
        name, maximum = (("what", 256), ("codec", 256), ("phase", 256))[which]
        setattr(part, name, number % maximum if number < 2**31 else number % 5)
    elif what == "size":
        if which == 0:
            part.size = number
        elif which == 1:
            part.chunk = number % 2**32
        else:
            part.size = max(len(part.pieces[0]) + number % 9 - 4, 0)
            part.pieces = [part.pieces[0][: part.size].ljust(part.size, b"\0")]
    elif what == "content":
        part.pieces = (
            [part.pieces[0] + data] if which else [part.pieces[0][: number % (part.size + 1)]]
        )
        part.size = len(part.pieces[0])
    elif what == "head" and part.what >= 3 and len(part.pieces[0]) >= 64:
        # The fields of a block's own header: magic, version, layout, both positions. What comes
        # after are K and V. A draft model's say first who wrote them.
        blob = bytearray(part.pieces[0])
        at = (0, 16, 24)[which] + (64 if part.what >= 5 and number % 4 else 0)
        if at + 8 > len(blob):
            return
        old = struct.unpack_from("<Q", blob, at)[0]
        # Added to a position, a power of two can leave the product with the bytes of a row as it
        # was.
        blob[at : at + 8] = struct.pack(
            "<Q", (old + number) % 2**64 if number.bit_count() == 1 else number
        )
        part.pieces = [bytes(blob)]
    elif what == "ends" and len(file.parts) > 1:
        file.parts[1].pieces = [data]
        file.parts[1].size = len(data)
    elif what == "parts":
        file.parts = (file.parts[::-1], file.parts[:1], file.parts * 2)[which]
        file.n_parts = number % 2**16 if number > 2**32 else None
    elif what == "stored":
        part.stored = [number]
    elif what == "kind":
        file.kind, file.flags = (
            (number % 4, number % 256) if which else (3 - file.kind, file.flags ^ 1)
        )


@dataclass
class FuzzedCache:
    loaded: Loaded
    directory: Path
    pristine: Path
    expected: list[int]

    def engine(self, recovers: bool = True) -> Engine:
        """Return an engine as after a restart. The thread that looks through the directory may come
        late, so that lies are read.
        """
        with pytest.MonkeyPatch.context() as patch:
            if not recovers:
                patch.setattr(Disk, "_recover", lambda tier: None)
            tier = tier_on(
                self.directory,
                self.loaded.info.fingerprint,
                sizes=self.loaded.backend.memory.shape.sizes,
                min_tokens=16,
                cold_max=80,
            )
        tier.recovery.result(60)
        self.loaded.backend.memory.clear(0)
        backend = self.loaded.backend
        speculation = Speculation(
            model=RememberedDrafts(backend) if backend.facts.draft_type else None
        )
        return Engine(backend, RamCache(8, None), EngineSettings(exact=True), tier, speculation)

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.pristine.rglob("*") if parse(path.name) is not None)


@pytest.fixture(scope="module", params=["tiny-hybrid", "tiny-dense", "tiny-hybrid-nextn"])
def bench(
    request: pytest.FixtureRequest, model_path: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FuzzedCache]:
    """Yield a cache that a real model has written, and the reply that it must not change."""
    directory = tmp_path_factory.mktemp("fuzzed")
    path = str(model_path(request.param))
    drafts = DraftSettings(draft_types=("draft-mtp",) if request.param.endswith("-nextn") else ())
    loaded = load(ModelSettings(path=path, n_ctx=512, n_ubatch=32, n_threads=1), drafts=drafts)
    bench = FuzzedCache(loaded, directory / "cache", directory / "pristine", [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        engine = bench.engine()
        bench.expected = ask(engine, PROMPT, 4).tokens
        engine.prefix_cache.close()
        os.rename(bench.directory, bench.pristine)
        assert len(bench.files) >= 2
        parts = {part.what for path in bench.files for part in RawFile.read(path).parts}
        assert ({5, 6} <= parts) == bool(drafts.draft_types)
        yield bench
    loaded.backend.unload()


def refused(bench: FuzzedCache, is_lost: bool, recovers: bool) -> None:
    """Ask with what lies in the directory; a miss must be one that verify knows of, unless the
    model refused.
    """
    engine = bench.engine(recovers)
    disk = engine.prefix_cache.disk
    is_consistent = disk.directory.verify().is_consistent
    reply = ask(engine, PROMPT, 4)
    assert reply.error is None
    assert reply.tokens == bench.expected
    assert engine.prefix_cache.disk.flush(60)
    event(f"{reply.done.stats.source} {reply.done.stats.n_cached}, damaged {disk.reader.n_damaged}")
    if disk.reader.n_damaged:
        assert not is_consistent or is_lost, "verify has not found what the read refused"
    engine.prefix_cache.close()


@fuzzed
@given(data=st.data())
def test_a_file_that_lies_is_a_miss_and_never_another_reply(
    bench: FuzzedCache, data: st.DataObject
) -> None:
    """Cache files with valid checksums and any false numbers are refused or harmless: the reply
    stays that of a cold run, since files may come from a shared directory or a damaged disk.
    """
    shutil.rmtree(bench.directory, ignore_errors=True)
    shutil.copytree(bench.pristine, bench.directory)
    files = [bench.directory / path.relative_to(bench.pristine) for path in bench.files]
    raw = [RawFile.read(path) for path in files]
    made = data.draw(changes(len(files)))
    touched = set()
    for at, what, *values in made:
        change(raw[at], [path.name for path in files], what, *values)
        touched.add(at)
    for at in touched:
        with suppress(struct.error):
            files[at].write_bytes(raw[at].pack())
    if data.draw(st.booleans()):
        for suffix in ("", "-wal", "-shm"):
            (bench.directory / f"{INDEX}{suffix}").unlink(missing_ok=True)
    refused(
        bench,
        recovers=data.draw(st.booleans()),
        is_lost=any(what == "head" for _, what, *_ in made),
    )
