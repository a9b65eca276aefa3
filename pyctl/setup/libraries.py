"""llama.cpp's libraries that `pyctl setup` built: where they lie, and which of them a process uses.

Each build is one directory with libraries and built.json. Without one that fits, a process uses the libraries that
pip built with llama-cpp-python.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pyctl.atomic_file import write_atomic
from pyctl.setup.machine import NVIDIA, Card, Driver, find_driver, find_pci_cards
from pyctl.setup.source import read_pin
from pyctl.user_directory import user_directory

__all__ = [
    "BUILT",
    "BuiltLibraries",
    "build_home",
    "covers",
    "cpu_features",
    "data_home",
    "fits",
    "libraries_at",
    "unused_card",
    "use_libraries",
    "write_built",
]

BUILT = "built.json"

LIBRARY_PATH, MTMD_PATH = "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"
"""Variables by which llama-cpp-python finds libllama and libmtmd."""

CHOICE = "PYCTL_LIBS"
"""``package`` for the libraries of llama-cpp-python, or the directory that `pyctl setup --dir` was given."""

PACKAGE = "package"

VISIBLE, HIDDEN = "CUDA_VISIBLE_DEVICES", ("", "-1")
"""The variable that names the cards of a process, and its values that name none."""

FEATURES = re.compile(r"avx|amx|fma|f16c|bmi|sse|ssse|sve|sme|asimd|i8mm|bf16")
"""CPU features that GGML_NATIVE uses; others come and go with kernels."""


@dataclass(frozen=True)
class BuiltLibraries:
    """The content of built.json.

    ``architectures`` are such as ``86``, none for a CPU build. ``features`` are the CPU features of the machine that
    compiled. ``files`` maps names in ``directory`` to their bytes, ``outside`` lists libraries elsewhere. ``built`` is
    seconds since 1970.
    """

    release: str
    toolkit: str
    architectures: tuple[str, ...]
    compiler: str
    driver: str
    features: tuple[str, ...]
    files: Mapping[str, int]
    outside: tuple[str, ...]
    built: float
    directory: Path = field(default=Path(), compare=False)

    @property
    def is_whole(self) -> bool:
        """Whether all files are there, in their sizes."""
        try:
            sizes = {name: (self.directory / name).stat().st_size for name in self.files}
        except OSError:
            return False
        return bool(sizes) and sizes == dict(self.files) and all(map(os.path.exists, self.outside))


def data_home(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory for built libraries: that of PYCTL_LIBS, else XDG_DATA_HOME/pyctl."""
    chosen = environ.get(CHOICE, "")
    if chosen and chosen != PACKAGE:
        return Path(chosen)
    return user_directory("data", environ)


def build_home(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory for files that only a build needs: XDG_CACHE_HOME/pyctl/setup."""
    return user_directory("cache", environ) / "setup"


def write_built(built: BuiltLibraries) -> None:
    """Write built.json into the directory of ``built``, for all users, as the libraries are."""
    fields = {name: value for name, value in asdict(built).items() if name != "directory"}
    write_atomic(built.directory / BUILT, json.dumps(fields, indent=1).encode() + b"\n")
    (built.directory / BUILT).chmod(0o644)


def libraries_at(home: Path) -> list[BuiltLibraries]:
    """All complete builds below ``home``, the newest first. Unreadable ones are left out."""
    found = []
    for path in sorted((home / "llama").glob(f"*/{BUILT}")):
        if path.parent.name.startswith("."):
            continue  # not checked yet
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            built = BuiltLibraries(**values, directory=path.parent)
            is_whole = built.is_whole
        except (OSError, ValueError, TypeError, AttributeError):
            continue
        if is_whole:
            found.append(built)
    return sorted(found, key=lambda built: built.built, reverse=True)


def cpu_features() -> tuple[str, ...]:
    """The features of /proc/cpuinfo for which a compiler makes code."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    found = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return tuple(sorted(filter(FEATURES.match, found[1].split()))) if found else ()


def covers(architectures: Sequence[str], card: Card) -> bool:
    """Whether machine code for one of ``architectures`` runs on ``card``: same major version, minor not above."""
    for architecture in architectures:
        major, minor = int(architecture.rstrip("af")[:-1]), int(architecture.rstrip("af")[-1])
        if architecture[-1].isdigit() and major == card.capability[0] and minor <= card.capability[1]:
            return True
        if (major, minor) == card.capability:
            return True
    return False


def fits(built: BuiltLibraries, release: str, cards: Sequence[Card], features: Sequence[str]) -> bool:
    """Whether ``built`` is of this release and runs on this CPU and, if it uses CUDA, on all ``cards``."""
    if built.release != release or not set(built.features) <= set(features):
        return False
    return not built.architectures or (bool(cards) and all(covers(built.architectures, card) for card in cards))


def use_libraries(
    environ: MutableMapping[str, str] = os.environ,
    look: Callable[[], Driver | None] = find_driver,
    features: Callable[[], Sequence[str]] = cpu_features,
) -> BuiltLibraries | None:
    """Set the variables that make `import llama_cpp` load the newest build that fits; None if none does.

    Variables that are set already stay. The driver is asked only if there is a CUDA build of this release.
    """
    if LIBRARY_PATH in environ or environ.get(CHOICE) == PACKAGE or not os.path.isdir(data_home(environ) / "llama"):
        return None
    release = read_pin().release
    candidates = [built for built in libraries_at(data_home(environ)) if built.release == release]
    driver = look() if any(built.architectures for built in candidates) else None
    cards = driver.cards if driver is not None else ()
    chosen = next((built for built in candidates if fits(built, release, cards, features())), None)
    if chosen is not None:
        environ[LIBRARY_PATH] = str(chosen.directory)
        environ.setdefault(MTMD_PATH, str(chosen.directory))
    return chosen


def unused_card(
    environ: Mapping[str, str] = os.environ,
    look: Callable[[], Driver | None] = find_driver,
    look_at_bus: Callable[[], Sequence[str]] = find_pci_cards,
) -> str:
    """One line for a process whose libraries use no GPU: why an NVIDIA card is idle, and the command that helps.

    Empty if there is no such card, or if the user chose the libraries or hides the cards.
    """
    if environ.get(CHOICE) == PACKAGE or environ.get(VISIBLE) in HIDDEN:
        return ""
    driver = look()
    if driver is None or not (driver.cards or driver.error):
        if NVIDIA not in look_at_bus():
            return ""
        return "the NVIDIA card of this machine is idle: its driver is not available; see: pyctl setup"
    if driver.error:
        if NVIDIA not in look_at_bus():
            return ""
        return f"the NVIDIA card of this machine is idle: its driver reports error {driver.error}; see: pyctl setup"
    name, reason = driver.cards[0].name, "these libraries of llama.cpp use the CPU only"
    if LIBRARY_PATH not in environ:
        release, built = read_pin().release, [each for each in libraries_at(data_home(environ)) if each.architectures]
        if built and all(each.release != release for each in built):
            reason = f"its libraries are of llama-cpp-python {built[0].release}, and pyctl needs {release}"
        elif built:
            reason = f"its libraries were built for other cards ({', '.join(built[0].architectures)}) or another CPU"
    return f"{name} is idle: {reason}; to build them for it: pyctl setup"
