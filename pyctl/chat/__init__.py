"""Messages to prompts, and replies back to their parts. Knows text and token ids; no engine, no HTTP."""

from __future__ import annotations
