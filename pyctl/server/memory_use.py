"""What this process takes of the machine's memory, and what of it is counted."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from pyctl.engine.engine_stats import EngineMemory
from pyctl.server.service import Service

__all__ = ["counted_bytes", "resident_bytes"]


def counted_bytes(service: Service, engine: EngineMemory) -> Mapping[str, int]:
    """Bytes by what they are for; ``engine`` is what `EngineAdmin.memory` found.

    ``snapshots`` are the prefix cache's. ``blocks`` are all saved rows and states that live: those of snapshots, those
    ``in_flight`` to or from a device, those that wait for the disk. ``arena`` is what was taken of the system for
    blocks, those to come included. The others are remembered between requests.
    """
    return {
        "snapshots": engine.snapshots,
        "blocks": engine.blocks.used,
        "in_flight": engine.blocks.in_flight,
        "arena": engine.blocks.held,
        "recent_prompts": engine.recent_prompts,
        "draft_texts": engine.draft_texts,
        "images": engine.images,
        **service.chat.n_bytes,
        "responses": service.responses.n_bytes + service.conversations.n_bytes,
    }


def resident_bytes() -> int:
    """Bytes of this process that are in memory now, freed ones that its heaps keep included; where the system does not
    tell, the most there ever were.
    """
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
