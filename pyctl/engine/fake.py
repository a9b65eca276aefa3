"""A backend without a model, for tests: every output depends on every row, on the state, and on how batches were cut.

A row or state that is missing, stale, of another branch, or from other batch ends therefore changes all later tokens.
"""

from __future__ import annotations

import copy
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
    n_least: int = -1  # what can be taken back of the last evaluation: everything from here on, once
    states: list[bytes] = field(default_factory=list)  # the planes: those of the last tokens, the end's last
    mark: tuple[int, bytes] | None = None
    draft_rows: list[bytes] = field(default_factory=list)  # as many as rows, or fewer; empty ones are missing
    hidden: bytes = b""  # the row that the draft model's next one is made of, empty if it is missing

    def cut_drafts(self, n: int, hidden: bytes = b"") -> None:
        """Leave the draft model ``n`` rows, none of them new, and ``hidden``."""
        self.draft_rows = self.draft_rows[:n] + [b""] * (n - len(self.draft_rows))
        self.hidden = hidden


class FakeBackend:
    """``n_vocab`` tokens, of which 0 ends a reply and the others are the letters of the alphabet, over and over.

    All sequences share ``n_cells``, by default n_ctx. ``fail_loads`` makes that many following loads refuse their
    bytes. Saved blocks are zeros until they settle. A hybrid has ``n_planes`` planes for each sequence, and fewer count
    when one evaluation has to be split. With a ``draft_type`` it drafts what will come, right three times of four: when
    depends on every row, and the state, of a draft model like a head.
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
        n_outputs: int = 0,
        n_planes: int = 3,
        most_drafts: int = 48,
        draft_type: str = "",
    ) -> None:
        self.kind: Literal["attention", "hybrid", "opaque"] = kind
        self.n_ctx, self.n_seqs, self.n_ubatch, self.n_vocab = n_ctx, n_seqs, n_ubatch, n_vocab
        self.n_cells = n_cells or n_ctx
        self.n_outputs = n_outputs or n_ubatch
        self.n_rollback = {"attention": n_ctx, "hybrid": n_planes, "opaque": 0}[kind]
        self.most_drafts = {"attention": n_ctx, "hybrid": max(most_drafts, n_planes), "opaque": 0}[kind]
        self.draft_type = draft_type
        self.fail_loads, self.is_async = 0, False
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
        n_outputs = sum(item.n_drafts + 1 for item in items)
        n_tokens = sum(len(item.tokens) for item in items)
        if n_outputs > self.n_outputs or n_tokens > max(self.n_ubatch, self.n_seqs):
            raise EngineError(f"{n_tokens} tokens with {n_outputs} outputs")
        self._take_cells(n_tokens)
        self._outputs = []
        widths = sorted({0, *(len(item.tokens) for item in items)})
        for item in items:
            held, position = self._seqs[item.seq], item.position
            if item.n_sure < 1 or item.n_drafts > self.most_drafts:
                raise EngineError(f"{item.n_sure} sure tokens and {item.n_drafts} drafts")
            mark = (position, held.state) if item.n_drafts > self.n_rollback else None
            states = []
            for i, token in enumerate(item.tokens):
                after = self._advance(item.seq, np.array([token], np.int32), position + i)
                states.append(held.state)
                self._outputs += [after] if i >= item.n_sure - 1 else []
            end = position + len(item.tokens)
            held.n_least = max(end - item.n_drafts, 0) if self.kind != "opaque" else end
            # Llama.cpp evaluates as many tokens of each sequence at once: planes are those of the last such part.
            n_last = len(item.tokens) - widths[widths.index(len(item.tokens)) - 1]
            held.states, held.mark = states[-min(n_last, self.n_rollback + 1) :], mark

    def keep(self, seq: int, n: int) -> int:
        held = self._seqs[seq]
        end, mark = len(held.rows), held.mark
        least, states = held.n_least, held.states
        held.n_least, held.states, held.mark = -1, [], None
        if n == end:
            return n
        if not 0 <= least <= n < end or (self.kind == "hybrid" and mark is None and end - n >= len(states)):
            self.clear(seq)
            raise StateError(f"tokens from {n} on of {end} cannot be taken back")
        if self.kind == "hybrid":
            n, held.state = mark if mark is not None else (n, states[n - end - 1])
        held.at = n
        del held.rows[n:]
        held.cut_drafts(n, held.rows[-1] if n else b"")
        return n

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        return [self._expected(item, n) for item in items]

    def _expected(self, item: SequenceTokens, n: int) -> tuple[int, ...]:
        if len(self._seqs[item.seq].rows) != item.position:
            raise EngineError(f"the sequence does not end at {item.position}")
        # The model itself, one time of four a token beside it.
        before = self.draft_digest(item.seq)
        kept, n_evaluated = self._seqs[item.seq], self.n_evaluated
        tokens = [*item.tokens]
        self._seqs[item.seq] = copy.deepcopy(kept)
        for i in range(len(item.tokens) + n - 1):
            after = self._advance(item.seq, np.array([tokens[i]], np.int32), item.position + i)
            if i >= len(item.tokens) - 1:
                is_wrong = _hash(before, after)[0] % 4 == 0
                tokens.append(1 + (int.from_bytes(after[:8], "little") + is_wrong) % (self.n_vocab - 1))
        self._seqs[item.seq], self.n_evaluated = kept, n_evaluated
        return tuple(tokens[len(item.tokens) :])

    def _advance(self, seq: int, tokens: Tokens, start: int) -> bytes:
        held = self._seqs[seq]
        if len(held.rows) != start or (self.kind != "attention" and held.at != start):
            raise EngineError(f"rows end at {len(held.rows)}, the state at {held.at}, the batch begins at {start}")
        if start + tokens.size > self.n_ctx:
            raise EngineError(f"{start + tokens.size} tokens are more than a sequence may have")
        # Like attention, a row depends on all rows before it; like GEMM rounding, on the shape of its batch.
        before = _hash(*held.rows[-1:], held.state if self.kind != "attention" else b"", str(tokens.size).encode())
        held.cut_drafts(start, held.hidden)
        for i, token in enumerate(tokens.tolist()):
            before = _hash(before, struct.pack("<qq", start + i, token))
            held.rows.append(before)
            held.draft_rows.append(_hash(held.hidden, struct.pack("<q", token)))
            held.hidden = before
        held.state = _hash(held.state, tokens.tobytes())
        held.n_least, held.states, held.mark = -1, [], None
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

    def draft_digest(self, seq: int) -> bytes:
        """What the drafts at the end of ``seq`` depend on besides the model: the draft model's rows and state."""
        held = self._seqs[seq]
        return _hash(*held.draft_rows, held.hidden)

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
        held = self._seqs[seq]
        has_drafts = bool(self.draft_type and held.hidden)
        draft = self._later(HEADER.pack(b"DSTA", 0, n) + self._author + held.hidden) if has_drafts else NOTHING
        if self.kind == "attention":
            return State.of(NOTHING, draft)
        if held.at != n:
            raise StateError(f"the state stands at {held.at}, not {n}")
        data = HEADER.pack(b"STAT", 0, n) + held.state + (b"".join(held.rows) if self.kind == "opaque" else b"")
        return State.of(self._later(data), draft)

    @property
    def _author(self) -> bytes:
        return _hash(self.draft_type.encode())

    def draft_rows_size(self, first: int, last: int) -> int:
        return HEADER.size + ROW + (last - first) * ROW if self.draft_type and first < last else 0

    def draft_state_size(self) -> int:
        return HEADER.size + 2 * ROW if self.draft_type else 0

    def save_draft_rows(self, seq: int, first: int, last: int) -> Block:
        rows = self._seqs[seq].draft_rows[first:last]
        if not self.draft_type or not all(rows):
            return NOTHING
        return self._later(HEADER.pack(b"DRFT", first, last) + self._author + b"".join(rows))

    def load_draft_rows(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        self.synchronize()
        held = self._seqs[seq]
        held.cut_drafts(first)
        for block, start, stop in spans:
            data = block.tobytes()
            rows = [b""] * (stop - start)
            if data[HEADER.size :][:ROW] == self._author:
                magic, p0, p1 = HEADER.unpack(data[: HEADER.size])
                if magic != b"DRFT" or not p0 <= start < stop <= p1 or start != len(held.draft_rows):
                    raise StateError(f"draft rows [{start}, {stop}) do not continue at {len(held.draft_rows)}")
                at = [HEADER.size + ROW + (i - p0) * ROW for i in range(start, stop)]
                rows = [data[i : i + ROW] for i in at]
            held.draft_rows += rows

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
        held, block, draft = self._seqs[seq], state.recurrent, state.draft.tobytes()
        is_own = draft[HEADER.size :][:ROW] == self._author
        if is_own and HEADER.unpack(draft[: HEADER.size])[2] != n:
            raise StateError("a draft model's state of another position")
        held.cut_drafts(n, draft[HEADER.size + ROW :] if is_own else b"")
        if self.kind == "attention":
            return
        magic, _, at = HEADER.unpack(block[: HEADER.size].tobytes())
        data = block[HEADER.size :].tobytes()
        if magic != b"STAT" or at != n or (self.kind == "hybrid" and len(held.rows) != n):
            raise StateError(f"a state at {at} does not belong to {n}")
        if self.kind == "opaque":
            self._take_cells(n - len(held.rows))
        held.state, held.at = data[:ROW], n
        held.n_least, held.states, held.mark = -1, [], None
        if self.kind == "opaque":
            held.rows = [data[i : i + ROW] for i in range(ROW, len(data), ROW)]

    def rewind(self, seq: int, n: int) -> None:
        if self.kind == "opaque" and n:
            raise StateError("nothing can be rewound")
        held = self._seqs[seq]
        held.cut_drafts(n, held.hidden if n == len(held.rows) else b"")
        del held.rows[n:]
        held.n_least, held.states, held.mark = -1, [], None
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
