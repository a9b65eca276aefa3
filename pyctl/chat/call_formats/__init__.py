"""How models write tool calls: the only place that knows their tags."""

from __future__ import annotations
