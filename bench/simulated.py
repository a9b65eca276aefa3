"""A server without a model: real engine and cache, tokens without cost, rows and states of a
model's sizes.

It serves hundreds of requests a second, to compare budgets and rules quickly. Its replies depend
only on the request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from bench.common import answered
from bench.gpu_seconds import DEVICES, Device
from bench.sessions import PLAIN, Message, Reply, text
from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.ports import MemoryShape
from pyctl.cache.ram import RamCache
from pyctl.cache.resume_points import ANYWHERE
from pyctl.cache.snapshot import Block, BlockBytes, HeldRows, Rows, Span, State
from pyctl.chat.boundaries import headers, last_turn
from pyctl.chat.template import Template
from pyctl.engine.backend import Backend, BackendFacts, SequenceTokens
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.request import Request
from pyctl.errors import OutOfCellsError, StateError
from pyctl.prompt import Prompt, Tokens, as_tokens, common_prefix
from tools.generator.vocab import SPECIAL_TOKENS

Cells: TypeAlias = NDArray[np.int64]
"""Numbers of cells, shape (n,)."""

_IDS = {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)}
_START = _IDS["<|im_start|>"]
END = _IDS["<|im_end|>"]
_ASSISTANT = (_START, *b"assistant")
_RESULT = "<|im_start|>user\n<tool_response>"
_SPECIAL = re.compile("|".join(map(re.escape, _IDS)))


def tokens_of(plain: str) -> Tokens:
    """Return the tokens of ``plain``: one for each byte and each special token."""
    parts: list[np.ndarray[Any, Any]] = []
    at = 0
    for match in _SPECIAL.finditer(plain):
        parts.append(np.frombuffer(plain[at : match.start()].encode(), np.uint8).astype(np.int32))
        parts.append(np.array([_IDS[match[0]]], np.int32))
        at = match.end()
    parts.append(np.frombuffer(plain[at:].encode(), np.uint8).astype(np.int32))
    return as_tokens(np.concatenate(parts))


def prompt_of(plain: str) -> Prompt:
    """Return a prompt with the server's boundaries."""
    tokens = tokens_of(plain)
    starts = np.flatnonzero(tokens == _START)
    inner = tuple(int(at) for at in starts if at)
    replies = headers(tokens, inner, _ASSISTANT) or ()
    turn = last_turn(tokens, inner, replies, tokens_of(_RESULT).tolist())
    n_raw = int(starts[0]) if starts.size else int(tokens.size)
    return Prompt(tokens, inner, replies, turn, n_raw=n_raw)


@dataclass(eq=False)
class _Seq:
    """Rows in ``cells``, the state at ``at``, -1 for nowhere."""

    cells: Cells
    at: int = 0


@dataclass(eq=False)
class _HeldRows:
    """Rows from position ``first`` on in ``cells``."""

    first: int
    cells: Cells
    sizes: BlockSizes

    @property
    def n_cells(self) -> int:
        return int(self.cells.size)

    @property
    def n_bytes(self) -> int:
        return self.sizes.rows(self.first, self.first + self.n_cells)


class SizedBackend:
    """Sequences without content; each row has ``row_bytes``, each state ``state_bytes``. Says what
    it is told.

    ``seconds`` are what all prompts, restores and saved states would have taken on each of DEVICES,
    where ``scale`` times as many bytes are copied.
    """

    heartbeat = 0
    can_preempt = False

    def __init__(
        self,
        n_cells: int,
        n_seqs: int,
        row_bytes: int,
        state_bytes: int,
        *,
        n_ubatch: int = 512,
        batch_cost: int = 0,
        scale: int = 1,
    ) -> None:
        """Prepare ``n_seqs`` empty sequences in ``n_cells`` cells. ``row_bytes`` and
        ``state_bytes`` are those that the cache counts; copies take the time of ``scale`` times as
        many.
        """
        self.n_cells = n_cells
        self._scale = scale
        n_outputs = max(n_ubatch, n_seqs)
        self.facts = BackendFacts(
            n_cells, n_cells, n_seqs, n_ubatch, n_outputs, batch_cost, False, 3, True, 3
        )
        self.row_bytes = row_bytes
        self.state_bytes = state_bytes
        self.reply: Iterator[int] = iter(())
        self.n_evaluated = 0
        self.seconds = dict.fromkeys((device.name for device in DEVICES), 0.0)
        self._taken = np.zeros(n_cells, bool)  # by a sequence; where it lies changes nothing here
        self._n_held = np.zeros(n_cells, np.int32)
        self._free = np.arange(n_cells)  # a stack; the first `_n_free` are free
        self._n_free = n_cells
        self._n_only_held = 0
        self._held: set[_HeldRows] = set()
        self._seqs = [_Seq(_NO_CELLS) for _ in range(n_seqs)]

    @property
    def memory(self) -> SizedBackend:
        """It is its own memory, vocabulary and control."""
        return self

    vocabulary = control = memory

    def evaluate(
        self, seq: int, tokens: Tokens, start: int, *, output: bool = True, picture: object = None
    ) -> None:
        self._append(seq, int(tokens.size), start)
        self._spend(lambda device: device.batch(int(tokens.size), start))

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        for item in items:
            self._append(item.seq, len(item.tokens), item.position)

    def _append(self, seq: int, n: int, start: int) -> None:
        held = self._seqs[seq]
        if held.cells.size != start or held.at != start:
            raise StateError(
                f"rows end at {held.cells.size}, the state at {held.at}, the batch starts at "
                f"{start}"
            )
        held.cells = np.concatenate([held.cells, self._take(n)])
        held.at = start + n
        self.n_evaluated += n

    def _spend(self, seconds: Callable[[Device], float]) -> None:
        for device in DEVICES:
            self.seconds[device.name] += seconds(device)

    def _copy(self, n_bytes: int) -> None:
        self._spend(lambda device: device.copy(n_bytes * self._scale))

    def _take(self, n: int) -> Cells:
        if n > self._n_free:
            raise OutOfCellsError
        self._n_free -= n
        cells: Cells = self._free[self._n_free : self._n_free + n].copy()
        self._taken[cells] = True
        return cells

    def _take_held(self, cells: Cells) -> None:
        """Give a sequence cells that held rows alone have."""
        self._taken[cells] = True
        self._n_only_held -= cells.size

    def _leave(self, cells: Cells) -> None:
        """Take ``cells`` from a sequence; held rows keep theirs."""
        self._taken[cells] = False
        is_held = self._n_held[cells] > 0
        self._n_only_held += int(np.count_nonzero(is_held))
        self._push(cells[~is_held])

    def _push(self, cells: Cells) -> None:
        self._free[self._n_free : self._n_free + cells.size] = cells
        self._n_free += cells.size

    def output(self) -> Block:
        return _block(4)

    def recall(self, output: Block) -> None:
        pass

    def pin(self, seq: int, ranges: object) -> None:
        pass

    def allow_preemption(self, is_so: bool) -> None:
        pass

    def preempt(self, is_wanted: bool = True) -> None:
        pass

    def sampler(self, sampling: object, prompt: Tokens) -> SizedBackend:
        return self

    @property
    def is_constrained(self) -> bool:
        return False

    def sample(self, index: int) -> int:
        return next(self.reply)

    def close(self) -> None:
        pass

    def is_end(self, token: int) -> bool:
        return token == END

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    @property
    def shape(self) -> MemoryShape:
        return MemoryShape(ANYWHERE, BlockSizes(0, self.row_bytes, self.state_bytes), can_hold=True)

    def state_size(self, seq: int, ends: Sequence[int] = ()) -> int:
        return max(len(ends), 1) * self.state_bytes

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        if hold:
            return Rows(self.hold_rows(seq, first, last))
        if not first < last <= self._seqs[seq].cells.size:
            raise StateError(f"rows [{first}, {last}) are not there")
        return Rows(_block((last - first) * self.row_bytes))

    def save_state(self, seq: int, n: int) -> State:
        if self._seqs[seq].at != n:
            raise StateError(f"the state stands at {self._seqs[seq].at}, not {n}")
        self._copy(self.state_bytes)
        return State.from_parts(_block(self.state_bytes))

    def synchronize(self) -> None:
        pass

    def block_bytes(self) -> BlockBytes:
        return BlockBytes(0, 0, 0)

    @property
    def cells(self) -> SizedBackend:
        """The `DeviceCells`: this object itself."""
        return self

    @property
    def n_free(self) -> int:
        return self._n_free

    @property
    def n_held_cells(self) -> int:
        """Cells that held rows alone take."""
        return self._n_only_held

    def hold_rows(self, seq: int, first: int, last: int) -> _HeldRows:
        cells = self._seqs[seq].cells[first:last]
        if cells.size != last - first:
            raise StateError(f"rows [{first}, {last}) are not there")
        held = _HeldRows(first, cells, self.shape.sizes)
        self._n_held[cells] += 1
        self._held.add(held)
        return held

    def release(self, held: HeldRows) -> None:
        if held in self._held:
            assert isinstance(held, _HeldRows)
            self._held.remove(held)
            self._n_held[held.cells] -= 1
            unused = held.cells[~self._taken[held.cells] & (self._n_held[held.cells] == 0)]
            self._n_only_held -= unused.size
            self._push(unused)

    def release_all(self) -> None:
        for held in list(self._held):
            self.release(held)

    def fetch(self, held: HeldRows, first: int, last: int) -> Block:
        self._within(held, first, last)
        return _block((last - first) * self.row_bytes)

    def n_exclusive_cells(self, held: HeldRows, first: int, last: int) -> int:
        cells = self._within(held, first, last)
        return int(np.count_nonzero(~self._taken[cells] & (self._n_held[cells] == 1)))

    def _within(self, held: HeldRows, first: int, last: int) -> Cells:
        if not isinstance(held, _HeldRows) or held not in self._held:
            raise StateError("these rows are held no longer")
        if not held.first <= first <= last <= held.first + held.n_cells:
            raise StateError(f"rows [{first}, {last}) are not held")
        return held.cells[first - held.first : last - held.first]

    def restore(
        self, seq: int, first: int, spans: Sequence[Span], state: State | None = None
    ) -> None:
        if spans:
            self._load_rows(seq, first, spans)
        if state is not None:
            self._load_state(seq, spans[-1][2] if spans else first, state)

    def _load_rows(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        """Append the rows of ``spans`` to a sequence. Held rows whose cells no sequence has are
        used without a copy; others are copied to new cells. OutOfCellsError does not change the
        sequence; StateError means a gap between its rows and ``spans``.
        """
        at = self._seqs[seq]
        if at.cells.size != first or spans[0][1] != first:
            raise StateError(f"rows end at {at.cells.size}, not {first}")
        sources = [
            np.full(last - start, -1) if rows.held is None else self._within(rows.held, start, last)
            for rows, start, last in spans
        ]
        cells = np.concatenate(sources)
        copied = (cells < 0) | self._taken[cells]
        self._take_held(cells[~copied])
        try:
            cells[copied] = self._take(int(np.count_nonzero(copied)))
        except OutOfCellsError:
            self._leave(cells[~copied])
            raise
        self._copy(self.row_bytes * int(np.count_nonzero(copied)))
        at.cells = np.concatenate([at.cells, cells])

    def _load_state(self, seq: int, n: int, state: State) -> None:
        if self._seqs[seq].cells.size != n or state.recurrent.nbytes != self.state_bytes:
            raise StateError("a state of another position")
        self._copy(self.state_bytes)
        self._seqs[seq].at = n

    def rewind(self, seq: int, n: int) -> None:
        held = self._seqs[seq]
        self._leave(held.cells[n:])
        held.cells = held.cells[:n]
        held.at = n if n == 0 else -1

    def clear(self, seq: int) -> None:
        self.rewind(seq, 0)


_NO_CELLS: Cells = np.empty(0, np.int64)


def _block(n_bytes: int) -> Block:
    return cast(Block, np.broadcast_to(np.uint8(0), n_bytes))


@dataclass(frozen=True)
class Turn:
    """A request: its length, the tokens that it shares with earlier ones, the tokens evaluated, and
    the ``seconds`` of evaluation, restores and saved states on each device.
    """

    n: int
    shared: int
    n_evaluated: int
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def floor(self) -> int:
        """Tokens that no earlier request had in this place; one at least is always evaluated."""
        return max(self.n - self.shared, 1)


class Known:
    """All that was ever asked and answered."""

    def __init__(self) -> None:
        self.all: list[Tokens] = []

    def shared(self, tokens: Tokens) -> int:
        """Return the number of leading tokens that an earlier request had as well."""
        return max((common_prefix(other, tokens) for other in self.all), default=0)

    def add(self, tokens: Tokens) -> None:
        self.all.append(tokens)


class Scripted:
    """Answers with text that depends only on the request; ``_ask`` gets each prompt and its reply
    as text.
    """

    def __init__(self, template: Template) -> None:
        self._template = template

    def chat(
        self, messages: Sequence[Message], reply: Reply = PLAIN, tools: Sequence[Message] = ()
    ) -> Message:
        """Return a reply made up from the end of the rendered prompt, so that equal requests get
        equal replies. Text, reasoning and call have the lengths of ``reply``, in characters.
        """
        rendered = self._template.render(
            messages, tools=list(tools) or None, enable_thinking=reply.thought > 0
        )
        seed = rendered[-3000:], len(rendered)
        message: Message = {"role": "assistant", "content": text((seed, "said"), reply.said)}
        out = message["content"]
        if reply.thought:
            message["reasoning_content"] = text((seed, "thought"), reply.thought).strip()
            out = f"{message['reasoning_content']}\n</think>\n\n{out}"
        if reply.called:
            value = text((seed, "called"), reply.called)
            message["tool_calls"] = [{"function": {"name": "run", "arguments": {"value": value}}}]
            out += (
                "\n\n<tool_call>\n<function=run>\n<parameter=value>\n"
                f"{value}\n</parameter>\n</function>\n</tool_call>"
            )
        self._ask(rendered, out)
        return message

    def complete(self, prompt: str, reply: Reply = PLAIN) -> str:
        out = text((prompt[-3000:], len(prompt)), reply.n)
        self._ask(prompt, out)
        return out

    def restart(self) -> None:
        raise NotImplementedError

    def _ask(self, rendered: str, out: str) -> None:
        raise NotImplementedError


def serve(
    engine: Engine, backend: SizedBackend, prompt: Prompt, reply: Tokens
) -> tuple[RequestStats, dict[str, float]]:
    """Evaluate ``prompt`` on ``engine``, whose ``backend`` generates ``reply``.

    Returns the engine's account, and the seconds of prefill, restores and saved states on each
    device.
    """
    backend.reply = iter([*reply.tolist(), END])
    before = dict(backend.seconds)
    done = answered(engine, Request(prompt, max_tokens=reply.size + 1))
    seconds = {name: after - before[name] for name, after in backend.seconds.items()}
    return done.stats, seconds


class Simulation(Scripted):
    """Answers with a separate engine; ``turns`` are the requests so far."""

    def __init__(
        self,
        template: Template,
        backend: SizedBackend,
        budget: int | None,
        n_slots: int = 32,
        **settings: Any,
    ) -> None:
        super().__init__(template)
        self._backend = backend
        self.cache = RamCache(n_slots, budget)
        self._engine = Engine(cast(Backend, backend), self.cache, EngineSettings(**settings))
        self.known = Known()
        self.turns: list[Turn] = []

    def _ask(self, rendered: str, out: str) -> None:
        self.answer(prompt_of(rendered), tokens_of(out))

    def answer(self, prompt: Prompt, reply: Tokens) -> None:
        """Evaluate ``prompt`` and return ``reply``."""
        stats, seconds = serve(self._engine, self._backend, prompt, reply)
        shared = self.known.shared(prompt.tokens)
        self.turns.append(Turn(len(prompt), shared, stats.n_evaluated, seconds))
        whole = as_tokens(np.concatenate([prompt.tokens, reply]))
        self.known.add(whole)
