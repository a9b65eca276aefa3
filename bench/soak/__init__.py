"""A server under everything at once: growing conversations, clients that vanish, hostile bodies,
kills and restarts.
"""

from __future__ import annotations
