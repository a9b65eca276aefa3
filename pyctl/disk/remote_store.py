"""An object store for the disk cache: it gets the files of the directory, which gets the files that
a prompt needs.

Objects have the names and bytes of files on disk, so equal prefixes are one object and writers
never conflict. The engine's thread never waits here, and every byte of the store is checked before
the directory has it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pyctl.cache.costs import Costs
from pyctl.cache.ports import StoreView, Written
from pyctl.cache.reads import Reads
from pyctl.cache.snapshot import Prefix, PromptMatch
from pyctl.disk.chain import open_chain
from pyctl.disk.file_format import CorruptFileError, Name, StateName, parse
from pyctl.disk.graph import FileGraph
from pyctl.disk.index import Index, Record, file_path
from pyctl.disk.readers import Readers
from pyctl.disk.segment_files import read_header
from pyctl.disk.verify import read_record
from pyctl.disk.writer import StoreWriter
from pyctl.errors import ConfigError, NotWrittenError
from pyctl.files.atomic_file import make_private, temp_path
from pyctl.processes.install_command import install_command
from pyctl.settings.limit import limit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["PATIENCE_SECONDS", "PAUSE_SECONDS", "RemoteStore", "StoreLimits", "connect"]

log = logging.getLogger(__name__)

PATIENCE_SECONDS = limit(
    1.0, "a request that waits for a store that sends nothing", "it is evaluated", "request", "s"
)
CLOSE_SECONDS = limit(
    0.5, "the end of a server that waits for the store", "it is not waited for", "process", "s"
)
MAX_FETCHES = limit(4, "snapshots fetched from the store at once", "the others are misses", "disk")
MAX_IN_FLIGHT = limit(
    2**33, "snapshots on their way from the store", "the others are misses", "disk", "bytes"
)
MAX_OBJECTS = limit(
    2**15, "objects of a model in the store", "others are not found, and none is sent", "disk"
)
MAX_USELESS = limit(
    4096, "snapshots in the store that were of no use", "the oldest are tried again", "memory"
)
MAX_FAILURES = limit(
    3, "failures of the store in a row", "it is left alone for half a minute", "process"
)

LOOK_SECONDS = 5.0
IDLE_SECONDS = 60.0
PAUSE_SECONDS = 30.0
"""Seconds between two lists of the store: with requests, without them, and after faults."""

Clock: TypeAlias = Callable[[], float]
"""A monotonic clock in seconds."""


@dataclass(frozen=True)
class StoreLimits:
    """Limits of a store.

    Attributes:
        patience: The seconds in which a fetch that sends nothing is given up.
        max_fetches: The maximum of fetches at once.
        max_in_flight: The maximum of bytes on their way.
        max_objects: The maximum of objects that are listed, and up to which files are sent.
    """

    patience: float = PATIENCE_SECONDS
    max_fetches: int = MAX_FETCHES
    max_in_flight: int = MAX_IN_FLIGHT
    max_objects: int = MAX_OBJECTS


PIECE = 2**18
MEASURED = 2**20
"""Bytes that are written at a time, and of which a bandwidth is measured."""

REASONS = (
    "refused",
    "timed out",
    "dns",
    "reset",
    "no space",
    "denied",
    "403",
    "404",
    "429",
    "500",
    "503",
)
"""The words of an error that may be logged: its text can hold addresses and keys."""

CLIENT = {
    "client_options": {
        "connect_timeout": "2s",
        "read_timeout": "10s",
        "timeout": "120s",
        "allow_http": True,
    },
    "retry_config": {"max_retries": 2},
}
"""Options of obstore for servers."""


def connect(url: str) -> ObjectStore:
    """Return the store at ``url``; keys come from the environment. Raises ConfigError, whose text
    leaves out ``url``.
    """
    try:
        from obstore.store import from_url
    except ImportError:
        raise ConfigError(f"--kv-store needs obstore: {install_command('obstore>=0.9')}") from None
    try:
        if url.startswith("file:"):
            make_private(Path(url.removeprefix("file://")))
        options = {} if url.startswith(("file:", "memory:")) else CLIENT
        return from_url(url, **options)  # type: ignore[call-overload, no-any-return]
    except Exception as error:
        raise ConfigError(f"cannot use --kv-store: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """Return why the store failed, without addresses and keys."""
    text = str(error)[:4096].lower()
    return ", ".join([type(error).__name__, *(reason for reason in REASONS if reason in text)])


@dataclass
class _CircuitBreaker:
    """The health of one kind of operation, ``operation``, on the store. Logs when it changes."""

    operation: str
    clock: Clock
    n_failed: int = 0  # in a row
    again_at: float = 0.0

    @property
    def is_backing_off(self) -> bool:
        return self.clock() < self.again_at

    def failed(self, error: BaseException) -> None:
        self.n_failed += 1
        if self.n_failed >= MAX_FAILURES:
            self.again_at = self.clock() + PAUSE_SECONDS
        if self.n_failed == MAX_FAILURES:
            log.warning(
                "kv store: cannot be %s (%s), serving without until it can",
                self.operation,
                _reason(error),
            )

    def worked(self) -> None:
        if self.n_failed >= MAX_FAILURES:
            log.warning("kv store: it can be %s again", self.operation)
        self.n_failed = 0


class Fetch(Reads):
    """A snapshot on its way to the directory, which should take ``seconds``.

    It is given up when no bytes come for the seconds of ``patience``, and after twice ``seconds``
    and ``patience`` in all.

    Attributes:
        future: The end of the job that fetches it.
        n_bytes: The bytes that have come.
        n_wanted: The bytes that are known to be needed so far.
        is_late: Whether it was given up.
    """

    def __init__(self, seconds: float, patience: float, clock: Clock) -> None:
        self.future: Future[None] = Future()
        self.n_bytes = self.n_wanted = 0
        self.is_late = False
        self._patience = patience
        self._clock = clock
        self._moved = clock()
        self._until = self._moved + 2 * seconds + patience

    def move(self, n_bytes: int = 0) -> None:
        """Record that ``n_bytes`` have come, or something was checked. Raises TimeoutError if the
        fetch was given up.
        """
        self.check()
        self._moved = self._clock()
        self.n_bytes += n_bytes

    def ready(self) -> bool:
        """Return whether the snapshot is here, or a wait would be of no use."""
        end = min(self._moved + self._patience, self._until)
        self.is_late = self.is_late or self._clock() >= end
        return self.is_late or self.future.done()

    def wait(self, seconds: float) -> None:
        """Wait until the snapshot is here, at most ``seconds``."""
        wait([self.future], seconds)

    def check(self) -> None:
        """Raise TimeoutError if the fetch was given up before the snapshot was here."""
        if self.ready() and not self.future.done():
            raise TimeoutError("timed out")

    def cancel(self) -> None:
        """Give the fetch up."""
        self.is_late = True


class RemoteStore:
    """The objects of one model in the store of ``client``, called ``label`` in views, and the
    folder of the same model on disk, where ``writer`` adopts the files.

    One thread lists the store, and sends the files that it lacks. The engine's thread calls `find`
    and `fetch`, which never wait. Files that proved useless are not fetched again.
    """

    def __init__(
        self,
        client: ObjectStore,
        label: str,
        writer: StoreWriter,
        limits: StoreLimits = StoreLimits(),
        clock: Clock = time.monotonic,
    ) -> None:
        """Start the thread that lists the store. Until it has, `find` returns nothing."""
        self._client = client
        self._label = label
        self._writer = writer
        self._limits = limits
        self._clock = clock
        self._disk_folder = writer.folder
        self._directory = writer.directory
        self._folder = f"{writer.folder.fingerprint}/"
        self._listed: dict[Name, int] = {}  # bytes of each object
        self._lengths: list[int] = []  # of the states at the last listing, ascending
        self.costs = Costs()
        self.costs.record_read(2**28, 2.0)  # a link of 1 Gbit/s, until something else was measured
        self._useless: deque[StateName] = deque(maxlen=MAX_USELESS)
        self.fetches: dict[StateName, Fetch] = {}
        self._reading = _CircuitBreaker("read", clock)
        self._writing = _CircuitBreaker("written", clock)
        self._fetched = self._sent = Written()
        self._looked = -math.inf
        self._seen = object()
        self._asked = self._closing = False
        self.wake = threading.Event()  # set when the directory has something new
        self._pool = Readers(limits.max_fetches, "store-fetch")
        self._thread = threading.Thread(target=self._run, name="pyctl-store", daemon=True)
        self._thread.start()

    @property
    def has_sent_all(self) -> bool:
        """True if no file has come to the directory since the last ones were sent."""
        return self._directory.contents is self._seen

    def find(self, prompt: PromptMatch, limit: int, covered: int = 0) -> list[tuple[Prefix, float]]:
        """Return the prefixes of ``prompt`` of at most ``limit`` tokens that the store has and the
        disk has not, each with the seconds to `fetch` it. The disk has the rows of the first
        ``covered`` tokens.
        """
        self._asked = True
        if self._reading.is_backing_off:
            return []
        on_disk = self._disk_folder.states
        lengths = [n for n in self._lengths if n <= limit]
        listed = (
            (prefix, StateName.from_prefix(prefix))
            for prefix in prompt.find_prefixes(self._listed, lengths)
        )
        return [
            (prefix, self._seconds(state, covered))
            for prefix, state in listed
            if state not in on_disk and state not in self._useless
        ]

    def _seconds(self, state: StateName, covered: int) -> float:
        sizes = self._disk_folder.sizes
        row = sizes.row if sizes is not None else 0
        return self.costs.read(self._listed.get(state, 0) + max(state.n - covered, 0) * row)

    def fetch(self, prefix: Prefix) -> Fetch | None:
        """Start to fetch ``prefix`` to the disk, and return the fetch; None if it cannot start now.
        The disk has the snapshot when the fetch has ended without an error.
        """
        state = StateName.from_prefix(prefix)
        fetch = self.fetches.get(state)
        has_room = len(self.fetches) < self._limits.max_fetches
        if fetch is None and has_room and not self._closing:
            fetch = Fetch(self._seconds(state, 0), self._limits.patience, self._clock)
            self.fetches[state] = fetch
            (fetch.future,) = self._pool.start([partial(self._fetch, state, fetch)])
        return fetch if fetch is not None and not fetch.is_late else None

    def exclude(self, state: StateName) -> None:
        """Do not fetch ``state`` again."""
        self._useless.append(state)

    def remove(self, name: str) -> bool:
        """Have the snapshot called ``name`` removed soon; return False if there is none."""
        states = (
            prefix
            for prefix in self._listed.copy()
            if isinstance(prefix, StateName) and prefix.prefix.name == name
        )
        if (state := next(states, None)) is None:
            return False
        self._listed.pop(state, None)
        self.exclude(state)
        self._pool.start([partial(self._delete, state)])
        return True

    def _delete(self, state: StateName) -> None:
        with self._noting(self._writing):
            self._client.delete(f"{self._folder}{state}")

    def view(self) -> StoreView:
        """Return sums of the store."""
        listed = self._listed.copy()
        is_away = self._reading.is_backing_off or self._writing.is_backing_off
        n_states = sum(isinstance(name, StateName) for name in listed)
        return StoreView(
            self._label, n_states, sum(listed.values()), self._fetched, self._sent, is_away
        )

    def close(self, timeout: float) -> None:
        """Stop within ``timeout`` seconds and twice CLOSE_SECONDS; unsent files are sent after the
        next start.
        """
        self._closing = True
        self.wake.set()
        for fetch in self.fetches.copy().values():
            fetch.cancel()
        self._thread.join(min(timeout, CLOSE_SECONDS))
        self._pool.close(min(timeout, CLOSE_SECONDS))

    def _fetch(self, state: StateName, fetch: Fetch) -> None:
        began = self._clock()
        try:
            self._bring(state, fetch)
        except (CorruptFileError, NotWrittenError, FileNotFoundError) as error:  # the store works
            self.exclude(state)
            log.warning("kv store: snapshot at %d tokens is of no use: %s", state.n, _reason(error))
        except Exception as error:
            if not self._closing:
                self._reading.failed(error)
        else:
            self._reading.worked()
            self._fetched = self._fetched.plus(fetch.n_bytes)
        finally:
            del self.fetches[state]
            if fetch.n_bytes >= MEASURED:
                self.costs.record_read(fetch.n_bytes, self._clock() - began)

    def _bring(self, state: StateName, fetch: Fetch) -> None:
        """Fetch the files of ``state`` that the disk lacks, check all bytes, and have the directory
        adopt them.
        """
        name: Name | None = state
        maximum = self._limits.max_in_flight
        if self._directory.budget:
            maximum = min(maximum, self._directory.budget)
        run = self._directory.readers.run
        sizes = self._disk_folder.sizes
        paths: dict[Name, Path] = {}
        records: dict[Path, Record] = {}
        with ExitStack() as temps:
            while name is not None and not self._disk_folder.has_file(
                name
            ):  # each file names its parent
                if (size := self._listed.get(name)) is None:
                    raise FileNotFoundError(str(name))
                fetch.n_wanted += size
                if sum(each.n_wanted for each in self.fetches.copy().values()) > maximum:
                    raise NotWrittenError("more bytes than may be on their way")
                path = paths[name] = temps.enter_context(temp_path(self._disk_folder.path))
                self._download(name, size, path, fetch)
                header = read_header(path, sizes, str(name))
                records[path] = replace(read_record(path, header, run), used=time.time())
                fetch.move()
                name = header.parent  # each file names the one below it
            open_chain(self._disk_folder.path, state, sizes, run, paths)
            fetch.move()
            below = [
                record.parent_key for record in records.values() if record.parent_key is not None
            ]
            if records and not self._writer.adopt(records, below):
                raise NotWrittenError("the disk has no room for it, or none today")

    def _download(self, name: Name, size: int, path: Path, fetch: Fetch) -> None:
        """Fill the file at ``path``; a server may send any number of bytes."""
        left = size
        with path.open("wb") as file:
            for piece in self._client.get(f"{self._folder}{name}").stream(min_chunk_size=PIECE):
                fetch.move(len(piece))
                if (left := left - len(piece)) < 0:
                    break
                file.write(piece)
        if left:
            raise CorruptFileError(
                str(name), f"{size - left} bytes or more, not the {size} of the store's listing"
            )

    def _run(self) -> None:
        while not self._closing:
            age = self._clock() - self._looked
            if not self._reading.is_backing_off and age >= (
                LOOK_SECONDS if self._asked else IDLE_SECONDS
            ):
                with self._noting(self._reading):
                    self._list_store()
            if (
                not self.has_sent_all
                and self._looked > -math.inf
                and not self._writing.is_backing_off
            ):
                with self._noting(self._writing):
                    self._send()
            self.wake.wait(LOOK_SECONDS)
            self.wake.clear()

    @contextmanager
    def _noting(self, health: _CircuitBreaker) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._closing:
                health.failed(error)

    def _list_store(self) -> None:
        """List the store."""
        self._asked = False
        listed: dict[Name, int] = {}
        for chunk in self._client.list(self._folder):
            for meta in chunk:
                name = parse(str(meta["path"]).removeprefix(self._folder))
                if name is not None and meta["size"] > 0:
                    listed[name] = meta["size"]
            if self._closing or len(listed) >= self._limits.max_objects:
                break
        lengths = {name.n for name in listed if isinstance(name, StateName)}
        self._listed = listed
        self._lengths = sorted(lengths)
        self._looked = self._clock()

    def _send(self) -> None:
        """Send the files that the store lacks, the most used states first, each after the segments
        that it needs.
        """
        contents = self._directory.contents
        with self._directory.reading() as connection:
            records = Index.records(connection)
        graph = FileGraph(
            each for each in records if each.fingerprint == self._disk_folder.fingerprint
        )
        useless = set(self._useless)
        states = (
            each for each in graph.records.values() if each.is_state and each.name not in useless
        )
        for state in sorted(states, key=lambda each: (-each.hits, -each.used)):
            keys = [*graph.chain(state.key)[::-1], state.key]
            missing = [
                graph.records[key]
                for key in keys
                if key[1] not in self._listed and key in graph.records
            ]
            if self._closing or len(self._listed) + len(missing) > self._limits.max_objects:
                break
            if state in missing and all(map(self._put, missing)):
                self._sent = self._sent.plus(sum(each.n_bytes for each in missing))
        self._seen = contents

    def _put(self, record: Record) -> bool:
        """Send a file; return False if it was evicted."""
        path = file_path(self._directory.path, record.key)
        if self._closing or path.is_symlink() or not path.is_file():
            return False
        self._client.put(f"{self._folder}{record.name}", path, max_concurrency=2)
        self._writing.worked()
        self._listed[record.name] = record.n_bytes
        return True
