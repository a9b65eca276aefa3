"""The file with llama.cpp's library for NVIDIA cards in a release of pyctl: a directory, or its
URL, with SHA256SUMS.

Nothing of the file is used before its hash is verified; reads and writes are bounded.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import os
import platform
import re
import sys
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from pyctl.errors import ConfigError
from pyctl.machine.control_groups import read_text
from pyctl.machine.libraries import capability, covers
from pyctl.machine.pin import read_pin
from pyctl.setup.source import new_directory

__all__ = [
    "Manifest",
    "ReleaseFile",
    "UnfitError",
    "check_address",
    "fetch",
    "find_cuda_file",
    "release_place",
    "unpack",
    "wheel_libraries",
]

SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"
FORMAT = 1

MAX_TEXT = 2**20
"""Bytes of SHA256SUMS or manifest.json."""
MAX_FILE = 2**31
"""Bytes of the compiled file."""
MAX_UNPACKED = 2**32
"""Bytes of all files in it."""
MAX_WINDOW = 2**27
"""Bytes of zstd's window."""

_ODD_CONTENT = (
    *(OSError, EOFError, ValueError, TypeError, KeyError, tarfile.TarError),
    *(
        AttributeError,
        OverflowError,
        RecursionError,
    ),  # of a manifest with a list, 1e400 or deep brackets
)
"""The errors that an archive with any content may raise."""

SILENCE_SECONDS = 60.0
PIECE = 2**20

LINKS = re.compile(r'find-links[":=,\s\[]+([^"\s]+)"')
"""The fields in the notes of uv and pipx about a program: where they looked for its wheel besides
the index.
"""


class UnfitError(ConfigError):
    """The file is whole, but not for this machine or this pyctl; to compile helps."""


@dataclass(frozen=True)
class ReleaseFile:
    """A file of a release, and the sha256 that SHA256SUMS has for it."""

    url: str
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    ``digest`` is llama.cpp's source's. ``requirements`` are NVIDIA's wheels with ``libraries``.
    ``files`` maps each other member to its sha256 and size.
    """

    digest: str
    toolkit: str
    architectures: tuple[str, ...]
    requirements: tuple[str, ...]
    libraries: tuple[str, ...]
    files: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        """Raise ValueError for a name that is a path, and for a requirement that is not a wheel of
        NVIDIA.
        """
        for pattern, names in (
            (r"[\w+-][\w.+-]*", (*self.files, *self.libraries, self.toolkit, *self.architectures)),
            (r"nvidia-[a-z0-9-]+==[\d.]+", self.requirements),
        ):
            if wrong := [name for name in names if not re.fullmatch(pattern, name, re.ASCII)]:
                raise ValueError(f"{wrong[0]!r} is not a valid name")
        if not 0 <= min(self.sizes, default=0) <= sum(self.sizes) <= MAX_UNPACKED:
            raise ValueError(f"its content is not between 0 and {MAX_UNPACKED} bytes")

    @property
    def sizes(self) -> list[int]:
        """Bytes of each file."""
        return [int(file["size"]) for file in self.files.values()]


def release_place(environ: Mapping[str, str] = os.environ, prefix: Path = Path(sys.prefix)) -> str:
    """Return the directory or URL of PYCTL_RELEASE, else the place where pip, uv or pipx found the
    wheel of this package; empty if they noted none.
    """
    if "PYCTL_RELEASE" in environ:
        return environ["PYCTL_RELEASE"]
    try:
        noted = json.loads(distribution("pyctl-llama").read_text("direct_url.json") or "{}").get(
            "url", ""
        )
    except (PackageNotFoundError, ValueError):
        noted = ""
    if noted.endswith(".whl"):
        return str(noted.rpartition("/")[0])
    notes = [read_text(prefix / name) for name in ("uv-receipt.toml", "pipx_metadata.json")]
    return next((match[1] for match in map(LINKS.search, notes) if match is not None), "")


def wheel_libraries() -> Path:
    """Return the directory with llama.cpp's libraries from the wheel of a release, which have a
    variant for each kind of CPU.

    Raises UnfitError if pip compiled them: ggml then has no place for a library that is added.
    """
    spec = importlib.util.find_spec("llama_cpp")
    directory = (
        Path(spec.origin).with_name("lib")
        if spec is not None and spec.origin is not None
        else Path()
    )
    if not any(directory.glob("libggml-cpu-*.so")) or (directory / "libggml-cpu.so").exists():
        raise UnfitError(
            "the installed llama-cpp-python does not belong to the release of the compiled file"
        )
    return directory


def find_cuda_file(place: str) -> ReleaseFile | None:
    """Return the file for cards in the release at ``place``, for this processor and the pinned
    llama.cpp; None without one.

    Raises ConfigError if ``place`` has no SHA256SUMS.
    """
    base = place.rstrip("/") if "://" in place else Path(place).expanduser().resolve().as_uri()
    with _reading(f"{base}/{SUMS}") as source:
        text = source.read(MAX_TEXT).decode("utf-8", "replace")
    name = rf"pyctl-cuda-{re.escape(read_pin().release)}-cuda[\w.]+-{platform.machine()}\.tar\.zst"
    match = re.search(rf"^([0-9a-f]{{64}}) [ *]({name})$", text, re.MULTILINE)
    return ReleaseFile(f"{base}/{match[2]}", match[1]) if match is not None else None


def fetch(file: ReleaseFile, directory: Path) -> Path:
    """Fetch ``file`` into a separate directory below ``directory``, unless it is there with the
    same hash.

    Raises ConfigError if it is damaged or too large.
    """
    target = directory / f"file-{file.digest[:16]}" / file.url.rpartition("/")[2]
    part = target.with_suffix(".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    if _has_digest(target, file.digest):
        return target
    digest = hashlib.sha256()
    n_bytes = 0
    part.unlink(missing_ok=True)  # which may be a link to elsewhere
    with _reading(file.url) as source, part.open("xb") as out:
        n_bytes = int(source.headers.get("Content-Length") or 0)
        while n_bytes <= MAX_FILE and (data := source.read(PIECE)):
            digest.update(data)
            n_bytes = max(n_bytes, out.tell() + out.write(data))
    if n_bytes > MAX_FILE or digest.hexdigest() != file.digest:
        part.unlink()
        fault = (
            "is too large"
            if n_bytes > MAX_FILE
            else f"is damaged: its SHA-256 is not the one in {SUMS}"
        )
        raise ConfigError(f"{file.url} {fault}")
    return part.rename(target)


def _has_digest(path: Path, digest: str) -> bool:
    """Return whether the file has that sha256: a power failure may have cut it off, another user
    may have replaced it.
    """
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(PIECE):
                found.update(data)
    except OSError:
        return False
    return found.hexdigest() == digest


def check_address(url: str, before: str = "") -> None:
    """Raise ValueError for an address, or a redirect from ``before``, that would let others change
    a release.

    SHA256SUMS has no signature, so the way to it has to be safe: https, a file, or http on this
    machine.
    """
    parts = urlsplit(url)
    is_here = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.scheme not in ("https", "file") and not (is_here and not before.startswith("https:")):
        raise ValueError("a release is a directory or an address of https, also after a redirect")


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """The handler of redirects, which refuses the addresses that `check_address` refuses."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        check_address(newurl, req.full_url)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextmanager
def _reading(url: str) -> Iterator[Any]:
    """Provide the answer of ``url``: a file, or a server of HTTP."""
    try:
        check_address(url)
        with urllib.request.build_opener(_CheckedRedirects).open(
            url, timeout=SILENCE_SECONDS
        ) as source:
            yield source
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(f"{url}: {error}") from error


class _Bounded:
    """A stream of which ``left`` bytes may be read."""

    def __init__(self, stream: IO[bytes], left: int) -> None:
        self._stream = stream
        self.left = left

    def read(self, n_bytes: int) -> bytes:
        data = self._stream.read(min(n_bytes, self.left + 1))
        self.left -= len(data)
        if self.left < 0:
            raise ValueError("it is larger than in its manifest")
        return data


def unpack(archive: Path, target: Path, architectures: tuple[str, ...]) -> Manifest:
    """Unpack ``archive`` into the new directory ``target``, which appears whole.

    Raises UnfitError, before anything is written, if it does not serve ``architectures``, and
    ConfigError if its content does not match its manifest.
    """
    import zstandard  # a build needs the standard library alone

    try:
        with archive.open("rb") as file:
            stream = _Bounded(
                zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(file), MAX_TEXT
            )
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                manifest = _manifest(tar)
                if manifest.digest != read_pin().digest:
                    raise UnfitError(f"{archive.name} is of another llama.cpp")
                if without := [
                    architecture
                    for architecture in architectures
                    if not covers(manifest.architectures, capability(architecture))
                ]:
                    raise UnfitError(
                        f"{archive.name} has no code for compute capability {', '.join(without)}"
                    )
                stream.left = sum(manifest.sizes) + MAX_TEXT
                with new_directory(target) as part:
                    _write_members(tar, manifest, part)
                return manifest
    except (*_ODD_CONTENT, zstandard.ZstdError) as error:
        raise ConfigError(f"{archive}: {str(error) or type(error).__name__}") from error


def _manifest(tar: tarfile.TarFile) -> Manifest:
    member = tar.next()
    if member is None or member.name != MANIFEST or not member.isreg() or member.size > MAX_TEXT:
        raise ValueError(f"it does not start with {MANIFEST}")
    content = tar.extractfile(member)
    assert content is not None
    values = json.loads(content.read())
    if values["format"] != FORMAT:
        raise UnfitError(f"the file is of format {values['format']}, this pyctl reads {FORMAT}")
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return Manifest(**{field.name: values[field.name] for field in fields(Manifest)})


def _write_members(tar: tarfile.TarFile, manifest: Manifest, place: Path) -> None:
    """Write the members of ``tar`` into ``place`` by the names of ``manifest``, which has all of
    them.
    """
    missing = dict(manifest.files)
    while (member := tar.next()) is not None:
        noted = missing.pop(member.name, None)
        content = tar.extractfile(member) if member.isreg() else None
        if noted is None or content is None or member.size != noted["size"]:
            raise ValueError(f"{member.name!r} does not match {MANIFEST}")
        digest = hashlib.sha256()
        with (place / member.name).open("xb") as out:
            while data := content.read(PIECE):
                digest.update(data)
                out.write(data)
        if digest.hexdigest() != noted["sha256"]:
            raise ValueError(f"{member.name!r} is damaged")
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
