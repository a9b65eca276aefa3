"""The recording of exact replies, without a wait of the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from pyctl.cache.lookup import may_use_disk
from pyctl.cache.ports import Store
from pyctl.engine.exact_reply import ExactReply
from pyctl.engine.request import Request
from pyctl.receipts.receipt import Provenance, Receipt
from pyctl.receipts.receipt_store import Clock, ReceiptStore
from pyctl.settings.limit import limit

__all__ = ["ReceiptWriter"]

log = logging.getLogger(__name__)

MAX_WAITING = limit(64, "receipts that wait for the disk", "later replies get none", "memory")


class ReceiptWriter:
    """Writes receipts of the replies of one model to ``store``, on the thread of ``run_soon``.

    A request that the cache must not keep on ``disk`` gets none, nor does one with images, whose
    files a receipt lacks. ``reserve`` counts bytes among those that may be written in a day, and
    returns whether there is room. The engine's thread calls `accepts` and `record`.
    """

    def __init__(
        self,
        store: ReceiptStore,
        provenance: Provenance,
        disk: Store,
        run_soon: Callable[[Callable[[], object]], None],
        reserve: Callable[[int], bool],
        clock: Clock = time.time,
    ) -> None:
        """Write nothing yet; see the class for the arguments."""
        self.store = store
        self.n_dropped = 0
        """The receipts that were not written: the disk was slow or full, or the day's limit
        reached.
        """
        self._provenance = provenance
        self._disk = disk
        self._run_soon = run_soon
        self._reserve = reserve
        self._clock = clock
        self._last_id = 0
        self._n_begun = 0  # changed by the engine's thread alone
        self._n_ended = 0  # changed by the writing thread alone

    def accepts(self, request: Request) -> bool:
        return may_use_disk(request, self._disk) and not request.prompt.pictures

    def record(self, reply: ExactReply) -> int:
        if self._n_begun - self._n_ended >= MAX_WAITING:
            self.n_dropped += 1
            return 0
        # Two replies may end in one microsecond of the clock.
        self._last_id = max(round(self._clock() * 1e6), self._last_id + 1)
        self._n_begun += 1
        self._run_soon(partial(self._write, self._last_id, reply))
        return self._last_id

    def _write(self, number: int, reply: ExactReply) -> None:
        """Write the receipt ``number`` of ``reply``; a failure costs this receipt only."""
        receipt = Receipt.from_reply(number, self._provenance, reply)
        try:
            if self._reserve(len(receipt.to_bytes())):
                self.store.write(receipt)
            else:
                self.n_dropped += 1
        except OSError as error:
            self.n_dropped += 1
            log.warning("cannot write a receipt: %s", error)
        finally:
            self._n_ended += 1
