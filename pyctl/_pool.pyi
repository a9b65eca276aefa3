"""The compiled extension's part for --kv-pool, see `_core`: rows that are not in their context."""

from __future__ import annotations

from collections.abc import Sequence

from pyctl._core import ContextState

class RowStore:
    """Has the rows of ``kv`` lie in separate buffers from now on: up to ``n_ctx`` of one sequence, 0, however few cells its context has.

    llama.cpp needs cells for a batch and one token more. Attention reads and writes here, to the same bits as with that
    many cells; blocks are `KVState`'s. Layers are counted as blocks have them; ``resident`` ones have their rows
    on the device, the others in host memory, from where they pass through ``stages`` buffers of a layer on the device,
    one at least, in each evaluation. Only `decode` evaluates; `KVState.clear` the sequence first. ``kv`` lives as long as this.

    RuntimeError in one line for models that this cannot serve, a second time for one ``kv``, and without memory.
    """

    def __init__(
        self, kv: ContextState, n_ctx: int, resident: Sequence[int], stages: int = 2
    ) -> None: ...
    def decode(self, batch: int) -> int:
        """Evaluate the llama_batch at this address, tokens that follow the rows; returns llama_decode's result.

        Rows are there, and `n_tokens` counts them, if it is 0. ValueError, or OutOfCells, before anything is evaluated;
        RuntimeError if llama.cpp did not read and write rows as expected.
        """

    @property
    def streamed_bytes(self) -> int:
        """Bytes that were copied into stages, ever."""

    @property
    def wait_ms(self) -> float:
        """Milliseconds that evaluations waited for that, ever."""
