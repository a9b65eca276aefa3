"""The pinned source distribution of llama-cpp-python, which holds llama.cpp's source: pin, download, unpacking.

vendor/llama.cpp/unpack.py imports this before anything is installed, so the whole package `pyctl.setup` needs the
standard library alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.module_command import module_command

__all__ = ["Pin", "download_source", "pip_command", "pip_environment", "read_pin", "unpack_source"]

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Pin:
    """The release of llama-cpp-python that this pyctl is built for, and the sha256 of its source distribution."""

    requirement: str
    digest: str
    path: Path

    @property
    def release(self) -> str:
        """The version alone, such as ``0.3.36``."""
        return self.requirement.partition("==")[2]


def read_pin() -> Pin:
    """Read pin.txt: the installed one beside this module, else the one of the source tree. Raises ConfigError."""
    path = HERE / "pin.txt"
    if not path.exists():
        path = HERE.parents[1] / "vendor" / "llama.cpp" / "pin.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; reinstall pyctl") from error
    match = re.search(r"^(\S+==\S+) --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    if match is None:
        raise ConfigError(f"{path}: no line of the form 'name==version --hash=sha256:...'")
    return Pin(match[1], match[2], path)


def pip_command(work: Path) -> list[str]:
    """The command that runs pip, which the environments of `uv tool` lack: the one of this environment, else one made
    in ``work``, else the one that uv fetches. Raises ConfigError."""
    if importlib.util.find_spec("pip") is not None:
        return module_command("pip")
    made = work / "pip" / "bin" / "python"
    if not made.exists():
        subprocess.run([*module_command("venv"), str(work / "pip")], capture_output=True, check=False)
    pip = module_command("pip", str(made), ())
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode == 0:
        return pip
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "tool", "run", "--python", sys.executable, "pip"]
    raise ConfigError("this Python environment has no pip, and a new one cannot be made; install uv or python3-venv")


def pip_environment() -> dict[str, str]:
    """The environment without CMAKE_ARGS, which is meant for a build; here pip reads only the name and the version."""
    return {name: value for name, value in os.environ.items() if name != "CMAKE_ARGS"}


def download_source(pip: list[str], directory: Path) -> Path:
    """Fetch the source distribution into ``directory``; pip verifies it against the pin. Raises ConfigError."""
    pin = read_pin()
    command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps"]
    # Not ":all:", which would also hold for the build backend.
    command += ["--no-binary", pin.requirement.partition("==")[0]]
    command += ["--dest", str(directory), "--requirement", str(pin.path)]
    # Without isolation pip takes the build backend that is already here instead of fetching it once more.
    if pip[0] == sys.executable and importlib.util.find_spec("scikit_build_core") is not None:
        command.append("--no-build-isolation")
    if subprocess.run(command, env=pip_environment(), check=False).returncode != 0:
        raise ConfigError(f"pip could not fetch the source of {pin.requirement} (see above)")
    archive = next(directory.glob("*.tar.gz"), None)
    if archive is None:
        raise ConfigError(f"pip ended well, but fetched no source of {pin.requirement}: {' '.join(command)}")
    return archive


def unpack_source(archive: Path, target: Path, wanted: Callable[[str], bool] = lambda path: True) -> int:
    """Write the files below vendor/llama.cpp in ``archive`` that are ``wanted``; returns how many."""
    count = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, path = member.name.partition("/vendor/llama.cpp/")
            if not path or not member.isfile() or ".." in path.split("/") or not wanted(path):
                continue
            destination = target / path
            destination.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with source, destination.open("wb") as out:
                shutil.copyfileobj(source, out)
            destination.chmod(0o755 if member.mode & 0o100 else 0o644)
            count += 1
    return count
