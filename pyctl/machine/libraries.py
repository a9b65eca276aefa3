"""llama.cpp's libraries that `pyctl setup` built: where they lie, and which of them a process uses.

Each build is one directory with libraries and built.json. A build of another release than the
pinned one also has the Python files of its bindings in ``bindings``, and those modules of the
extension that passed their test in ``extension``. Without a build that fits, a process uses the
libraries that pip built with llama-cpp-python.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from pyctl.files.atomic_file import write_atomic
from pyctl.files.user_directory import user_directory
from pyctl.machine.environment import CHOICE, LIBRARY_PATH, MTMD_PATH, PACKAGE, TRIAL
from pyctl.machine.pin import extension_digest, read_pin
from pyctl.machine.probe import NVIDIA, Driver, find_driver, find_pci_cards

__all__ = [
    "BINDINGS",
    "BUILT",
    "EXTENSION",
    "MODULES",
    "BuiltLibraries",
    "build_home",
    "capability",
    "choose",
    "covers",
    "cpu_features",
    "data_home",
    "fits",
    "libraries_at",
    "libraries_in_use",
    "unused_card",
    "unused_choice",
    "use_libraries",
    "use_release",
    "write_built",
]

BUILT = "built.json"
"""The file with the content of a build, in its directory."""
CHOSEN = "chosen"
"""The file with the name of the build that a user chose, next to all builds."""

BINDINGS = "bindings"
EXTENSION = "extension"

MODULES = ("_core", "_drafts", "_pool")
"""Native modules of the extension; the others need the first."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that names the cards of a process."""
HIDDEN = ("", "-1")
"""The values of that variable that name no card."""

FEATURES = re.compile(r"avx|amx|fma|f16c|bmi|sse|ssse|sve|sme|asimd|i8mm|bf16")
"""CPU features that GGML_NATIVE uses; others come and go with kernels."""


@dataclass(frozen=True)
class BuiltLibraries:
    """The content of built.json.

    ``architectures`` are such as ``86``, none for a CPU build. ``features`` are the CPU features of
    the machine that compiled. ``files`` maps names in ``directory`` to their bytes. ``built`` is
    seconds since 1970.

    Of a release that a user chose: ``digests`` has the sha256 of its ``archive``, and of ``csrc``,
    from which its modules were compiled; ``missing`` has the reason of each module that did not
    compile or pass.
    """

    release: str
    toolkit: str
    architectures: tuple[str, ...]
    features: tuple[str, ...]
    files: Mapping[str, int]
    built: float
    directory: Path = field(default=Path(), compare=False)
    digests: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """True if all files exist, in their sizes."""
        try:
            sizes = {name: (self.directory / name).stat().st_size for name in self.files}
        except OSError:
            return False
        return bool(sizes) and sizes == dict(self.files)

    @property
    def is_tried(self) -> bool:
        """True if the modules of this build of a chosen release are this pyctl's."""
        return self.digests.get("csrc") == extension_digest()


def data_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for built libraries: PYCTL_LIBS, else XDG_DATA_HOME/pyctl."""
    chosen = environ.get(CHOICE, "")
    if chosen and chosen != PACKAGE:
        return Path(chosen)
    return user_directory("data", environ)


def build_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for files that only a build needs: XDG_CACHE_HOME/pyctl/setup."""
    return user_directory("cache", environ) / "setup"


def write_built(built: BuiltLibraries) -> BuiltLibraries:
    """Write built.json into the directory of ``built``, for all users, as the libraries are; return
    it with its existing files.
    """
    directory = built.directory
    files = {
        str(path.relative_to(directory)): path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file()
    }
    built = replace(built, files=files)
    fields = {name: value for name, value in asdict(built).items() if name != "directory"}
    write_atomic(directory / BUILT, json.dumps(fields, indent=1).encode() + b"\n")
    (directory / BUILT).chmod(0o644)
    return built


def choose(home: Path, name: str) -> None:
    """Let processes use the build called ``name`` from now on, the pinned release if it is
    empty.
    """
    if name:
        write_atomic(home / "llama" / CHOSEN, name.encode())
        (home / "llama" / CHOSEN).chmod(0o644)
    else:
        (home / "llama" / CHOSEN).unlink(missing_ok=True)


def chosen_name(home: Path) -> str:
    """Return the name of the build that a user chose; empty for the pinned release."""
    try:
        return (home / "llama" / CHOSEN).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def libraries_at(home: Path) -> list[BuiltLibraries]:
    """Return all complete builds below ``home``, the newest first; not those in hidden directories,
    which are not checked.
    """
    builds = map(_read_built, sorted((home / "llama").glob("[!.]*")))
    return sorted(
        (built for built in builds if built is not None),
        key=lambda built: built.built,
        reverse=True,
    )


def _read_built(directory: Path) -> BuiltLibraries | None:
    """Return the complete build in ``directory``; None if there is none."""
    try:
        values = json.loads((directory / BUILT).read_text(encoding="utf-8"))
        names = BuiltLibraries.__dataclass_fields__.keys() & values.keys()
        values = {
            name: tuple(values[name]) if isinstance(values[name], list) else values[name]
            for name in names
        }
        built = BuiltLibraries(**values, directory=directory)
        return built if built.is_whole else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def cpu_features() -> tuple[str, ...]:
    """Return the features of /proc/cpuinfo for which a compiler makes code."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    match = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return tuple(sorted(filter(FEATURES.match, match[1].split()))) if match else ()


def capability(architecture: str) -> tuple[int, int]:
    """Return a compute capability such as (12, 0) for ``120a``."""
    digits = architecture.rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def covers(architectures: Sequence[str], wanted: tuple[int, int]) -> bool:
    """Return whether machine code for one of ``architectures`` runs on a card with the ``wanted``
    capability: same major version, minor not above.
    """
    for architecture in architectures:
        built = capability(architecture)
        if built == wanted or (
            architecture[-1].isdigit() and built[0] == wanted[0] and built <= wanted
        ):
            return True
    return False


def fits(
    built: BuiltLibraries, release: str, cards: Sequence[tuple[int, int]], features: Sequence[str]
) -> bool:
    """Return whether ``built`` is of this release and runs on this CPU and, if it uses CUDA, on
    ``cards`` of all these capabilities.
    """
    if built.release != release or not set(built.features) <= set(features):
        return False
    return not built.architectures or (
        bool(cards) and all(covers(built.architectures, card) for card in cards)
    )


def use_libraries(
    environ: MutableMapping[str, str] = os.environ,
    look: Callable[[], Driver | None] = find_driver,
    features: Callable[[], Sequence[str]] = cpu_features,
) -> BuiltLibraries | None:
    """Set the variables that make `import llama_cpp` load the chosen build, else the newest that
    fits; None for none.

    Variables that are set already stay. The driver is queried only if there is a CUDA build of this
    release.
    """
    if (
        LIBRARY_PATH in environ
        or environ.get(CHOICE) == PACKAGE
        or not os.path.isdir(data_home(environ) / "llama")
    ):
        return None
    release = read_pin().release
    builds = libraries_at(data_home(environ))
    name = chosen_name(data_home(environ))
    candidates = [built for built in builds if built.directory.name == name and built.is_tried]
    candidates += [built for built in builds if built.release == release and not built.digests]
    driver = look() if any(built.architectures for built in candidates) else None
    cards = [card.capability for card in driver.cards] if driver is not None else []
    chosen = next(
        (built for built in candidates if fits(built, built.release, cards, features())), None
    )
    if chosen is not None:
        environ[LIBRARY_PATH] = str(chosen.directory)
        environ.setdefault(MTMD_PATH, str(chosen.directory))
    return chosen


class _Modules:
    """A finder of `pyctl._core` and the others in ``place`` and nowhere else, such as in a build of
    another release.
    """

    def __init__(self, place: Path) -> None:
        self._place = place

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the module called ``name``, None if it is not a native one. Raises
        ModuleNotFoundError if it is excluded.
        """
        package, _, module = name.partition(".")
        if package != "pyctl" or module not in MODULES:
            return None
        file = self._place / f"{module}{EXTENSION_SUFFIXES[0]}"
        if not file.exists():
            built = _read_built(self._place.parent)
            reason = built.missing.get(module) if built is not None else None
            raise ModuleNotFoundError(reason or f"{file} is missing", name=name)
        return spec_from_file_location(name, file)


def use_release(
    environ: Mapping[str, str] = os.environ,
    path: list[str] = sys.path,
    finders: list[Any] = sys.meta_path,
) -> None:
    """Let this process import bindings and native modules of the build that ``environ`` names, if
    it has its own, and the modules next to the one that it tries.
    """
    directory = Path(environ.get(LIBRARY_PATH, ""))
    if directory.is_absolute() and (directory / BINDINGS).is_dir():
        path.insert(0, str(directory / BINDINGS))
        finders.insert(0, _Modules(directory / EXTENSION))
    if TRIAL in environ:
        finders.insert(0, _Modules(Path(environ[TRIAL]).parent))


def libraries_in_use(environ: Mapping[str, str] = os.environ) -> BuiltLibraries | None:
    """Return the build that `use_libraries` chose for a process with these variables, None for
    other libraries.
    """
    return _read_built(Path(environ[LIBRARY_PATH])) if LIBRARY_PATH in environ else None


def unused_choice(environ: Mapping[str, str] = os.environ) -> str:
    """Return one line: the reason why `use_libraries` rejected the user's choice, and the command
    that helps; empty if it did not.
    """
    home = data_home(environ)
    name = chosen_name(home)
    directory = home / "llama" / name
    if not name or environ.get(CHOICE) == PACKAGE or environ.get(LIBRARY_PATH) == str(directory):
        return ""
    chosen = _read_built(directory)
    if chosen is None:
        reason = "its files are missing or damaged"
    elif not chosen.is_tried:
        reason = "it was tested with another release of pyctl"
    else:
        reason = "it was built for another machine"
    return (
        f"{name} of llama.cpp is not used: {reason}; to build it again or to stay: pyctl setup "
        "--llama-cpp or --pinned"
    )


def unused_card(
    environ: Mapping[str, str] = os.environ,
    look: Callable[[], Driver | None] = find_driver,
    look_at_bus: Callable[[], Sequence[str]] = find_pci_cards,
) -> str:
    """Return one line for a process whose libraries use no GPU: the reason why an NVIDIA card is
    idle, and the command that helps.

    Empty if there is no such card, or if the user chose the libraries or hides the cards.
    """
    if environ.get(CHOICE) == PACKAGE or environ.get(VISIBLE) in HIDDEN:
        return ""
    driver = look()
    if driver is None or not driver.cards:
        fault = (
            f"reports error {driver.error}"
            if driver is not None and driver.error
            else "is not available"
        )
        line = f"the NVIDIA card of this machine is idle: its driver {fault}; see: pyctl setup"
        return line if NVIDIA in look_at_bus() else ""
    name = driver.cards[0].name
    reason = "these libraries of llama.cpp use the CPU only"
    if LIBRARY_PATH not in environ and any(
        built.architectures for built in libraries_at(data_home(environ))
    ):
        reason = (
            "its libraries were built for other cards, another CPU or not for llama.cpp "
            f"{read_pin().release}"
        )
    return f"{name} is idle: {reason}; to build them for it: pyctl setup"
