"""What is kept and what is given up: snapshots in RAM and on disk. Knows bytes and tokens, no model and no text."""

from __future__ import annotations
