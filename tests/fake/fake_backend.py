"""A backend without a model, for tests: every output depends on every row, on the state, and on how
batches were cut.

A row or state that is missing, stale, of another branch, or from other batch ends therefore changes
all later tokens.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import Block
from pyctl.engine.backend import BackendFacts, SequenceTokens, TopTokens
from pyctl.engine.pool_plan import PoolPlan
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, PreemptedError, RequestError, StateError
from pyctl.prompt import ImageSpan, Tokens
from tests.fake.fake_memory import FakeMemory, FakeSequence, hash_of

__all__ = ["FakeBackend"]


class FakeBackend(FakeMemory):
    """``n_vocab`` tokens, of which 0 ends a reply and the others are the letters of the alphabet,
    over and over.

    All sequences share ``n_cells``, by default n_ctx; with ``can_hold`` rows are held there.
    ``fail_loads`` makes that many following loads refuse their bytes. Saved blocks are zeros until
    they settle. A hybrid has ``n_state_history`` planes for each sequence, and fewer count when one
    evaluation has to be split. With a ``draft_type`` it drafts what will come, right three times of
    four: when depends on every row, and the state, of a draft model like a head. With a ``pool``,
    which is for one sequence, rows have a place each and evaluations count what attention reads
    from RAM.
    """

    def __init__(
        self,
        kind: Literal["attention", "hybrid", "opaque"] = "hybrid",
        *,
        n_ctx: int = 4096,
        n_seqs: int = 1,
        n_ubatch: int = 64,
        batch_cost: int = 0,
        n_vocab: int = 64,
        n_cells: int = 0,
        n_outputs: int = 0,
        n_state_history: int = 3,
        max_drafts: int = 48,
        draft_type: str = "",
        can_hold: bool = True,
        pool: PoolPlan | None = None,
    ) -> None:
        """Make a backend of ``n_seqs`` sequences with one kind of memory; the other arguments have
        the names of `BackendFacts`, or limit the cells and the drafts.
        """
        super().__init__(kind, n_seqs, n_cells or n_ctx, draft_type, can_hold, pool is not None)
        self.pool = pool
        self.n_vocab = n_vocab
        self.facts = BackendFacts(
            n_ctx=n_ctx,
            n_cells=self.n_cells,
            n_seqs=n_seqs,
            n_ubatch=n_ubatch,
            n_outputs=n_outputs or n_ubatch,
            batch_cost=batch_cost,
            n_rollback={"attention": n_ctx, "hybrid": n_state_history, "opaque": 0}[kind],
            has_state_history=kind == "hybrid",
            max_drafts={
                "attention": n_ctx,
                "hybrid": max(max_drafts, n_state_history),
                "opaque": 0,
            }[kind],
            draft_type=draft_type,
            n_embed=n_ubatch,
        )
        self.n_evaluated = 0
        self.heartbeat = self.image_bytes = 0
        self.closed = False
        self.interrupted = threading.Event()
        self.can_preempt = True
        self.is_preemptible = False
        self.is_preempt_wanted = False
        self.outputs: list[bytes] = []

    @property
    def memory(self) -> FakeBackend:
        """It is its own memory, vocabulary and control."""
        return self

    vocabulary = control = memory

    # -- evaluation
    # ----------------------------------------------------------------------------------

    def evaluate(
        self,
        seq: int,
        tokens: Tokens,
        start: int,
        *,
        output: bool = True,
        picture: ImageSpan | None = None,
    ) -> None:
        if not 0 < tokens.size <= self.facts.n_ubatch:
            raise EngineError(f"a batch of {tokens.size} tokens")
        self._check_cells(int(tokens.size))
        if self.is_preempt_wanted and self.is_preemptible:
            self._advance(self.seqs[seq], tokens[::-1], start)
            raise PreemptedError("preempted")
        after = self._advance(self.seqs[seq], tokens, start)
        self.outputs = [after] if output else []

    def encode(self, picture: ImageSpan) -> bool:
        return False

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        """Advance each sequence by its tokens and drafts, and choose the outputs of a model whose
        next token depends on all rows and the state. Raises EngineError where llama.cpp would fail.
        """
        # Rounding is not modelled here: several tokens of a sequence give what they would give one
        # by one.
        n_outputs = sum(item.n_drafts + 1 for item in items)
        n_tokens = sum(len(item.tokens) for item in items)
        if n_outputs > self.facts.n_outputs or n_tokens > max(self.facts.n_ubatch, self.n_seqs):
            raise EngineError(f"{n_tokens} tokens with {n_outputs} outputs")
        self._check_cells(n_tokens)
        self.outputs = []
        widths = sorted({0, *(len(item.tokens) for item in items)})
        for item in items:
            held = self.seqs[item.seq]
            position = item.position
            if item.n_committed < 1 or item.n_drafts > self.facts.max_drafts:
                raise EngineError(f"{item.n_committed} sure tokens and {item.n_drafts} drafts")
            mark = (position, held.state) if item.n_drafts > self.facts.n_rollback else None
            states = []
            for i, token in enumerate(item.tokens):
                one = np.array([token], np.int32)
                after = self._advance(held, one, position + i)
                states.append(held.state)
                self.outputs += [after] if i >= item.n_committed - 1 else []
            end = position + len(item.tokens)
            held.n_min = max(end - item.n_drafts, 0) if self.kind != "opaque" else end
            # Llama.cpp evaluates as many tokens of each sequence at once: planes are those of the
            # last such part.
            n_last = len(item.tokens) - widths[widths.index(len(item.tokens)) - 1]
            held.states = states[-min(n_last, self.facts.n_rollback + 1) :]
            held.mark = mark

    def output(self) -> Block:
        return np.frombuffer(self.outputs[0], np.uint8)

    def logits_digest(self, index: int) -> int:
        return zlib.crc32(self.outputs[index])

    def recall(self, output: Block) -> None:
        self.outputs = [output.tobytes()]

    def rollback(self, seq: int, n: int) -> int:
        """Return the sequence to ``n`` tokens from a mark or the history of states. Raises
        StateError, with an empty sequence, if neither reaches so far back.
        """
        held = self.seqs[seq]
        end = len(held.cells)
        mark = held.mark
        minimum = held.n_min
        states = held.states
        held.n_min = -1
        held.states = []
        held.mark = None
        if n == end:
            return n
        if not 0 <= minimum <= n < end or (
            self.kind == "hybrid" and mark is None and end - n >= len(states)
        ):
            self.clear(seq)
            raise StateError(f"cannot roll back from {end} to {n} tokens")
        if self.kind == "hybrid":
            n, held.state = mark if mark is not None else (n, states[n - end - 1])
        held.at = n
        held.cut(n)
        held.cut_drafts(n, held.rows[-1] if n else b"")
        return n

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        return [self._expected(item, n) for item in items]

    def _expected(self, item: SequenceTokens, n: int) -> tuple[int, ...]:
        """Return ``n`` drafts that a model would make after ``item``: the model's own tokens, of
        which about a quarter is wrong.
        """
        if len(self.seqs[item.seq].cells) != item.position:
            raise EngineError(f"the sequence does not end at {item.position}")
        # The model itself, one time of four a token beside it.
        before = self.draft_digest(item.seq)
        held = self.seqs[item.seq]
        n_evaluated = self.n_evaluated
        tokens = [*item.tokens]
        held = replace(held, memory=self._cells.copy(len(tokens) + n), cells=[*held.cells])
        for i in range(len(item.tokens) + n - 1):
            one = np.array([tokens[i]], np.int32)
            position = item.position + i
            after = self._advance(held, one, position)
            if i >= len(item.tokens) - 1:
                is_wrong = hash_of(before, after)[0] % 4 == 0
                tokens.append(
                    1 + (int.from_bytes(after[:8], "little") + is_wrong) % (self.n_vocab - 1)
                )
        self.n_evaluated = n_evaluated
        return tuple(tokens[len(item.tokens) :])

    def _advance(self, held: FakeSequence, tokens: Tokens, start: int) -> bytes:
        """Append rows of ``tokens`` from position ``start`` and return the digest at their end,
        which depends on each row before them and on the width of the batch.
        """
        rows = held.rows
        if len(rows) != start or (self.kind != "attention" and held.at != start):
            raise EngineError(
                f"rows end at {len(rows)}, the state at {held.at}, the batch begins at {start}"
            )
        if start + tokens.size > self.facts.n_ctx:
            raise EngineError(f"{start + tokens.size} tokens are more than a sequence may have")
        # Like attention, a row depends on all rows before it; like GEMM rounding, on the shape of
        # its batch.
        shape = str(tokens.size).encode()
        before = hash_of(*rows[-1:], held.state if self.kind != "attention" else b"", shape)
        held.cut_drafts(start, held.hidden)
        for i, token in enumerate(tokens.tolist()):
            before = hash_of(before, struct.pack("<qq", start + i, token))
            rows.append(before)
            held.draft_rows.append(hash_of(held.hidden, struct.pack("<q", token)))
            held.hidden = before
        held.cells += held.memory.take(rows[start:])
        held.state = hash_of(held.state, tokens.tobytes())
        held.n_min = -1
        held.states = []
        held.mark = None
        held.at = start + int(tokens.size)
        self.n_evaluated += int(tokens.size)
        return self._digest(rows, held.state)

    def sampler(self, sampling: Sampling, prompt: Tokens) -> _FakeSampler:
        return _FakeSampler(self, sampling)

    def check(self, sampling: Sampling) -> None:
        pass

    def interrupt(self) -> None:
        self.interrupted.set()

    def allow_preemption(self, is_so: bool) -> None:
        self.is_preemptible = is_so

    def preempt(self, is_wanted: bool = True) -> None:
        self.is_preempt_wanted = is_wanted

    def top_tokens(self, index: int, token: int, n: int) -> TopTokens:
        return ((token, 0.0), *((i, -float(i)) for i in range(n)))

    def is_end(self, token: int) -> bool:
        return token == 0

    def piece(self, token: int) -> bytes:
        return bytes([ord("a") + token % 26])

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        if tokens.size > self.facts.n_embed:
            raise RequestError("too many tokens")
        return np.array([[tokens.sum(), tokens.size]], np.float32)

    def unload(self) -> None:
        self.closed = True

    def load(self) -> None:
        self.closed = False
        self._empty(self.n_cells)


class _FakeSampler:
    def __init__(self, backend: FakeBackend, sampling: Sampling) -> None:
        self.seed = sampling.seed
        self._backend = backend
        self._first = int(sampling.ignore_eos)

    def sample(self, index: int) -> int:
        value = int.from_bytes(self._backend.outputs[index][:8], "little")
        return self._first + value % (self._backend.n_vocab - self._first)

    @property
    def is_constrained(self) -> bool:
        return False

    def force(self, index: int, token: int) -> None:
        pass

    def top_tokens(self, token: int, n: int) -> TopTokens:
        return ((token, 1.0), *[(token, 1.0)][:n])

    def close(self) -> None:
        pass
