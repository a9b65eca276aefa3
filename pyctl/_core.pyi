"""The compiled extension: moves rows and state of one sequence in and out of a llama_context.

`pyctl.llama.library.extension` alone imports it, and `_drafts` and `_pool` with it: after llama.cpp's libraries, and only if all fit.
Tokens of a sequence, and their rows, are counted from 0; sizes are bytes. Every call checks its ranges and sizes before llama.cpp gets them and raises
ValueError with the reason; the sequence is unchanged then. Copies release the GIL. None of this is thread-safe: the
thread that owns the context makes the calls.

Where `KVState.is_async`, `save_*` and `load_*` only start the copies. They happen in the order of the calls and keep
their buffers alive; evaluation comes before or after them as it was called. Only after `KVState.finish` may anything
else read saved or change loaded bytes. A buffer is let go by the first call after its copy is complete, or
when many others wait after it: then that call waits as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = NDArray[np.uint8] | bytes | bytearray | memoryview

LLAMA_VERSION: str
GGML_VERSION: str
BINDINGS_VERSION: str
MAX_STAGE_BYTES: int

def breakdown(ctx: int) -> dict[str, list[int]]:
    """Return the bytes of weights, K and V, states and compute buffers by device of a llama_context, "" for the host.

    Of a model that was loaded without weights they are those that it would take.
    """

def row_places(ctx: int) -> list[str]:
    """Return the devices of the layers with K and V, in order, "" for the host; none unless one cache has all."""

def layer_devices(model: int) -> list[str]:
    """Return the names of the devices of all layers of a llama_model, the output last."""

def release_copied(model: int) -> int:
    """Take the pages of the file of a llama_model that no weight uses in place out of this process; return their bytes."""

class HostBuffer:
    """``size`` bytes of host memory, uninitialised; pinned if asked for and the arena was opened and has room.

    Supports the buffer protocol, shape (size,), uint8, writable. MemoryError when there is no memory. Any thread.
    """

    @staticmethod
    def open(limit: int, ahead: int, initial: int = 0, registered: bool = True) -> bool:
        """Open the arena of pinned memory, ``limit`` bytes at most; a second call changes nothing.

        It pins ``initial`` bytes in the background, and later as much as leaves ``ahead`` bytes
        unused. Pinned memory is reused. Buffers that are not pinned also count: the arena is
        smaller by as much. False if no loaded device library can register memory. Without
        ``registered``, for tests, no device library is needed and nothing is pinned.
        """

    @staticmethod
    def used() -> int:
        """Bytes of all buffers that live."""

    @staticmethod
    def held() -> int:
        """Bytes taken of the system for buffers: those outside of the arena, and all that the arena has ready."""

    @staticmethod
    def stop() -> None:
        """Pin nothing more; call it before the process ends."""

    def __init__(self, size: int, pinned: bool = True) -> None: ...
    @property
    def pinned(self) -> bool: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class OutOfCells(RuntimeError):
    """There are too few free cells for the call; nothing has changed."""

class ContextState:
    """A `KVState` as other modules take it."""

class KVState(ContextState):
    """Rows and state inside the context at address ``ctx``.

    ``seq`` must hold at least one token: the layout is read from llama.cpp's bytes of it. ``kind`` is
    ``attention`` (rows only), ``hybrid`` (rows and a state: recurrent, the rows that sliding layers still see, or both; of
    a recurrent memory no rows) or ``opaque`` (a memory of another kind, or one stream per sequence: no rows, and the state is llama.cpp's own of the whole
    sequence).

    With a ``lag``, for tests, a host behaves as a device that copies during the computation does towards its buffers:
    a copy counts as complete when so many further calls were made, or something waited for it.

    With ``marks``, a hybrid with recurrent cells has room for one more state of each sequence, on the devices where states lie; RuntimeError
    where that is missing.

    With ``defers``, llama.cpp gets the drops of `rewind` and `clear` in `reserve`, so `reserve` is called before
    anything is evaluated, or asked of llama.cpp itself. Rows that are loaded meanwhile take over the cells.

    ``unfit`` maps classes of memory to the reason why their parts are not touched: such a memory is ``opaque``.
    """

    def __init__(
        self,
        ctx: int,
        seq: int = 0,
        lag: int = 0,
        marks: bool = False,
        defers: bool = False,
        unfit: Mapping[str, str] = ...,
    ) -> None: ...
    @property
    def kind(self) -> Literal["attention", "hybrid", "opaque"]: ...
    @property
    def type(self) -> str:
        """The name of the memory's class in llama.cpp."""

    @property
    def window(self) -> tuple[int, int]:
        """(tokens that sliding layers see, cells for these).

        The first is 0 without such layers, the second where the class is not known.
        """

    @property
    def layout(self) -> str:
        """Types and sizes of everything that is saved, as text; equal layouts may exchange blocks."""

    @property
    def reason(self) -> str:
        """Why the kind is ``opaque`` although the class is known: unfit, or written in an unknown order. Else empty."""

    @property
    def is_async(self) -> bool:
        """Whether copies run during the computation, so that `finish` has to be waited for."""

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of the buffers whose copies are not complete."""

    def n_tokens(self, seq: int) -> int:
        """The number of tokens that ``seq`` holds, rows of images included."""

    def position(self, seq: int, n: int) -> int:
        """At which position llama.cpp has token ``n`` of ``seq``, or will have the one that follows its last.

        That is ``n`` unless there are images before it: all rows of one share its first position.
        """

    def add_image(self, seq: int, columns: int, count: int) -> None:
        """Tell that the last ``count`` rows of ``seq``, just evaluated, belong to an image of so many columns.

        They follow each other line by line, after earlier rows of the same image. ValueError where
        the model gives tokens no lines and columns.
        """

    def rows_size(self, p0: int, p1: int) -> int:
        """Bytes of the block that holds rows [p0, p1); ValueError if they are not a range of rows."""

    def save_rows(self, seq: int, p0: int, p1: int, out: Buffer) -> None:
        """Copy rows [p0, p1) of ``seq`` into ``out``, which has exactly ``rows_size(p0, p1)`` bytes."""

    @property
    def can_hold(self) -> bool:
        """Whether there are rows, which can stay on the device; not for kind ``opaque``, nor of a recurrent memory."""

    def hold(self, seq: int, p0: int, p1: int) -> int:
        """Have rows [p0, p1) of ``seq`` stay on the device, whatever becomes of it; returns their name.

        They lie in cells that llama.cpp takes for free ones once no sequence has them. `reserve` and `load` move
        them to other cells before theirs are taken.
        """

    def release(self, held: int) -> None:
        """Let held rows go; harmless if they have gone."""

    def fetch(self, held: int, p0: int, p1: int, out: Buffer) -> None:
        """Copy held rows [p0, p1) into ``out``, as `save_rows` does. They may be released at once."""

    def n_own(self, held: int, p0: int, p1: int) -> int:
        """Cells of held rows [p0, p1) that neither a sequence nor anything else that is held has; 0 after `release`."""

    @property
    def n_free(self) -> int:
        """Cells that neither a sequence nor held rows have."""

    @property
    def n_held(self) -> int:
        """Cells that held rows have and no sequence."""

    def reserve(self, n: int, in_parts: bool = False) -> None:
        """Have no held rows in the cells that the next ``n`` tokens will take; called before llama.cpp takes any.

        OutOfCells if fewer are free; if llama.cpp may divide the tokens, ``in_parts``, also where fewer than 2 ``n`` are.
        """

    def cut(self, seq: int, n: int) -> bool:
        """Let llama.cpp take back the tokens of ``seq`` from ``n`` on, with the states after them; False if it cannot.

        ValueError inside an image. Where states stay, rows are gone: `reset`, `clear` or load next."""

    def state_size(self, seq: int) -> int:
        """Bytes of the state at the end of ``seq``; 0 for kind ``attention``."""

    def save_state(self, seq: int, n: int, out: Buffer) -> None:
        """Copy the state of ``seq``, which ends at ``n``, into ``out`` of exactly ``state_size(seq)`` bytes.

        Without its last part, if that is the rows of a window, for an ``out`` that has no room for them.
        """

    def save_window(self, seq: int, p0: int, p1: int, out: Buffer) -> None:
        """Copy the rows [p0, p1) that sliding layers of ``seq`` still have into ``out``, as a state ends with them."""

    def load(
        self,
        seq: int,
        p0: int,
        spans: Sequence[tuple[Buffer | int, int, int]],
        state: Buffer | None = None,
        window: Sequence[tuple[Buffer, int, int]] = (),
    ) -> None:
        """Append rows to ``seq``, which ends at ``p0``, or just have it end there, and replace its ``state`` unless None.

        ``spans`` are (block, first, last): rows [first, last) out of a saved block, or of rows that `hold` has
        named, in order, the first starting at ``p0``. Held rows are held where ``seq`` has them then. OutOfCells if
        there is no room for them.

        A ``state`` is one that was saved at the end of the rows. If it ends before the rows of a window, ``window`` has
        them: (block, first, last) is rows [first, last) out of a block that `save_window` has made of some rows up to
        ``last``. If it cannot be loaded, or the rows before it, after all was checked, ``seq`` is empty.
        """

    @property
    def has_marks(self) -> bool:
        """Whether sequences can be marked."""

    def keep_history(self, keeps: bool) -> None:
        """Have the next evaluations keep the states before their last token, or not: `cut` returns to these only."""

    def mark(self, seq: int, n: int) -> None:
        """Keep the state of ``seq``, which ends at ``n``, where states lie, in place of the one kept before."""

    def reset(self, seq: int) -> int:
        """Take ``seq`` back to its mark, as often as wanted; returns how many tokens it holds.

        ValueError without one: there is none after the sequence was rewound, cleared or loaded.
        """

    def rewind(self, seq: int, n: int) -> None:
        """Drop the rows from ``n`` on; ValueError inside an image. A hybrid's state stays where it was: load the one at ``n`` next."""

    def clear(self, seq: int) -> None:
        """Drop everything that ``seq`` holds."""

    def finish(self) -> None:
        """Wait for all copies."""

class Pulse:
    """Counts the steps of the evaluations of a context, and stops them. It must outlive the contexts it is attached to.

    Only some devices take part, the CPU for one; elsewhere nothing is counted and an evaluation runs to its end, unless
    it is watched. Any thread, except for `attach`, `watch` and `allow`.
    """

    def attach(self, ctx: int) -> None:
        """Take part in the evaluations of the context at address ``ctx`` from now on."""

    def watch(self, ctx: int) -> None:
        """Also end evaluations of the context at ``ctx`` whose devices take no part, after the attention of a layer, if
        it is flash attention. Its evaluation callback must be free. 0 ends the watch."""

    @property
    def is_watching(self) -> bool: ...
    @property
    def code(self) -> int:
        """2 if the last evaluation, which was allowed to, ended so, which llama_decode does not report; else 0."""

    def stop(self) -> None:
        """Let the evaluation that runs now, and all later ones, end with llama_decode's 2."""

    def ask(self, for_it: bool = True) -> None:
        """Do so for an evaluation that is allowed to end so, until this is taken back."""

    def allow(self, is_so: bool) -> None:
        """Whether `ask` ends evaluations from now on."""

    @property
    def count(self) -> int:
        """Steps so far: nodes of graphs."""

    @property
    def is_stopped(self) -> bool: ...
