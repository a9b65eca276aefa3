"""Model files by their address: interrupted downloads resume, and only whole GGUF files are
kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote, unquote

import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pyctl.errors import ConfigError
from pyctl.files.atomic_file import sync_directory, write_atomic
from pyctl.files.free_space import free_at
from pyctl.files.user_directory import user_directory
from pyctl.http_client import http_client
from pyctl.model_files import split_names
from pyctl.settings.limit import limit
from pyctl.text import duration, error_text, one_line

__all__ = ["MAGIC", "DownloadLog", "download", "fetch_url"]

log = logging.getLogger(__name__)

MAGIC = b"GGUF"
"""The first bytes of every GGUF file (docs/gguf.md of ggml)."""

CONNECT_SECONDS = 10.0
READ_SECONDS = limit(
    60, "silence of a server during a download", "the download is resumed", "connection", "s"
)
MAX_TRIES = limit(
    5, "attempts of a download that each bring less than 1 MiB", "the program ends", "connection"
)
SPARE_BYTES = limit(
    256 * 2**20, "disk space that a download leaves free", "the program ends", "disk", "bytes"
)
PAUSE_SECONDS = 1.0
"""The time before the second try; doubled before each further one."""

LINE_SECONDS = 60.0
"""Seconds between two lines of a download in a log."""

MIB = 2**20

_STEP = 2**20
_NOTE_BYTES = 64 * _STEP
_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))


Show: TypeAlias = Callable[[int, int | None], None]
"""Shows the bytes that are here, and all bytes if their number is known."""


class _Broken(Exception):
    """The download broke off; another try may get further."""


class DownloadLog:
    """A log of a download that no terminal shows: a line at its start, then one a minute.

    ``clock`` shows seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = one_line(name)
        self._clock = clock
        self._began = 0.0
        self._first = -1  # bytes that were here before
        self._next_line = 0.0

    def reached(self, n_bytes: int, total: int | None) -> None:
        """Record that ``n_bytes`` of ``total`` were received; None if the size is unknown."""
        now = self._clock()
        if self._first < 0:
            self._first = n_bytes
            self._began = now
            self._next_line = now + LINE_SECONDS
            size = f": {total / MIB:,.0f} MiB" if total else ""
            before = f", {n_bytes / MIB:,.0f} of them are already stored" if n_bytes else ""
            log.info("downloading %s%s%s", self._name, size, before)
            return
        if now < self._next_line or n_bytes == total:
            return
        self._next_line = now + LINE_SECONDS
        rate = (n_bytes - self._first) / (now - self._began)
        parts = [f"{n_bytes / MIB:,.0f} MiB"]
        if total:
            parts = [f"{n_bytes / MIB:,.0f} of {total / MIB:,.0f} MiB ({n_bytes / total:.0%})"]
        parts.append(f"{rate / MIB:,.1f} MiB/s")
        if total and rate > 0:
            parts.append(f"{duration((total - n_bytes) / rate)} to go")
        log.info("downloading %s: %s", self._name, ", ".join(parts))


def fetch_url(address: str, offline: bool) -> Path:
    """Return the file at ``address``, under the user's cache directory; parts of a split model have
    the same directory.

    Each scheme, host, port, folder and query has a separate place. Raises ConfigError.
    """
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{one_line(address)} is not an address: {error}") from error
    folder, _, last = url.raw_path.partition(b"?")[0].decode("ascii").rpartition("/")
    name = unquote(last).rpartition("/")[2]
    if not name.endswith(".gguf") or not name.isprintable():
        raise ConfigError(f"{_without_secrets(url)} does not end in the name of a GGUF file")
    whole = f"{url.scheme}://{url.netloc.decode('ascii')}{folder}?{url.query.decode('ascii')}"
    directory = user_directory("cache", os.environ) / "models"
    directory /= hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
    for part in split_names(name):
        path = f"{folder}/{last if part == name else quote(part)}".encode()
        source = url.copy_with(raw_path=path + (b"?" + url.query if url.query else b""))
        try:
            if (directory / part).exists():  # OSError for a name that is too long
                continue
            if offline:
                raise ConfigError(f"{part} is not downloaded yet, and --offline forbids it")
            directory.mkdir(parents=True, exist_ok=True)
            download(source, directory / part)
        except OSError as error:
            raise ConfigError(
                f"cannot store {part} in {directory}: {error.strerror or error}"
            ) from error
    return directory / name


def download(
    url: httpx.URL,
    target: Path,
    *,
    read_seconds: float = READ_SECONDS,
    pause_seconds: float = PAUSE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    free_bytes: Callable[[Path], int] = free_at,
) -> None:
    """Fetch ``url`` to ``target``, which appears when it is whole. If another process fetches it,
    wait for that.

    A partial file stays next to ``target``. The download resumes from it, now or at the next call,
    while the server confirms that the file is unchanged. A terminal shows a bar, otherwise a
    `DownloadLog` gets the progress, timed by ``clock``. Raises ConfigError, for example if the
    directory has too few ``free_bytes``, and OSError if the disk refuses.
    """
    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    timeout = httpx.Timeout(read_seconds, connect=CONNECT_SECONDS)
    console = Console(stderr=True)
    with (
        _Part(target, free_bytes) as part,
        http_client(
            str(url),
            timeout=timeout,
            follow_redirects=True,
            headers={"Accept-Encoding": "identity"},
        ) as client,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        if target.exists():
            return
        task = bar.add_task(one_line(target.name), total=None)
        lines = None if console.is_terminal else DownloadLog(target.name, clock)

        def show(n_bytes: int, total: int | None) -> None:
            bar.update(task, total=total, completed=n_bytes)
            if lines is not None:
                lines.reached(n_bytes, total)

        _receive_all(client, url, part, show, pause_seconds)
        part.finish(target)


def _receive_all(
    client: httpx.Client, url: httpx.URL, part: _Part, show: Show, pause_seconds: float
) -> None:
    """Let ``part`` grow to the end of the file, and resume while that brings it further.

    The pause after a failure doubles with each one that follows without progress. Raises
    ConfigError after `MAX_TRIES` of them, or if no further try can help.
    """
    furthest = 0
    failures = 0
    while True:
        try:
            _receive(client, url, part, show)
            return
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if not part.n_bytes:
                raise _refusal(url, error) from error
            reason: Exception = error
        except (
            _Broken,
            httpx.TimeoutException,
            httpx.NetworkError,
            httpx.RemoteProtocolError,
        ) as error:
            reason = error
        except httpx.HTTPError as error:
            raise _refusal(url, error) from error
        failures = 1 if part.n_bytes >= furthest + _STEP else failures + 1
        furthest = max(furthest, part.n_bytes)
        if failures >= MAX_TRIES:
            raise _refusal(url, reason) from reason
        log.warning(
            "%s interrupted after %d bytes (%s); resuming",
            _without_secrets(url),
            part.n_bytes,
            error_text(reason),
        )
        time.sleep(pause_seconds * 2 ** (failures - 1))


def _receive(client: httpx.Client, url: httpx.URL, part: _Part, show: Show) -> None:
    """Let ``part`` grow to the end of the file. Raises ConfigError if no further try can help."""
    resume = (
        {"Range": f"bytes={part.n_bytes}-", "If-Range": part.validator}
        if part.n_bytes and part.validator
        else {}
    )
    with client.stream("GET", url, headers=resume) as response:
        status = response.status_code
        headers = response.headers
        if status in _TRANSIENT:
            raise _Broken(f"it answers with status {status}")
        if status == 416:  # the file is shorter than the part that is stored
            part.begin("")
            raise _Broken("it is another file now")
        if status not in (200, 206):
            raise ConfigError(f"{_without_secrets(url)} answers with status {status}")
        length = headers.get("Content-Length", "")
        if not length.isdecimal() and "chunked" not in headers.get("Transfer-Encoding", ""):
            raise ConfigError(f"{_without_secrets(url)} sends no length of the file")
        if status == 206:
            if not resume or not _continues(headers, part):
                part.begin("")
                raise _Broken("the server continued at another place, or with another file")
        else:
            part.begin(_validator(headers))
        size = part.n_bytes + int(length) if length.isdecimal() else None
        _check_space(url, part, (size or 0) - part.n_bytes)
        show(part.n_bytes, size)
        for chunk in response.iter_raw():
            part.append(chunk)
            if part.head != MAGIC[: len(part.head)]:
                break
            if size is None:
                _check_space(url, part, 0)
            show(part.n_bytes, size)
    if part.head != MAGIC:
        begin = part.head
        part.begin("")
        raise ConfigError(f"{_without_secrets(url)} is not a GGUF file: it starts with {begin!r}")
    if size is not None and part.n_bytes != size:
        raise _Broken(f"{part.n_bytes} of {size} bytes were received")


def _continues(headers: httpx.Headers, part: _Part) -> bool:
    """Return whether an answer of status 206 continues at the end of ``part``, in the same file."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(?:\d+|\*)", headers.get("Content-Range", ""))
    return (
        match is not None
        and int(match[1]) == part.n_bytes
        and _validator(headers) in ("", part.validator)
    )


def _validator(headers: httpx.Headers) -> str:
    """Return the server's tag of the bytes of a file; empty without one."""
    tag = str(headers.get("ETag", ""))
    return tag if tag and not tag.startswith("W/") else str(headers.get("Last-Modified", ""))


def _check_space(url: httpx.URL, part: _Part, needed: int) -> None:
    free = part.free_bytes - SPARE_BYTES
    if needed > free or free < 0:
        amount = f"{needed / 2**20:,.0f} MiB more" if needed else "more room"
        raise ConfigError(
            f"{_without_secrets(url)} needs {amount}; {max(free, 0) / 2**20:,.0f} MiB are free in "
            f"{part.path.parent} "
            f"in addition to {SPARE_BYTES / 2**20:.0f} MiB that stay free"
        )


class _Part:
    """The file that will be ``target``, as far as it came; locked within a ``with`` block.

    ``n_bytes`` of it are good. ``validator`` identifies their file to the server. ``head`` are the
    first bytes.
    """

    def __init__(self, target: Path, free_bytes: Callable[[Path], int]) -> None:
        self._free_bytes = free_bytes
        self.path = target.with_name(f"{target.name}.part")
        self._note = target.with_name(f"{target.name}.part.json")
        self.n_bytes = 0
        self.validator = ""
        self.head = b""
        self._noted = 0

    def __enter__(self) -> _Part:
        self._file = _locked(self.path)
        try:
            with suppress(OSError, ValueError, KeyError, TypeError):
                note = json.loads(self._note.read_bytes())
                if len(MAGIC) <= int(note["n_bytes"]) <= os.fstat(self._file.fileno()).st_size:
                    self.n_bytes = int(note["n_bytes"])
                    self.validator = str(note["validator"])
                    self.head = MAGIC
            self._file.truncate(self.n_bytes)
        except BaseException:
            self._file.close()
            raise
        return self

    @property
    def free_bytes(self) -> int:
        """The free bytes of its disk."""
        return self._free_bytes(self.path.parent)

    def __exit__(self, *_: object) -> None:
        """Keep the bytes that a later download can continue, and nothing else."""
        with self._file:
            with suppress(OSError):
                if self.validator and self.head == MAGIC:
                    self._save()
                    return
            for path in (self.path, self._note):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def begin(self, validator: str) -> None:
        """Start again with the file that ``validator`` identifies."""
        self._note.unlink(missing_ok=True)
        self._file.truncate(0)
        self.n_bytes = 0
        self.validator = validator
        self.head = b""
        self._noted = 0

    def append(self, chunk: bytes) -> None:
        self.head += chunk[: max(len(MAGIC) - len(self.head), 0)]
        view = memoryview(chunk)
        while view:
            view = view[self._file.write(view) :]
        self.n_bytes += len(chunk)
        if self.n_bytes - self._noted >= _NOTE_BYTES and self.validator and self.head == MAGIC:
            self._save()

    def finish(self, target: Path) -> None:
        """Give the file, which is whole, its name."""
        os.fsync(self._file.fileno())
        os.replace(self.path, target)
        sync_directory(target.parent)
        self.validator = ""

    def _save(self) -> None:
        """Record the state from which a later process can continue: only bytes that surely are on
        the disk.
        """
        os.fsync(self._file.fileno())
        write_atomic(
            self._note, json.dumps({"n_bytes": self.n_bytes, "validator": self.validator}).encode()
        )
        self._noted = self.n_bytes


def _locked(path: Path) -> FileIO:
    """Return the file at ``path``, opened for appending; locked for this process, and still under
    that name.
    """
    while True:
        file = path.open("ab+", 0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # another process had the lock, and has finished or failed


def _refusal(url: httpx.URL, error: Exception) -> ConfigError:
    return ConfigError(f"cannot fetch {_without_secrets(url)}: {error_text(error)}")


def _without_secrets(url: httpx.URL) -> str:
    """Return ``url`` without the parts that may be secret."""
    return one_line(str(url.copy_with(userinfo=b"", query=None, fragment=None)))
