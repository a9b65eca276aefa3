"""An object store behind the disk cache: fetches snapshots that servers sent there, and sends those on the disk.

Objects have the names and bytes of files on disk, so equal prefixes are one object and writers never conflict. The
engine's thread never waits here, and every answer of the store is checked before use.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyctl.atomic_file import make_private, temp_path
from pyctl.cache.costs import Costs
from pyctl.cache.disk.chain import check_chain, open_chain
from pyctl.cache.disk.file_format import (
    BlockSizes,
    CorruptFileError,
    Name,
    PartKind,
    StateName,
    parse,
    unpack,
)
from pyctl.cache.disk.index import Index, Record
from pyctl.cache.disk.listing import MOST_OBJECTS, Link, Listing
from pyctl.cache.disk.readers import Readers
from pyctl.cache.disk.segment_files import check_jobs
from pyctl.cache.disk.writer import StoreWriter
from pyctl.cache.ports import Reads, StoreView, Written
from pyctl.cache.snapshot import Prefix, PromptMatch
from pyctl.errors import ConfigError, NotWrittenError, StateError
from pyctl.limit import limit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["PATIENCE_SECONDS", "Fetch", "StoreBehind", "connect"]

log = logging.getLogger(__name__)

PATIENCE_SECONDS = limit(1.0, "a request that waits for the store", "it is evaluated meanwhile", "request", "s")

FETCH_SECONDS = limit(120.0, "fetching a snapshot from the store", "it is given up", "disk", "s")

LOOK_SECONDS, IDLE_SECONDS, WAKE_SECONDS = 5.0, 60.0, 1.0
"""How often to list the store while there are requests and without them, and to see whether the disk has changed."""

AWAY_SECONDS = 10.0
"""How long a store that failed is left alone."""

MOST_HINTS = limit(2**23, "the hints in the store", "headers are read instead", "disk", "bytes")

MOST_HEADERS = limit(256, "headers read from the store at a time", "the others are found later", "disk")

MOST_FETCHES = limit(4, "snapshots fetched from the store at once", "the others are misses", "disk")

MOST_DISTRUSTED = limit(4096, "snapshots in the store that were of no use", "the oldest are tried again", "memory")

RANGE, PIECE, HEADER = 2**24, 2**20, 2**12
"""Bytes of one request, of what is written at a time, and in which most headers end."""

MOST_HEADER = 2**20

HINTS = "hints"

THREADS = 4

MEASURED_BYTES = 2**20

REASONS = ("refused", "timed out", "dns", "reset", "no space", "denied", "403", "404", "429", "500", "503")
"""The words of an error that may be logged: its text can hold addresses and keys."""


CLIENT = {"connect_timeout": "2s", "read_timeout": "10s", "timeout": "60s", "allow_http": True}
"""Options of obstore's HTTP client."""


def connect(url: str) -> ObjectStore:
    """The store at ``url``; keys come from the environment. Raises ConfigError, which does not tell ``url``."""
    try:
        from obstore.store import from_url
    except ImportError:
        raise ConfigError("--kv-store needs obstore: pip install 'pyctl[store]'") from None
    retries = {"max_retries": 2}
    try:
        if url.startswith("memory:"):
            return from_url(url)
        if url.startswith("file:"):
            make_private(Path(url.removeprefix("file://")))
            return from_url(url)
        return from_url(url, client_options=CLIENT, retry_config=retries)  # type: ignore[call-overload, no-any-return]
    except Exception as error:
        raise ConfigError(f"cannot use --kv-store: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """Why the store failed, without addresses and keys."""
    text = str(error)[:4096].lower()
    return ", ".join([type(error).__name__, *(each for each in REASONS if each in text)])


class Fetch(Reads):
    """A snapshot on its way to the disk; no use in waiting after ``deadline`` (seconds of the clock of ``behind``)."""

    def __init__(self, behind: StoreBehind, future: Future[None], deadline: float = math.inf) -> None:
        self._behind, self._future, self._deadline = behind, future, deadline

    def ready(self) -> bool:
        """Whether it is here, or there is no use in waiting."""
        return self._future.done() or self._behind.clock() >= self._deadline

    def wait(self, seconds: float) -> None:
        """Wait until it is here, ``seconds`` at most."""
        wait([self._future], seconds)

    def until(self, deadline: float) -> Fetch:
        """The same with another deadline."""
        return Fetch(self._behind, self._future, deadline)


@dataclass
class _Health:
    """Whether the store lately did what ``what`` says. Tells the log when that changes."""

    what: str
    again_at: float = 0.0
    n_failed: int = 0
    is_away: bool = False

    def may_try(self) -> bool:
        return time.monotonic() >= self.again_at

    def failed(self, error: BaseException) -> None:
        self.again_at = time.monotonic() + AWAY_SECONDS
        self.n_failed += 1
        if not self.is_away:
            self.is_away = True
            log.warning("kv store: cannot %s (%s), serving without until it can", self.what, _reason(error))

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Note an error or the success of the block; errors are not raised."""
        try:
            yield
        except Exception as error:
            self.failed(error)
        else:
            self.worked()

    def worked(self) -> None:
        if self.is_away:
            self.is_away = False
            log.warning("kv store: it can %s again", self.what)


class StoreBehind:
    """The objects of one model in the store of ``client``, called ``label`` in views, and the disk of ``files``, whose
    blocks have ``sizes``.

    ``budget`` bounds the bytes of this model in the store, ``daily_bytes`` what all processes that share the
    directory send in a day (UTC); None is no limit. The engine's thread calls `find`, `seconds`, `fetch` and
    `look_soon`, which never wait. A store that fails is left alone for AWAY_SECONDS. What was found to be of no use
    is not fetched again.
    """

    clock = staticmethod(time.monotonic)
    """By which requests wait."""

    def __init__(
        self,
        client: ObjectStore,
        label: str,
        files: StoreWriter,
        sizes: BlockSizes | None,
        *,
        budget: int | None = None,
        daily_bytes: int | None = None,
    ) -> None:
        self._client, self._label, self._files, self._sizes = client, label, files, sizes
        self._budget, self._daily_bytes = budget, daily_bytes
        self._costs = Costs()
        self._listing = Listing()
        self._links: dict[Name, Link] = {}
        self._distrusted: OrderedDict[StateName, None] = OrderedDict()
        self._coming: dict[StateName, Future[None]] = {}
        self._reading, self._writing = _Health("be read"), _Health("be written")
        self._fetched = self._sent = Written()
        self._told = 0
        self._looked, self._seen, self._asked = -math.inf, object(), False
        self._wake, self._closing = threading.Event(), False
        self._fetches, self._readers = Readers(MOST_FETCHES, "store-fetch"), Readers(THREADS, "store-read")
        self._thread = threading.Thread(target=self._run, name="pyctl-store", daemon=True)
        self._thread.start()

    # -- on the engine's thread --------------------------------------------------------------------------------------

    def find(self, prompt: PromptMatch, limit: int) -> list[Prefix]:
        """The prefixes of ``prompt`` of ``limit`` tokens at most that the store has and the disk has not."""
        if not self._reading.may_try():
            return []
        found = self._listing.matching(prompt, limit)
        return [
            each for each in found if (name := StateName.of(each)) not in self._distrusted and not self._on_disk(name)
        ]

    def seconds(self, prefix: Prefix) -> float:
        """About how long `fetch` takes."""
        listing = self._listing
        missing = (name for name in listing.chain(StateName.of(prefix)) if not self._files.has(name))
        return self._costs.read(sum(listing.sizes[name] for name in missing))

    def fetch(self, prefix: Prefix) -> Fetch | None:
        """Begin to bring ``prefix`` to the disk, which has it when this is ready and all went well; None if not now."""
        state = StateName.of(prefix)
        future = self._coming.get(state)
        if future is None:
            if len(self._coming) >= MOST_FETCHES or self._closing or not self._reading.may_try():
                return None
            (future,) = self._fetches.start([partial(self._fetch, state)])
            self._coming[state] = future
            future.add_done_callback(lambda _: self._coming.pop(state, None))
        return Fetch(self, future)

    def look_soon(self) -> None:
        """There are requests: list the store if that was not done lately."""
        self._asked = True
        self._wake.set()

    def _on_disk(self, state: StateName) -> bool:
        return state in self._files.directory.contents.of(self._files.fingerprint)

    def distrust(self, prefix: Prefix) -> None:
        """Do not fetch ``prefix`` again."""
        self._distrusted[StateName.of(prefix)] = None
        while len(self._distrusted) > MOST_DISTRUSTED:
            self._distrusted.popitem(last=False)

    def view(self) -> StoreView:
        """Sums of the store."""
        listing = self._listing
        return StoreView(
            self._label,
            len(listing.states),
            listing.n_bytes,
            -1 if self._budget is None else self._budget,
            self._fetched,
            self._sent,
            self._reading.n_failed + self._writing.n_failed,
            self._reading.is_away or self._writing.is_away,
        )

    # -- on any thread -----------------------------------------------------------------------------------------------

    def remove(self, name: str) -> bool:
        """Remove the snapshot called ``name``; False if there is none. Waits for the store."""
        found = [state for state in self._listing.states if state.prefix.name == name]
        for state in found:
            self.distrust(state.prefix)
            try:
                self._client.delete(self._path(state))
            except Exception as error:
                self._writing.failed(error)
        return bool(found)

    def close(self, timeout: float) -> None:
        """Stop, within about ``timeout`` seconds; what was not sent is sent after the next start."""
        self._closing = True
        self._wake.set()
        deadline = time.monotonic() + timeout
        self._thread.join(max(timeout, 0.1))
        for readers in (self._fetches, self._readers):
            readers.close(max(deadline - time.monotonic(), 0.1))

    # -- fetching ----------------------------------------------------------------------------------------------------

    def _fetch(self, state: StateName) -> None:
        """Bring ``state`` to the disk; raises what kept it from coming."""
        began, listing = time.monotonic(), self._listing
        try:
            n_bytes = self._bring(state, listing, began + FETCH_SECONDS)
        except (CorruptFileError, NotWrittenError) as error:  # the store works
            self.distrust(state.prefix)
            log.warning("kv store: snapshot at %d tokens is of no use: %s", state.n, error)
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError):  # removed by others
                self.distrust(state.prefix)
                self._looked = -math.inf
            elif not self._closing:
                self._reading.failed(error)
            raise
        self._reading.worked()
        seconds = time.monotonic() - began
        self._fetched = self._fetched.plus(n_bytes)
        if n_bytes >= MEASURED_BYTES:
            self._costs.note_read(n_bytes, seconds)
        log.info("kv store: fetched %d tokens, %.1f MiB in %.2f s", state.n, n_bytes / 2**20, seconds)

    def _bring(self, state: StateName, listing: Listing, deadline: float) -> int:
        """Fetch what the disk lacks of ``state``, check all of it, and publish it on disk; how many bytes that were."""
        disk, wanted = self._files, listing.chain(state)
        with ExitStack() as temps:
            paths: dict[Name, Path] = {}
            while True:
                missing = [name for name in wanted if name not in paths and not disk.has(name)]
                n_bytes = sum(listing.sizes[name] for name in (*missing, *paths))
                if disk.directory.budget is not None and n_bytes > disk.directory.budget:
                    raise NotWrittenError(f"{n_bytes / 2**20:,.0f} MiB are more than --kv-cache-budget")
                paths |= {name: temps.enter_context(temp_path(disk.home)) for name in missing}
                self._download({name: paths[name] for name in missing}, listing, deadline)
                try:
                    top, chain = open_chain(disk.home, state, self._sizes, paths)
                    break
                except FileNotFoundError as error:  # the state hangs on other segments than the hints say
                    name = parse(Path(error.filename or "").name)
                    if name is None or name in paths or name not in listing.sizes:
                        raise
                    wanted.append(name)
            fetched = [each for each in (top, *chain) if each.header.name in paths]
            self._readers.run(job for each in fetched for job in check_jobs(each.path, each.header))
            self._readers.run(job for each in chain for job in each.jobs(PartKind.TOKENS, PartKind.ENDS))
            check_chain(chain, state)
            now, home = time.time(), disk.fingerprint
            records = {}
            for each in fetched:
                header = each.header
                facts = header.offsets[-1], header.parent, header.exact, header.created, now
                records[each.path] = Record(home, header.name, *facts)
            if not disk.adopt(records, [disk.key(each.header.name) for each in chain]):
                raise NotWrittenError("the disk has no room for it, or none today")
        return n_bytes

    def _download(self, paths: Mapping[Name, Path], listing: Listing, deadline: float) -> None:
        """Fill the files at ``paths``, several ranges at a time."""
        jobs = []
        for name, path in paths.items():
            size = listing.sizes[name]
            os.truncate(path, size)
            for first in range(0, size, RANGE):
                jobs.append(partial(self._read_range, name, path, first, min(first + RANGE, size), deadline))
        self._readers.run(jobs)

    def _read_range(self, name: Name, path: Path, first: int, last: int, deadline: float) -> None:
        at = first
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for piece in self._pieces(self._path(name), first, last):
                if self._closing or time.monotonic() > deadline:
                    raise StateError("it takes too long")
                if at + len(piece) > last:
                    raise CorruptFileError(str(name), "more bytes than the store's listing says")
                at += os.pwrite(descriptor, piece, at)
            if at < last:
                raise CorruptFileError(str(name), "fewer bytes than the store's listing says")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _pieces(self, path: str, first: int, last: int) -> Iterator[bytes]:
        """Bytes [first, last) of an object, as they come: a server may send any number of them."""
        result = self._client.get(path, options={"range": (first, last)})
        for piece in result.stream(min_chunk_size=PIECE):
            yield bytes(piece)

    def _small(self, path: str, most: int, size: int) -> bytes:
        """The first ``most`` bytes of an object that has ``size``."""
        last = min(most, size)
        data = b""
        for piece in self._pieces(path, 0, last):
            data += piece
            if len(data) > last:
                raise CorruptFileError(path.rpartition("/")[2], "more bytes than were asked for")
        return data

    def _path(self, name: Name | str) -> str:
        return f"{self._files.fingerprint}/{name}"

    # -- on the store's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            age = time.monotonic() - self._looked
            if self._reading.may_try() and age >= (LOOK_SECONDS if self._asked else IDLE_SECONDS):
                with self._reading.trying():
                    self._look()
            if self._files.directory.contents is not self._seen and self._writing.may_try() and self._is_listed:
                with self._writing.trying():
                    self._send()
            self._wake.wait(WAKE_SECONDS)
            self._wake.clear()

    @property
    def _is_listed(self) -> bool:
        """Whether it is known what the store has."""
        return self._looked > -math.inf and not self._reading.is_away

    def _look(self) -> None:
        """List the store, and find out what hangs on what."""
        self._asked = False
        sizes: dict[Name, int] = {}
        n_listed = n_hints = 0
        for chunk in self._client.list(f"{self._files.fingerprint}/"):
            for meta in chunk:
                folder, _, file = str(meta["path"]).rpartition("/")
                if folder != self._files.fingerprint or meta["size"] <= 0:
                    continue
                if (name := parse(file)) is not None:
                    sizes[name] = meta["size"]
                elif file == HINTS:
                    n_hints = meta["size"]
            if self._closing or (n_listed := n_listed + len(chunk)) >= MOST_OBJECTS:
                break
        links = {name: link for name, link in self._links.items() if name in sizes}
        if n_hints:
            links |= {name: link for name, link in self._hints(n_hints).items() if name in sizes and name not in links}
        unknown = [name for name in sizes if name not in links and name not in self._distrusted]
        for name in unknown[:MOST_HEADERS]:
            if (link := self._link(name, sizes[name])) is not None:
                links[name] = link
            elif isinstance(name, StateName):
                self.distrust(name.prefix)
        if (sizes, links) != (self._listing.sizes, self._listing.links):
            self._links, self._listing = links, Listing.of(sizes, links)
        self._looked = time.monotonic()

    def _hints(self, size: int) -> dict[Name, Link]:
        """The links in the object of hints, which may be wrong."""
        if size > MOST_HINTS:
            return {}
        links: dict[Name, Link] = {}
        for line in self._small(self._path(HINTS), MOST_HINTS, size).decode("ascii", "replace").splitlines():
            file, _, rest = line.partition(" ")
            flag, _, below = rest.partition(" ")
            name, parent = parse(file), parse(below) if below else None
            if name is not None and not isinstance(parent, StateName) and (parent is not None or not below):
                links[name] = Link(parent, flag == "exact")
        return links

    def _link(self, name: Name, size: int) -> Link | None:
        """The same from the header of an object; None if it is damaged."""
        path = self._path(name)
        try:
            header = unpack(self._small(path, HEADER, size), str(name), size)
            if isinstance(header, int):
                header = unpack(self._small(path, min(header, MOST_HEADER), size), str(name), size)
        except (CorruptFileError, FileNotFoundError):
            return None
        return None if isinstance(header, int) else Link(header.parent, header.exact)

    def _send(self) -> None:
        """Send what the disk has and the store has not, what is worth most first."""
        contents = self._files.directory.contents
        with self._files.directory.reading() as connection:
            own = (each for each in Index.records(connection) if each.fingerprint == self._files.fingerprint)
            records = {each.name: each for each in own}
        n_sent = self._sent.n
        try:
            for state in sorted(filter(self._is_new, records.values()), key=lambda each: (-each.hits, -each.used)):
                files = [each for each in _with_chain(state, records) if self._is_new(each)]
                if self._closing or not self._may_send(sum(each.n_bytes for each in files)):
                    break
                self._put(files)
        finally:
            self._listing = Listing.of(self._listing.sizes, self._links)
            if self._sent.n > n_sent:
                self._put_hints()
        self._seen = contents

    def _is_new(self, record: Record) -> bool:
        known = self._links.get(record.name)
        is_there = record.name in self._listing.sizes
        return not is_there or (record.is_state and record.exact and known is not None and not known.exact)

    def _may_send(self, n_bytes: int) -> bool:
        full = self._budget is not None and self._listing.n_bytes + n_bytes > self._budget
        with self._files.directory.reading() as connection:
            sent = Index.sent_today(connection)
        spent = self._daily_bytes is not None and sent + n_bytes > self._daily_bytes
        if (full or spent) and self._told != (day := int(time.time() // 86_400)):
            self._told = day
            flag = "--kv-store-budget" if full else "--kv-store-writes"
            log.warning("kv store: %s is reached; nothing more is sent", flag)
        return not (full or spent)

    def _put(self, files: Iterable[Record]) -> None:
        """Send ``files``, the state last, so that no server finds a state without what it needs."""
        done: list[Record] = []
        for each in files:
            path = self._files.directory.file(each.key)
            if self._closing or path.is_symlink() or not path.is_file():  # evicted meanwhile
                break
            self._client.put(self._path(each.name), path, max_concurrency=2)
            with self._files.directory.changing(look=False) as connection:
                Index.add_sent(connection, each.n_bytes)
            done.append(each)
            if each.is_state:
                self._sent = self._sent.plus(sum(one.n_bytes for one in done))
        sizes = {**self._listing.sizes, **{each.name: each.n_bytes for each in done}}
        self._links = {**self._links, **{each.name: Link(each.parent, each.exact) for each in done}}
        self._listing = replace(self._listing, sizes=sizes)  # the rest after all is sent: it takes a while

    def _put_hints(self) -> None:
        """Tell the other servers what hangs on what."""
        lines, n_bytes = [], 0
        for name, link in reversed(self._links.items()):
            line = f"{name} {'exact' if link.exact else '-'} {link.parent or ''}".rstrip()
            if (n_bytes := n_bytes + len(line) + 1) > MOST_HINTS:
                break
            lines.append(f"{line}\n")
        self._client.put(self._path(HINTS), "".join(lines).encode())


def _with_chain(state: Record, records: Mapping[Name, Record]) -> list[Record]:
    """``state`` behind the segments that it needs, the first one first; nothing if some are gone."""
    found, at = [state], state.parent
    while at is not None:
        if at not in records:
            return []
        found.append(records[at])
        at = records[at].parent
    return found[::-1]
