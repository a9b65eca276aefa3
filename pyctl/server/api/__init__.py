"""One API a file, or a pair: what its requests say, what its replies look like."""

from __future__ import annotations
