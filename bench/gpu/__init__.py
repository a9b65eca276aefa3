"""pyctl and llama-server side by side on a machine with a GPU."""

from __future__ import annotations
