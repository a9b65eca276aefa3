"""Made-up machines: directories in place of /proc and /sys, and simulated GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyctl.doctor.facts import Facts, LlamaFacts, RequestedSettings
from pyctl.doctor.nvidia_smi import CardState
from pyctl.machine.probe import Card, Driver

GIB = 2**30

PCI_CARD = {
    "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de",
    "sys/bus/pci/devices/0000:01:00.0/class": "0x030000",
}

QUIET = {
    "proc/meminfo": "MemTotal: 67108864 kB\n",
    "proc/sys/kernel/osrelease": "6.12.0-generic\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/self/cgroup": "0::/user.slice\n",
    "sys/fs/cgroup/user.slice/memory.max": "max\n",
    "proc/self/mountinfo": "22 1 259:2 / / rw shared:1 - ext4 /dev/nvme0n1p2 rw\n",
    **PCI_CARD,
}
"""Files of a desktop on which nothing is wrong."""

RTX_3090 = Card("NVIDIA GeForce RTX 3090", (8, 6), 24 * GIB)


def card_state(**changes: Any) -> CardState:
    """Return the state of a card at rest, with ``changes``."""
    at_rest = {"lanes": (16, 16), "generations": (4, 4), "used": GIB}
    return CardState(RTX_3090.name, **{**at_rest, **changes})


AT_REST = card_state()

LIBRARIES = {
    "gpus": lambda: ["CUDA0"],
    "idle_card": lambda: "",
    "cuda": lambda: 13,
    "pin_error": lambda: "",
    "plan": list,
    "file": lambda path: (path.stat().st_size, True),
}


def desktop(root: Path, files: dict[str, str | None] | None = None, **changes: Any) -> Facts:
    """Return a desktop with a 3090, below ``root``; ``files`` are others, or gone if None.

    ``changes`` are fields of Facts, of RequestedSettings, or of LlamaFacts.
    """
    for name, text in {**QUIET, **(files or {})}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    model = root / "model.gguf"
    model.write_bytes(bytes(1000))
    requested = {"model_files": (model,), "cache_dir": root, "cache_bytes": 1000, "chats": True}
    facts = {
        "find_driver": lambda: Driver((13, 0), "580.95.05", (RTX_3090,)),
        "card_states": lambda: (AT_REST,),
        "limit_of": lambda number: (2**20, 2**20),
    }
    pick = lambda known: {name: changes[name] for name in known if name in changes}  # noqa: E731
    return Facts(
        root,
        requested=RequestedSettings(
            **{**requested, **pick((*requested, "ram_bytes", "locks_memory"))}
        ),
        llama=LlamaFacts(**{**LIBRARIES, **pick((*LIBRARIES, "error"))}),
        **{**facts, **pick(facts)},
    )
