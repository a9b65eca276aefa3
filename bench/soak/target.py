"""The server under test: a process that is killed and started again, and is watched while it
lives.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from bench.common import show
from bench.soak.findings import Findings
from pyctl.disk.directory import THREADS
from pyctl.measure.server_process import ServerProcess
from pyctl.processes.module_command import module_command

KINDS_OF_DEATH = {"stop": signal.SIGTERM, "kill": signal.SIGKILL}

WARM_UP = 0.35
"""The part of a life in which caches and pools may fill."""

REST_SECONDS = 25.0
"""Seconds without requests, half-way through a long life and near its end. The server returns freed
memory to the system ten seconds after it read the last request, so afterwards it holds only what it
needs.
"""

BUSY_SECONDS = 5.0
"""Seconds for which clients try again after the last rest: a life ends in the middle of
requests.
"""

END_SECONDS = 60.0
"""Longest end of a server that has said why it ends."""

LONG = 0.3
"""The part of all the time that each long life has."""

SHORT_SECONDS = (5.0, 40.0)
"""The shortest and the longest of the lives in between."""

MAX_REST = 0.4
"""The part of a life that rests may take; a shorter life has none."""


@dataclass(frozen=True)
class Pace:
    """The clock of a soak, and the seconds of a rest and of the requests after the last rest."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rest_seconds: float = REST_SECONDS
    busy_seconds: float = BUSY_SECONDS


@dataclass(frozen=True)
class Sample:
    """A sample of the process from /proc, and its own figures."""

    resident_mib: float
    n_threads: int
    n_files: int
    arena_mib: float = 0.0
    """Memory for blocks, which is taken 64 MiB at a time within its own bound, and kept."""

    @property
    def grown_mib(self) -> float:
        """Resident memory that has no separate bound."""
        return self.resident_mib - self.arena_mib


@dataclass(frozen=True)
class Bounds:
    """Limits of the server: growth of memory, threads and open files, resident memory, and log per
    request.
    """

    growth_mib: float
    resident_mib: float
    n_threads: int = 6 + THREADS
    """Threads that read the disk start when there is work for them, and a timer and the thread that
    prepares grammars when no request has run for a while.
    """
    n_files: int = 24
    log_bytes_per_request: int = 1500


class Target:
    """A server with several lives. A request that fails because a life ended is no violation."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        findings: Findings,
        bounds: Bounds,
        pace: Pace = Pace(),
    ) -> None:
        """Prepare a server of ``command`` that logs into ``directory``. It is started by its first
        life, and clients wait until then.
        """
        self._pace = pace
        self.directory = directory
        self.findings = findings
        self.bounds = bounds
        self.log = directory / "server.log"
        self._command = list(command)
        self._process = ServerProcess(self._command, self.log)
        self._lock = threading.Lock()
        self._up = threading.Event()
        self._may_ask = threading.Event()
        self._may_ask.set()
        self.life = 0
        self.exact_lives: set[int] = set()
        """Lives with --exact, whose replies must be the judge's to the bit."""
        self.over = threading.Event()
        self.rows: list[list[object]] = []
        self.peak_mib = 0.0
        self.hint = ""
        """The last request sent, which might be to blame."""
        self.excuse: re.Pattern[str] | None = None
        """Words of errors, and of a life's log, for which requests may fail and the server may end
        with code 1.
        """
        self._log_from = 0

    @property
    def url(self) -> str:
        return self._process.url

    @property
    def port(self) -> int:
        return self._process.port

    def ready(self) -> int:
        """Wait until it serves outside of a pause; the number of this life, or 0 when the soak is
        over.
        """
        while not self.over.is_set():
            if self._up.wait(0.2) and self._may_ask.wait(0.2):
                return self.life
        return 0

    def lives(self, life: int) -> bool:
        """Return whether that life goes on: the server was not stopped or killed since it
        started.
        """
        running = self._up.is_set() and self._process.is_running
        return running and self.life == life and not self.over.is_set()

    @property
    def is_resting(self) -> bool:
        """True if no client has a request, so that memory can be compared."""
        return self._up.is_set() and not self._may_ask.is_set()

    def is_excused(self, text: str = "") -> bool:
        """Return whether ``text``, by default this life's log, has words of `excuse`."""
        return self.excuse is not None and bool(self.excuse.search(text or self._text()))

    def _text(self) -> str:
        """Return the log of this life."""
        return self.log.read_bytes()[self._log_from :].decode("utf-8", "replace")

    def live(self, name: str, seconds: float, death: str, flags: Sequence[str]) -> None:
        """Start it with ``flags``, watch it for ``seconds``, and end it by ``death``, "stop" or
        "kill".

        If it ends by itself, it is started again.
        """
        end = self._pace.clock() + seconds
        while (left := end - self._pace.clock()) > 0:
            self._live(name, left, death, flags)

    def _live(self, name: str, seconds: float, death: str, flags: Sequence[str]) -> None:
        """Run a single life of at most ``seconds``, and judge its log and its end. A life that ends
        by itself is not judged by its growth.
        """
        self._log_from = self.log.stat().st_size if self.log.exists() else 0
        sent = self.findings.counts["requests"]
        self._process = ServerProcess([*self._command, *flags], self.log, timeout=300)
        try:
            self._process.start()
        except OSError:
            if not self.is_excused():
                raise
            return self.findings.count("starts without memory")
        self.life += 1
        if "--exact" in self._process.command:
            self.exact_lives.add(self.life)
        self._up.set()
        samples, rests = self._watch(seconds)
        is_whole = self._process.is_running
        self._up.clear()
        code, took = self._end(death)
        self.findings.count(f"ended by {death}")
        self.findings.longest("stop" if death == "stop" else "kill", took, name)
        text = self._text()
        if "Traceback" in text:
            self.findings.violate(
                f"{name}: a traceback in the log: {text[text.index('Traceback') :][-600:]!r}"
            )
        n_requests = self.findings.counts["requests"] - sent
        if len(text) > 65536 + self.bounds.log_bytes_per_request * n_requests:
            self.findings.violate(f"{name}: {len(text)} bytes of log for {n_requests} requests")
        if is_whole:
            self._judge(name, seconds, code, n_requests, samples, rests)

    def _watch(self, seconds: float) -> tuple[list[Sample], list[Sample]]:
        """Return samples under load, and at the end of each pause."""
        samples: list[Sample] = []
        rests: list[Sample] = []
        arena = 0.0
        pace = self._pace
        end = pace.clock() + seconds
        left_at: list[float] = []
        if MAX_REST * seconds >= 2 * pace.rest_seconds:
            left_at = [seconds / 2, pace.rest_seconds + pace.busy_seconds]
        while (left := end - pace.clock()) > 0 and self._process.is_running:
            into = samples
            if left_at and left <= left_at[0]:
                del left_at[0]
                into = rests
                self._rest()
            sample = sample_of(self._process.pid)
            if sample is not None:
                arena = self._arena_mib() or arena
                into.append(replace(sample, arena_mib=arena))
            self._may_ask.set()
            pace.sleep(min(1.0, seconds / 40))
        return samples, rests

    def _arena_mib(self) -> float:
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=10).text
        except httpx.TransportError:
            return 0.0
        found = re.search(r'^pyctl_memory_bytes\{part="arena"\} (\d+)', text, re.MULTILINE)
        return int(found[1]) / 2**20 if found else 0.0

    def _rest(self) -> None:
        self._may_ask.clear()
        end = self._pace.clock() + self._pace.rest_seconds
        while self._pace.clock() < end and self._process.is_running:
            self._pace.sleep(0.2)
        with suppress(httpx.HTTPError, ValueError):  # it has ended, or is another server
            for fault in (
                httpx.get(f"{self.url}/cache/check", timeout=60).raise_for_status().json()["faults"]
            ):
                self.findings.violate(f"the cache: {fault}")

    def _end(self, death: str) -> tuple[int | None, float]:
        """End the life; return the exit code, and the seconds that it took."""
        process = self._process
        if not process.is_running:
            code = process.end(signal.SIGKILL)
            if code == 1 and self.is_excused():
                self.findings.count("ends without memory")
            else:
                end = self._text()[-1000:]
                self.findings.violate(
                    f"the server ended by itself, {code} ({self.hint} was sent): {end}"
                )
            return code, 0.0
        began = self._pace.clock()
        code = process.end(KINDS_OF_DEATH[death])
        took = self._pace.clock() - began
        expected = 0 if death == "stop" else -signal.SIGKILL
        if code != expected and not (code == 1 and self.is_excused()):
            self.findings.violate(f"exit code {code} after {took:.1f} s, not {expected}")
        return code, took

    def _judge(
        self,
        name: str,
        seconds: float,
        code: int | None,
        n_requests: int,
        samples: list[Sample],
        rests: list[Sample],
    ) -> None:
        """Append the row of a life, and judge its peak and its growth after the warm-up. Growth is
        that between two rests if the life had both, since a request at work hides it; only long
        lives are bound.
        """
        warm = samples[int(len(samples) * WARM_UP) :]
        if not warm:
            return
        peak = max(sample.resident_mib for sample in samples)
        self.peak_mib = max(self.peak_mib, peak)
        if self.bounds.resident_mib and peak > self.bounds.resident_mib:
            self.findings.violate(
                f"{name}: {peak:.0f} MiB resident, {self.bounds.resident_mib:.0f} are allowed"
            )
        growth, threads, files = (
            _growth([getattr(sample, field) for sample in warm])
            for field in ("grown_mib", "n_threads", "n_files")
        )
        if len(rests) == 2:
            growth = rests[1].grown_mib - rests[0].grown_mib
        at_rest = ", ".join(f"{sample.resident_mib:.0f}" for sample in rests)
        self.rows.append(
            [
                name,
                f"{seconds:.0f}",
                n_requests,
                f"{peak:.0f}",
                at_rest or "-",
                f"{growth:+.1f}",
                f"{warm[-1].n_threads} ({threads:+.0f})",
                f"{warm[-1].n_files} ({files:+.0f})",
                code,
            ]
        )
        for what, grown, bound in (
            ("MiB resident outside the arena", growth, self.bounds.growth_mib),
            ("threads", threads, self.bounds.n_threads),
            ("open files", files, self.bounds.n_files),
        ):
            if grown > bound and name.startswith("long"):
                self.findings.violate(f"{name}: grew by {grown:.1f} {what}, {bound} are allowed")

    def ends(self, life: int) -> bool:
        """Return whether that life is over. With an excuse, wait up to `END_SECONDS` for its
        end.
        """
        end = self._pace.clock() + END_SECONDS * (self.excuse is not None)
        while self.lives(life) and self._pace.clock() < end:
            self._pace.sleep(0.2)
        return not self.lives(life)

    def healthy(self) -> None:
        """Poll /health: the event loop must never block for long."""
        with httpx.Client(timeout=60) as client:
            while life := self.ready():
                began = self._pace.clock()
                try:
                    status = client.get(f"{self.url}/health").status_code
                except httpx.TransportError as error:
                    if not self.ends(life):
                        self.findings.violate(f"/health: {error!r}")
                    continue
                self.findings.longest("/health", self._pace.clock() - began, f"life {life}")
                if status != 200 and not self.ends(life):
                    self.findings.violate(f"/health: {status}")
                self._pace.sleep(0.2)


def _growth(values: list[float]) -> float:
    """Return the difference between the medians of the last third and of the first."""
    third = max(1, len(values) // 3)
    return statistics.median(values[-third:]) - statistics.median(values[:third])


def sample_of(pid: int) -> Sample | None:
    """Read a sample of the process ``pid``; None if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in fields:
        return None
    return Sample(int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"]), files)


def add_soak(
    parser: argparse.ArgumentParser, kinds: Sequence[str], cache_ram: int, growth_limit: float
) -> None:
    """Add the options that all soaks have; ``growth_limit`` is in MiB."""
    parser.add_argument("--parallel", type=int, default=4, metavar="N", help="-np of the server")
    parser.add_argument(
        "--clients", type=int, default=6, metavar="N", help="clients, with two conversations each"
    )
    parser.add_argument("--cache-ram", type=int, default=cache_ram, metavar="MiB")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=kinds, help="kinds to leave out"
    )
    which = "from one pause of a long life to the next; without pauses, after its first third"
    parser.add_argument(
        "--growth-limit", type=float, default=growth_limit, metavar="MiB", help=f"growth, {which}"
    )


def beside(work: Sequence[Callable[[], None]], target: Target, lives: Callable[[], None]) -> None:
    """Run each of ``work`` on a thread while ``target`` has its ``lives``. An error in one is a
    violation.
    """

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except Exception as error:
            target.findings.violate(f"the soak itself: {error!r}")
            raise

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    try:
        lives()
    finally:
        target.over.set()
        for thread in threads:
            thread.join(60)


def verify(cache: Path, findings: Findings) -> None:
    """Check that `pyctl cache verify` accepts the directory; record its size in MiB."""
    command = [*module_command("pyctl"), "cache", "verify", "--kv-cache-dir", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        findings.violate(
            f"pyctl cache verify: {done.returncode} {done.stdout[-500:]} {done.stderr[-500:]}"
        )
    n_mib = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / 2**20
    findings.count("MiB in the cache directory", round(n_mib))


def short_lives(
    target: Target,
    rng: random.Random,
    seconds: float,
    choose: Callable[[], tuple[str, Sequence[str]]],
) -> None:
    """Run lives of ``seconds`` in all, each with the name and the flags that ``choose`` returns,
    stopped or killed.
    """
    while seconds > 0:
        lasts = min(seconds, rng.uniform(*SHORT_SECONDS))
        name, flags = choose()
        target.live(name, lasts, rng.choice(("stop", "kill", "kill")), flags)
        seconds -= lasts


def report(
    target: Target, title: str, more: Sequence[Sequence[object]] = (), keep: str = ""
) -> None:
    """Print the tables, ``more`` rows in the first. SystemExit if anything is wrong."""
    findings = target.findings
    rows: list[Sequence[object]] = [
        [name, f"{count:,}"] for name, count in sorted(findings.counts.items())
    ]
    rows += [
        [f"longest {name}", f"{took:.2f} s ({what})"]
        for name, (took, what) in sorted(findings.worst.items())
    ]
    show(title, ["what", "count"], [*rows, *more, ["violations", findings.n_violations]], keep=keep)
    columns = [
        "life",
        "seconds",
        "requests",
        "peak MiB",
        "at rest, half-way and at the end",
        "growth",
    ]
    columns += ["threads", "files", "exit code"]
    lives = [row for row in target.rows if str(row[0]).startswith("long")]
    show("The server's lives", columns, lives, keep=f"{keep}-lives" if keep else "")
    if findings.n_violations:
        raise SystemExit("\n".join(["wrong:", *findings.violations]))
