"""What this machine has, and llama.cpp's libraries built for it once, outside of the Python environment."""

from __future__ import annotations

from pyctl.setup.machine import Card, Compiler, Driver, Machine, PciCard, Program, free_bytes, look_at_machine

__all__ = [
    "Card",
    "Compiler",
    "Driver",
    "Machine",
    "PciCard",
    "Program",
    "free_bytes",
    "look_at_machine",
]
