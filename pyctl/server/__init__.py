"""llama-server's HTTP interface on top of a worker and a chat format."""

from __future__ import annotations
