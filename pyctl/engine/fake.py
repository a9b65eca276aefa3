"""A backend without a model, for tests: every output depends on every row, on the state, and on how batches were cut.

A row or state that is missing, stale, of another branch, or from other batch ends therefore changes all later tokens.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import NOTHING, Block, Span, State
from pyctl.engine.backend import BlockBytes, SavedSequence, SequenceTokens, TopTokens
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, OutOfCellsError, RequestError, StateError
from pyctl.prompt import Tokens

__all__ = ["FakeBackend"]

ROW = 16
HEADER = struct.Struct("<4sqq")


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"|".join(parts), digest_size=ROW).digest()


@dataclass
class _Seq:
    rows: list[bytes] = field(default_factory=list)
    state: bytes = bytes(ROW)
    at: int = 0


class FakeBackend:
    """``n_vocab`` tokens, of which 0 ends a reply and the others are the letters of the alphabet, over and over.

    All sequences share ``n_cells``, by default n_ctx. ``fail_loads`` makes that many following loads refuse their
    bytes. Saved blocks are zeros until they settle.
    """

    def __init__(
        self,
        kind: Literal["attention", "hybrid", "opaque"] = "hybrid",
        *,
        n_ctx: int = 4096,
        n_seqs: int = 1,
        n_ubatch: int = 64,
        n_vocab: int = 64,
        n_cells: int = 0,
    ) -> None:
        self.kind: Literal["attention", "hybrid", "opaque"] = kind
        self.n_ctx, self.n_seqs, self.n_ubatch, self.n_vocab = n_ctx, n_seqs, n_ubatch, n_vocab
        self.n_cells = n_cells or n_ctx
        self.fail_loads = 0
        self.n_evaluated = 0
        self.n_beats = 0
        self.closed = False
        self.interrupted = threading.Event()
        self._seqs = [_Seq() for _ in range(n_seqs)]
        self._outputs: list[bytes] = []
        self._used = 0
        self._on_the_way: list[tuple[Block, bytes]] = []

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, seq: int, tokens: Tokens, start: int, *, output: bool = True) -> None:
        if not 0 < tokens.size <= self.n_ubatch:
            raise EngineError(f"a batch of {tokens.size} tokens")
        self._take_cells(int(tokens.size))
        after = self._advance(seq, tokens, start)
        self._outputs = [after] if output else []

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        # Rounding is not modelled here: several tokens of a sequence give what they would give one by one.
        self._take_cells(sum(len(tokens) for _, tokens, _ in items))
        self._outputs = [
            self._advance(seq, np.array([token], np.int32), position + i)
            for seq, tokens, position in items
            for i, token in enumerate(tokens)
        ]

    def _advance(self, seq: int, tokens: Tokens, start: int) -> bytes:
        held = self._seqs[seq]
        if len(held.rows) != start or (self.kind != "attention" and held.at != start):
            raise EngineError(f"rows end at {len(held.rows)}, the state at {held.at}, the batch begins at {start}")
        if start + tokens.size > self.n_ctx:
            raise EngineError(f"{start + tokens.size} tokens are more than a sequence may have")
        # Like attention, a row depends on all rows before it; like GEMM rounding, on the shape of its batch.
        before = _hash(*held.rows[-1:], held.state if self.kind != "attention" else b"", str(tokens.size).encode())
        for i, token in enumerate(tokens.tolist()):
            before = _hash(before, struct.pack("<qq", start + i, token))
            held.rows.append(before)
        held.state = _hash(held.state, tokens.tobytes())
        held.at = start + int(tokens.size)
        self.n_evaluated += int(tokens.size)
        return self.digest(seq)

    def _take_cells(self, n: int) -> None:
        if sum(len(held.rows) for held in self._seqs) + n > self.n_cells:
            raise OutOfCellsError

    def digest(self, seq: int) -> bytes:
        """What the logits at the end of ``seq`` depend on: all its rows and its state."""
        held = self._seqs[seq]
        return _hash(*held.rows, held.state if self.kind != "attention" else b"")

    def sampler(self, sampling: Sampling, prompt: Tokens) -> _FakeSampler:
        return _FakeSampler(self, sampling.ignore_eos)

    def check(self, sampling: Sampling) -> None:
        pass

    def interrupt(self) -> None:
        self.interrupted.set()

    def prepare(self) -> None:
        pass

    def top_tokens(self, index: int, token: int, n: int) -> TopTokens:
        return ((token, 0.0), *((i, -float(i)) for i in range(n)))

    def is_end(self, token: int) -> bool:
        return token == 0

    def piece(self, token: int) -> bytes:
        return bytes([ord("a") + token % 26])

    # -- rows and state ----------------------------------------------------------------------------------------------

    def rows_size(self, first: int, last: int) -> int:
        return 0 if self.kind == "opaque" or first >= last else HEADER.size + (last - first) * ROW

    def state_size(self, seq: int) -> int:
        rows = len(self._seqs[seq].rows) * ROW if self.kind == "opaque" else 0
        return 0 if self.kind == "attention" else HEADER.size + ROW + rows

    def save_rows(self, seq: int, first: int, last: int) -> Block:
        if self.kind == "opaque":
            return NOTHING
        rows = self._seqs[seq].rows[first:last]
        if len(rows) != last - first:
            raise StateError(f"rows [{first}, {last}) are not there")
        return self._later(HEADER.pack(b"ROWS", first, last) + b"".join(rows))

    def save_state(self, seq: int, n: int) -> State:
        if self.kind == "attention":
            return State()
        held = self._seqs[seq]
        if held.at != n:
            raise StateError(f"the state stands at {held.at}, not {n}")
        data = HEADER.pack(b"STAT", 0, n) + held.state + (b"".join(held.rows) if self.kind == "opaque" else b"")
        return State.of(self._later(data))

    def synchronize(self) -> None:
        for block, data in self._on_the_way:
            block[:] = np.frombuffer(data, np.uint8)
        self._on_the_way.clear()

    def block_bytes(self) -> BlockBytes:
        return BlockBytes(self._used, self._used, sum(block.nbytes for block, _ in self._on_the_way))

    def load_rows(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        self.synchronize()
        self._maybe_fail()
        held = self._seqs[seq]
        if len(held.rows) != first:
            raise StateError(f"rows end at {len(held.rows)}, not {first}")
        self._take_cells(sum(stop - start for _, start, stop in spans))
        for block, start, stop in spans:
            magic, p0, p1 = HEADER.unpack(block[: HEADER.size].tobytes())
            if magic != b"ROWS" or not p0 <= start < stop <= p1 or start != len(held.rows):
                raise StateError(f"rows [{start}, {stop}) do not continue at {len(held.rows)}")
            data = block[HEADER.size :].tobytes()
            held.rows += [data[(i - p0) * ROW : (i - p0 + 1) * ROW] for i in range(start, stop)]

    def load_state(self, seq: int, n: int, state: State) -> None:
        self.synchronize()
        self._maybe_fail()
        held, block = self._seqs[seq], state.recurrent
        magic, _, at = HEADER.unpack(block[: HEADER.size].tobytes())
        data = block[HEADER.size :].tobytes()
        if magic != b"STAT" or at != n or (self.kind == "hybrid" and len(held.rows) != n):
            raise StateError(f"a state at {at} does not belong to {n}")
        if self.kind == "opaque":
            self._take_cells(n - len(held.rows))
        held.state, held.at = data[:ROW], n
        if self.kind == "opaque":
            held.rows = [data[i : i + ROW] for i in range(ROW, len(data), ROW)]

    def rewind(self, seq: int, n: int) -> None:
        if self.kind == "opaque" and n:
            raise StateError("nothing can be rewound")
        del self._seqs[seq].rows[n:]
        if n == 0:
            self.clear(seq)

    def clear(self, seq: int) -> None:
        self._seqs[seq] = _Seq()

    def save_file(self, seq: int, path: Path, tokens: Tokens, ends: Sequence[int]) -> int:
        held = self._seqs[seq]
        head = HEADER.pack(b"FILE", held.at, len(held.rows)) + np.array([len(ends), *ends], np.int32).tobytes()
        return path.write_bytes(head + held.state + tokens.tobytes() + b"".join(held.rows))

    def load_file(self, seq: int, path: Path) -> SavedSequence:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StateError(str(error)) from error
        magic, at, n = HEADER.unpack(data[: HEADER.size])
        if magic != b"FILE":
            raise StateError("no saved sequence")
        n_ends = struct.unpack_from("<i", data, HEADER.size)[0]
        ends = struct.unpack_from(f"<{n_ends}i", data, HEADER.size + 4)
        rest = np.frombuffer(data, np.uint8, offset=HEADER.size + 4 + 4 * n_ends)
        state, tokens, rows = np.split(rest, [ROW, ROW + 4 * n])
        self._take_cells(n)
        self._seqs[seq] = _Seq([row.tobytes() for row in rows.reshape(n, ROW)], state.tobytes(), at)
        return SavedSequence(tokens.view(np.int32).copy(), ends, len(data))

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        if tokens.size > self.n_ubatch:
            raise RequestError("too many tokens")
        return np.array([[tokens.sum(), tokens.size]], np.float32)

    def unload(self) -> None:
        self.closed = True

    def _later(self, data: bytes) -> Block:
        """A block that has its bytes only once somebody waits for them."""
        block = np.zeros(len(data), np.uint8)
        self._used += block.nbytes
        weakref.finalize(block, self._freed, block.nbytes)
        self._on_the_way.append((block, data))
        return block

    def _freed(self, n_bytes: int) -> None:
        self._used -= n_bytes

    def load(self) -> None:
        self.closed = False
        for seq in range(self.n_seqs):
            self.clear(seq)

    def _maybe_fail(self) -> None:
        if self.fail_loads > 0:
            self.fail_loads -= 1
            raise StateError("made to fail")


class _FakeSampler:
    def __init__(self, backend: FakeBackend, ignore_eos: bool) -> None:
        self._backend, self._first = backend, int(ignore_eos)

    def sample(self, index: int) -> int:
        value = int.from_bytes(self._backend._outputs[index][:8], "little")
        return self._first + value % (self._backend.n_vocab - self._first)

    def force(self, index: int, token: int) -> None:
        pass

    def top_tokens(self, token: int, n: int) -> TopTokens:
        return ((token, 1.0), *[(token, 1.0)][:n])

    def close(self) -> None:
        pass
