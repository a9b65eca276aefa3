"""The release of llama-cpp-python that this pyctl is built for, and the extension's sources."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError

__all__ = ["Pin", "extension_digest", "extension_source", "read_pin"]

PACKAGE = Path(__file__).resolve().parents[1]

INSTALLED = PACKAGE / "setup"
"""The folder into which CMakeLists.txt installs pin.txt and the sources; in a source tree they are
outside of the package.
"""


@dataclass(frozen=True)
class Pin:
    """The release of llama-cpp-python that this pyctl is built for, and the sha256 of its source
    distribution.
    """

    requirement: str
    digest: str
    path: Path

    @property
    def release(self) -> str:
        """Only the version, such as ``0.3.36``."""
        return self.requirement.partition("==")[2]


def read_pin() -> Pin:
    """Read pin.txt: the installed one next to this module, else the one of the source tree. Raises
    ConfigError.
    """
    path = INSTALLED / "pin.txt"
    if not path.exists():
        path = PACKAGE.parent / "vendor" / "llama.cpp" / "pin.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; reinstall pyctl") from error
    match = re.search(r"^(\S+==\S+) --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    if match is None:
        raise ConfigError(f"{path}: no line of the form 'name==version --hash=sha256:...'")
    return Pin(match[1], match[2], path)


def extension_source() -> Path:
    """Return the directory with the extension's CMakeLists.txt and csrc: installed next to this
    module, or the source tree.
    """
    installed = INSTALLED / "extension"
    return installed if installed.exists() else PACKAGE.parent


def extension_digest() -> str:
    """Return the sha256 of the extension's sources."""
    source = extension_source()
    digest = hashlib.sha256()
    for path in [source / "CMakeLists.txt", *sorted((source / "csrc").rglob("*.*"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()
