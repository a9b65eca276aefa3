"""The parts of the extension that a server needs, in Python, only by llama.cpp's public functions.

Classes have the names of those in `pyctl._core`, whose place they take if it is missing. They serve
one context of one sequence: several would share its cells, whose order determines bits.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from pyctl.cache.snapshot import Block
from pyctl.llama.library.bindings import api

__all__ = ["HostBuffer", "KVState", "OutOfCells", "Pulse"]

HEADER = struct.Struct("<8sq")
MAGIC = b"pyctlpub"
"""A block is HEADER (the magic, and its number of tokens), then the sequence as llama.cpp writes
it.
"""

RING_PAD = 256
"""llama.cpp pads the cells of layers with a window to this."""

ALL = -1

NONE_UNFIT: Mapping[str, str] = MappingProxyType({})


class OutOfCells(RuntimeError):
    """Raised only by the extension; here llama.cpp reports that cells are missing."""


class KVState:
    """Whole sequences of the context at address ``ctx``, which has one sequence with one token.

    Saving and loading are complete on return. ValueError leaves a sequence unchanged, or empty if
    llama.cpp refuses the block. With ``can_cut`` llama.cpp drops the last tokens of a
    sequence as if they had never been there: it has neither a recurrent state nor layers with a
    window. Opening evaluates another token of the sequence.
    """

    kind: Literal["opaque"] = "opaque"
    type = "llama_memory"
    layout = "whole sequences by llama_state_seq_get_data_ext"
    reason = ""
    is_async = can_hold = has_marks = False
    in_flight_bytes = 0

    def __init__(
        self,
        ctx: int,
        seq: int = 0,
        *,
        marks: bool = False,
        defers: bool = False,
        unfit: Mapping[str, str] = NONE_UNFIT,
    ) -> None:
        """Measure the memory of the context at address ``ctx``. The other parameters are the
        extension's, and have no effect.

        The state after the sequence's one token is saved before `_measure` evaluates another.
        """
        del seq, marks, defers, unfit  # of the extension
        self._ctx = ctx
        self._memory = api.llama_get_memory(ctx)
        model = api.llama_get_model(ctx)
        if not self._memory:
            self.type = ""
        has_state = bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))
        window = int(api.llama_model_n_swa(model))
        ring = 0
        if window and not has_state:
            needed = min(window + int(api.llama_n_ubatch(ctx)), int(api.llama_n_ctx(ctx)))
            ring = -(-needed // RING_PAD) * RING_PAD
        self.window = window, ring
        self.can_cut = bool(self._memory) and not (has_state or window)
        self._fresh: Block | None = None
        if has_state:
            flags = api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
            self._fresh = np.empty(int(api.llama_state_seq_get_size_ext(ctx, 0, flags)), np.uint8)
            api.llama_state_seq_get_data_ext(ctx, *_buffer_address(self._fresh), 0, flags)
        self._sizes = self._measure() if self._memory else (0, 0)

    def n_tokens(self, seq: int) -> int:
        """Return the number of tokens in ``seq``."""
        return int(api.llama_memory_seq_pos_max(self._memory, seq)) + 1 if self._memory else 0

    def position(self, seq: int, n: int) -> int:
        """Return llama.cpp's position of token ``n``, the same number, since there are no
        images.
        """
        del seq
        return n

    def reserve(self, n: int, in_parts: bool = False) -> None:
        """Do nothing: llama.cpp finds cells itself, or reports that there are none."""

    def finish(self) -> None:
        """Do nothing: copies are complete."""

    def state_size(self, seq: int) -> int:
        """Return the bytes of the block that `save_state` would write."""
        return HEADER.size + int(api.llama_state_seq_get_size_ext(self._ctx, seq, 0))

    def save_state(self, seq: int, n: int, out: Block) -> None:
        """Write ``seq`` of ``n`` tokens to ``out`` of ``state_size(seq)`` bytes, else ValueError or
        RuntimeError.
        """
        if n <= 0 or self.n_tokens(seq) != n or out.nbytes != self.state_size(seq):
            raise ValueError(
                f"sequence {seq} has {self.n_tokens(seq)} tokens, it cannot be saved at {n}"
            )
        self._check_rows(seq, n, out.nbytes)
        out[: HEADER.size] = np.frombuffer(HEADER.pack(MAGIC, n), np.uint8)
        if (
            int(
                api.llama_state_seq_get_data_ext(
                    self._ctx, *_buffer_address(out[HEADER.size :]), seq, 0
                )
            )
            == 0
        ):
            raise RuntimeError("llama.cpp could not write the state of the sequence")

    def load(
        self, seq: int, n: int, spans: Sequence[object], data: Block, window: Sequence[object] = ()
    ) -> None:
        """Replace ``seq`` by the one of ``n`` tokens in ``data``. Raises ValueError if it holds
        none, or for rows.
        """
        if (
            data.nbytes <= HEADER.size
            or HEADER.unpack(data[: HEADER.size].tobytes()) != (MAGIC, n)
            or n <= 0
        ):
            raise ValueError(f"the block does not hold a sequence of {n} tokens")
        if spans or window:
            raise ValueError("a whole sequence has no other rows")
        self.clear(seq)
        body = np.ascontiguousarray(data[HEADER.size :])
        n_read = int(api.llama_state_seq_set_data_ext(self._ctx, *_buffer_address(body), seq, 0))
        if n_read != body.nbytes or self.n_tokens(seq) != n or not self._has_positions(seq, n):
            self.clear(seq)
            raise ValueError("llama.cpp refused the state")

    def cut(self, seq: int, n: int) -> bool:
        """Drop the tokens from ``n`` on; return False if that is not possible."""
        return (
            self.can_cut
            and bool(api.llama_memory_seq_rm(self._memory, seq, n, ALL))
            and self.n_tokens(seq) == n
        )

    def rewind(self, seq: int, n: int) -> None:
        """Drop the tokens from ``n`` on; at 0 as `clear`. Raises ValueError if the memory
        cannot.
        """
        if n == 0:
            self.clear(seq)
        elif not 0 < n <= self.n_tokens(seq) or not self.cut(seq, n):
            raise ValueError(
                f"sequence {seq} of {self.n_tokens(seq)} tokens cannot be rewound to {n}"
            )

    def clear(self, seq: int) -> None:
        """Drop everything ``seq`` holds."""
        if not self._memory:
            return
        if self._fresh is not None:  # llama.cpp starts with this times zero: a NaN would stay
            api.llama_state_seq_set_data_ext(
                self._ctx,
                *_buffer_address(self._fresh),
                seq,
                api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY,
            )
        # Not llama_memory_seq_rm, which leaves cells at positions below 0, as a crafted state may
        # have them.
        api.llama_memory_clear(self._memory, False)

    def _has_positions(self, seq: int, n: int) -> bool:
        """Return whether loaded cells are at the positions of ``n`` tokens, from 0 or from the
        start of a window.

        llama.cpp loads any positions. Of a memory with a recurrent state it returns only the last
        position: there the size shows whether cells are missing. `clear` removes cells at any
        positions.
        """
        minimum = int(api.llama_memory_seq_pos_min(self._memory, seq))
        window = self.window[0]
        if self._fresh is None:
            return 0 <= minimum <= (max(n - window, 0) if window else 0)
        one, each = self._sizes
        return minimum >= 0 and (window > 0 or self.state_size(seq) == one + each * (n - 1))

    def _measure(self) -> tuple[int, int]:
        """Return the bytes of sequence 0 with its one token, and of each further token."""
        one = self.state_size(0)
        api.llama_decode(self._ctx, api.llama_batch_get_one((ctypes.c_int32 * 1)(), 1))
        return one, self.state_size(0) - one

    def _check_rows(self, seq: int, n: int, size: int) -> None:
        """Raise ValueError unless llama.cpp still has all rows of ``seq`` that its next token
        reads: ``n`` rows or, in layers with a window, the last ones. ``size`` is the
        bytes of the sequence.

        A sequence that lacks rows is saved and loaded without an error, and then gives other bits.
        No public function lists the cells, so the rows are inferred from two numbers:

        - Beyond the window, from the first position that is left. Sequences are saved there only at
          counts at which the ring is full (`memory_check.find_resume_points`): it then has ``ring``
          tokens, or only the window's if the sequence was just loaded.
        - Otherwise from the size, which grows by the same bytes with each token. Where llama.cpp
          has silently dropped rows, the last tokens have added less.
        """
        window, ring = self.window
        if window and n > window:
            first_left = int(api.llama_memory_seq_pos_min(self._memory, seq))
            first_of_ring = n - ring
            first_of_window = n - window
            if first_left not in (first_of_ring, first_of_window):
                n_left = n - first_left
                raise ValueError(
                    f"llama.cpp keeps {n_left} tokens of a window, where {ring} are expected"
                )
            return
        first_token_bytes, token_bytes = self._sizes
        if size != first_token_bytes + token_bytes * (n - 1):
            raise ValueError(f"llama.cpp does not keep all of {n} tokens")


def _buffer_address(data: Block) -> tuple[Any, int]:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), data.nbytes


_sizes: dict[int, int] = {}
"""Bytes of each buffer that lives, by its identity; single operations on it are atomic."""


class HostBuffer(np.ndarray[Any, Any]):
    """``size`` bytes of pageable memory, uninitialised. Any thread."""

    def __new__(cls, size: int, pinned: bool = False) -> HostBuffer:
        del pinned
        buffer: HostBuffer = super().__new__(cls, size, np.uint8)
        _sizes[id(buffer)] = size
        return buffer

    def __del__(self) -> None:
        _sizes.pop(id(self), None)

    @staticmethod
    def open(limit: int, ahead: int, initial: int = 0) -> bool:
        """Return False: there is no arena of pinned memory."""
        del limit, ahead, initial
        return False

    @staticmethod
    def used() -> int:
        """Return the bytes of all buffers that live."""
        return sum(list(_sizes.values()))

    held = used

    @staticmethod
    def stop() -> None:
        """Do nothing: nothing is pinned."""


class Pulse:
    """The end of evaluations by llama.cpp's abort callback, on devices that call it; any thread.

    The callback is the C library's strlen over one byte, so that llama.cpp does not wait for the
    interpreter. Nothing counts the steps of an evaluation: ``count`` goes on by itself, and a
    device that hangs is not noticed.
    """

    code = 0
    is_watching = is_stopped = False

    def __init__(self) -> None:
        self._flag = ctypes.create_string_buffer(2)
        self._look = ctypes.cast(ctypes.CDLL(None).strlen, api.ggml_abort_callback)
        self._is_asked = self._is_allowed = False

    @property
    def count(self) -> int:
        """The monotonic time in seconds."""
        return int(time.monotonic())

    def attach(self, ctx: int) -> None:
        """Take part in the evaluations of the context at address ``ctx`` from now on."""
        api.llama_set_abort_callback(ctx, self._look, ctypes.addressof(self._flag))

    def watch(self, ctx: int) -> None:
        """Do nothing: that takes the extension."""

    def stop(self) -> None:
        """Let the evaluation that runs now, and all later ones, end with llama_decode's 2."""
        self.is_stopped = True
        self._raise_flag()

    def ask(self, for_it: bool = True) -> None:
        """Let evaluations end as `stop` does, while `allow` permits it; with ``for_it`` False, no
        longer.
        """
        self._is_asked = for_it
        self._raise_flag()

    def allow(self, is_so: bool) -> None:
        """Let `ask` end evaluations from now on, or not."""
        self._is_allowed = is_so
        self._raise_flag()

    def _raise_flag(self) -> None:
        self._flag[0] = b"\1" if self.is_stopped or (self._is_asked and self._is_allowed) else b"\0"
