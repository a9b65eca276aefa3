"""The chat at a terminal, with a model in this process or with a server."""

from __future__ import annotations
