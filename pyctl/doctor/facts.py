"""Facts for checks: files of /proc and /sys, the driver, llama.cpp's libraries, and the settings of
serve.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from pyctl.doctor.finding import UnknownError
from pyctl.doctor.nvidia_smi import CardState, card_states
from pyctl.machine.probe import NVIDIA, Driver, find_driver, find_pci_cards

__all__ = ["Facts", "LlamaFacts", "Mount", "RequestedSettings", "existing"]


def _not_loaded(*_: object) -> NoReturn:
    raise UnknownError("llama.cpp's libraries are not loaded")


@dataclass(frozen=True)
class LlamaFacts:
    """The facts from llama.cpp's libraries, read only when a check needs them. Each function may
    raise UnknownError.

    ``describe_missing`` are lines about native modules that do not fit these libraries, and about a
    release that was chosen and is not in use. ``gpus`` are the names of GPUs they can use;
    ``idle_card`` is why they use none, and after the last semicolon the remedy. ``cuda`` is the
    CUDA version that they were built with, 0 without CUDA. ``pin_error`` is empty if memory can be
    pinned. ``plan`` are the warnings of a dry run with the given flags, it raises ModelError if the
    model cannot be served so; ``file`` are the bytes that a model's file must have, and if it has a
    chat template, ModelError for a damaged one. ``error`` is why the libraries do not load, empty
    if they do.
    """

    error: str = ""
    describe_missing: Callable[[], Sequence[str]] = tuple
    gpus: Callable[[], Sequence[str]] = field(default_factory=lambda: _not_loaded)
    idle_card: Callable[[], str] = field(default_factory=lambda: _not_loaded)
    cuda: Callable[[], int] = field(default_factory=lambda: _not_loaded)
    pin_error: Callable[[], str] = field(default_factory=lambda: _not_loaded)
    plan: Callable[[], Sequence[str]] = field(default_factory=lambda: _not_loaded)
    file: Callable[[Path], tuple[int, bool]] = field(default_factory=lambda: _not_loaded)


@dataclass(frozen=True)
class RequestedSettings:
    """The demands of serve's flags on the machine; sizes are bytes.

    ``model_files`` are all files of the model. ``cache_dir`` is the directory of the disk cache,
    which need not exist, None without a disk cache. ``cache_bytes`` is None if the free space
    decides, ``ram_bytes`` if the free memory does. A model that ``chats`` needs its own template.
    """

    model_files: tuple[Path, ...] = ()
    cache_dir: Path | None = None
    cache_bytes: int | None = None
    ram_bytes: int | None = None
    locks_memory: bool = False
    chats: bool = False


@dataclass(frozen=True)
class Mount:
    """A mounted file system: its ``kind``, such as ext4, and its ``source``, such as /dev/sda1."""

    point: str
    kind: str
    source: str


@dataclass
class Facts:
    """The facts of the machine below ``root``; everything that a test replaces is a field."""

    root: Path = Path("/")
    requested: RequestedSettings = field(default_factory=RequestedSettings)
    llama: LlamaFacts = field(default_factory=LlamaFacts)
    find_driver: Callable[[], Driver | None] = find_driver
    card_states: Callable[[], tuple[CardState, ...] | None] = card_states
    limit_of: Callable[[int], tuple[int, int]] = resource.getrlimit

    # -- files
    # ----------------------------------------------------------------------------------

    def text(self, name: str) -> str:
        """Return the text of a file below the root. Raises UnknownError if it cannot be read."""
        try:
            return (self.root / name).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UnknownError(f"/{name}: {error.strerror}") from error

    def number(self, name: str) -> int:
        """Return the number in a file below the root. Raises UnknownError if there is none."""
        text = self.text(name).strip()
        if not text.lstrip("-").isdigit():
            raise UnknownError(f"/{name} is not a number")
        return int(text)

    def has(self, name: str) -> bool:
        """Return whether the file exists below the root."""
        return (self.root / name).exists()

    @cached_property
    def is_wsl(self) -> bool:
        """True if this is Linux on Windows."""
        return "microsoft" in self.text("proc/sys/kernel/osrelease").lower()

    @property
    def is_container(self) -> bool:
        """True if docker or podman started this process."""
        return self.has(".dockerenv") or self.has("run/.containerenv")

    # -- cards
    # ----------------------------------------------------------------------------------

    @cached_property
    def has_nvidia(self) -> bool:
        """True if the machine has an NVIDIA card, with a driver or without."""
        return (
            NVIDIA in find_pci_cards(self.root)
            or self.has("proc/driver/nvidia/version")
            or self.has("usr/lib/wsl/lib/libcuda.so.1")
        )

    @cached_property
    def driver(self) -> Driver | None:
        """Facts from the NVIDIA driver; the query takes a moment."""
        return self.find_driver()

    @cached_property
    def cards(self) -> tuple[CardState, ...]:
        """The state of each NVIDIA card. Raises UnknownError if nvidia-smi fails."""
        states = self.card_states()
        if states is None:
            raise UnknownError("nvidia-smi does not answer")
        return states

    # -- disks
    # ----------------------------------------------------------------------------------

    def mount_of(self, path: Path) -> Mount:
        """Return the file system of ``path`` or of its nearest existing directory. Raises
        UnknownError if none is found.
        """
        path = existing(path)
        mount = None
        for line in self.text("proc/self/mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            if len(before.split()) < 5 or len(after.split()) < 2:
                continue
            point = before.split()[4].replace("\\040", " ")
            kind, source = after.split()[:2]
            is_above = path.is_relative_to(point)
            if is_above and (
                mount is None or len(point) >= len(mount.point)
            ):  # the last of equal ones is on top
                mount = Mount(point, kind, source)
        if mount is None:
            raise UnknownError(f"/proc/self/mountinfo does not name the file system of {path}")
        return mount


def existing(path: Path) -> Path:
    """Return ``path``, or its nearest parent that exists, without links."""
    path = path.expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.resolve()
