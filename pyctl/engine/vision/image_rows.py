"""The rows that an encoder has made of images, by key: needed again only where the text before an image changed."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from pyctl.limit import limit

__all__ = ["MOST_ROWS_BYTES", "ImageRows"]

MOST_ROWS_BYTES = limit(
    256 * 2**20,
    "what an encoder has made of images, kept in memory, within --cache-ram",
    "the oldest are encoded again",
    "memory",
    "bytes",
)


class ImageRows:
    """At most ``limit`` bytes of rows: what was not used for longest is forgotten first; the latest always stays."""

    def __init__(self, limit: int = MOST_ROWS_BYTES) -> None:
        self.limit = limit
        self.n_bytes = 0
        self._rows: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: bytes) -> NDArray[np.float32]:
        """The rows of one image, shape (n, width); KeyError if they are not there."""
        self._rows.move_to_end(key)
        return self._rows[key]

    def put(self, key: bytes, rows: NDArray[np.float32]) -> None:
        """Keep ``rows``, and forget others if that is too much."""
        self.n_bytes += rows.nbytes - (self._rows[key].nbytes if key in self._rows else 0)
        self._rows[key] = rows
        self._rows.move_to_end(key)
        while len(self._rows) > 1 and self.n_bytes > self.limit:
            self.n_bytes -= self._rows.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self.n_bytes = 0
