"""Source distributions of llama-cpp-python, which hold llama.cpp's source: the pinned one, and
users'.

vendor/llama.cpp/unpack.py imports this before anything is installed, so the whole package
`pyctl.setup` needs only the standard library.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.machine.pin import read_pin
from pyctl.processes.module_command import module_command

__all__ = [
    "Release",
    "download_source",
    "new_directory",
    "open_release",
    "pip_command",
    "pip_environment",
    "unpack_source",
]

MAX_MEMBERS = 2**17
"""Members of an archive; llama-cpp-python's has 3,000."""
MAX_SOURCE = 2**32
"""Bytes of these members; llama-cpp-python's have 0.2 GB."""

BINDINGS_VERSION = r'__version__ = "([\w.]+)"'
LIBRARY_VERSION = r"\s+".join(
    rf"set\(LLAMA_VERSION_{part} +(\d+)\)" for part in ("MAJOR", "MINOR", "PATCH")
)


@dataclass(frozen=True)
class Release:
    """A source other than the pinned one: ``tree`` is llama.cpp's, ``bindings`` the package
    llama_cpp for it.

    ``version`` is the bindings'. ``name`` is the same, or for a tree without bindings ``tree-`` and
    llama.cpp's version. ``digest`` is the sha256 of the archive, empty for a directory.
    """

    name: str
    version: str
    tree: Path
    bindings: Path
    digest: str

    @property
    def has_bindings(self) -> bool:
        """True if the bindings are those of this source, not of the installed release."""
        return self.name == self.version


def pip_command(work: Path) -> list[str]:
    """Return the command that runs pip, which the environments of `uv tool` lack: the one of this
    environment, else one made in ``work``, else the one that uv fetches. Raises ConfigError.
    """
    if importlib.util.find_spec("pip") is not None:
        return module_command("pip")
    made = work / "pip" / "bin" / "python"
    if not made.exists():
        subprocess.run(
            [*module_command("venv"), str(work / "pip")], capture_output=True, check=False
        )
    pip = module_command("pip", str(made), ())
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode == 0:
        return pip
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "tool", "run", "--python", sys.executable, "pip"]
    raise ConfigError(
        "this Python environment has no pip, and a new one cannot be made; install uv or "
        "python3-venv"
    )


def pip_environment() -> dict[str, str]:
    """Return the environment without CMAKE_ARGS, which is meant for a build; here pip reads only
    the name and the version.
    """
    return {name: value for name, value in os.environ.items() if name != "CMAKE_ARGS"}


def download_source(pip: list[str], directory: Path, release: str = "") -> Path:
    """Fetch the source distribution of ``release`` into ``directory``, else the pinned one, which
    pip verifies.

    Raises ConfigError.
    """
    pin = read_pin()
    name = pin.requirement.partition("==")[0]
    requirement = f"{name}=={release}" if release else pin.requirement
    command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # Not ":all:", which would also hold for the build backend.
    command += ["--no-binary", name, "--dest", str(directory)]
    command += [requirement] if release else ["--require-hashes", "--requirement", str(pin.path)]
    # Without isolation pip takes the build backend that is already here instead of fetching it once
    # more.
    if pip[0] == sys.executable and importlib.util.find_spec("scikit_build_core") is not None:
        command.append("--no-build-isolation")
    if subprocess.run(command, env=pip_environment(), check=False).returncode != 0:
        raise ConfigError(f"pip could not fetch the source of {requirement} (see above)")
    archive = next(directory.glob("*.tar.gz"), None)
    if archive is None:
        raise ConfigError(
            f"pip ended well, but fetched no source of {requirement}: {' '.join(command)}"
        )
    return archive


def unpack_source(
    archive: Path,
    target: Path,
    wanted: Callable[[str], bool] = lambda path: True,
    below: str = "/vendor/llama.cpp/",
    *,
    max_bytes: int = MAX_SOURCE,
    max_members: int = MAX_MEMBERS,
) -> int:
    """Write the files ``below`` that directory in ``archive`` that are ``wanted``; return their
    number.

    Raises ValueError, before it writes, for a name that leads out of ``target``, and for more than
    ``max_bytes`` or ``max_members``.
    """
    count = n_members = n_bytes = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            n_members += 1
            n_bytes += max(member.size, 0)
            if n_members > max_members or n_bytes > max_bytes:
                raise ValueError(
                    f"it holds more than {max_members:,} members or {max_bytes:,} bytes"
                )
            _, _, path = member.name.partition(below)
            if not path or not member.isfile() or not wanted(path):
                continue
            if not {"", ".", ".."}.isdisjoint(
                path.split("/")
            ):  # with an empty part the rest is absolute
                raise ValueError(f"{member.name!r} is not a path below a directory")
            destination = target / path
            destination.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with source, destination.open("wb") as out:
                shutil.copyfileobj(source, out)
            destination.chmod(0o755 if member.mode & 0o100 else 0o644)
            count += 1
    return count


def open_release(pip: list[str], wanted: str, work: Path) -> Release:
    """Return the source that ``wanted`` names: a version, which pip fetches, an archive or a
    directory; if it is empty, the pinned release. Raises ConfigError.

    Archives are unpacked below ``work``, once.
    """
    digest = ""
    root = Path(wanted).expanduser().absolute()
    pin = read_pin()
    if not wanted or re.fullmatch(r"\d+(\.\w+)+", wanted):
        directory = work / f"archive-{wanted or pin.release}"
        root = next(directory.glob("*.tar.gz"), None) or download_source(pip, directory, wanted)
    if root.is_file():
        digest = hashlib.sha256(root.read_bytes()).hexdigest()
        if not wanted and digest != pin.digest:
            raise ConfigError(
                f"{root} is not the pinned release; remove it and run pyctl setup again"
            )
        root = _unpacked(root, work / f"release-{digest[:16]}")
    tree = root / "vendor" / "llama.cpp" if (root / "vendor" / "llama.cpp").exists() else root
    if not (tree / "include" / "llama.h").exists():
        raise ConfigError(
            f"{wanted} is neither a version nor a source tree or archive of llama.cpp or "
            "llama-cpp-python"
        )
    bindings = root / "llama_cpp"
    name = ""
    if not (bindings / "llama_cpp.py").exists():
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise ConfigError(
                "llama-cpp-python is not installed, whose bindings a tree of llama.cpp needs"
            )
        bindings = Path(spec.origin).parent
        name = f"tree-{_version(tree / 'CMakeLists.txt', LIBRARY_VERSION)}"
    version = _version(bindings / "__init__.py", BINDINGS_VERSION)
    return Release(name or version, version, tree, bindings, digest)


def _unpacked(archive: Path, target: Path) -> Path:
    """Unpack ``archive`` without its first directory into the new directory ``target``, which
    appears whole, and return it.
    """
    if not target.exists():
        try:
            with new_directory(target) as part:
                unpack_source(archive, part, below="/")
        except (OSError, ValueError, tarfile.TarError, EOFError) as error:
            raise ConfigError(f"{archive}: {error}") from error
    return target


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Provide a directory that gets the name ``target`` after the block, if that ends without an
    exception.
    """
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(target)


def _version(path: Path, pattern: str) -> str:
    """Return the groups of ``pattern`` in a file, with dots between. Raises ConfigError."""
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if match is None:
        raise ConfigError(f"{path} does not state its version")
    return ".".join(match.groups())
