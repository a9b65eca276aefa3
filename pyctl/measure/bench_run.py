"""The run of `pyctl bench`: it starts servers one after the other, sends each the same requests,
and records figures.

First start: prompts of each depth cold, the next turn of each, and each again after another
conversation. Second start: the same conversations from disk, then from RAM. Further starts:
`--exact`, drafts of the model's own head, and llama-server, which gets the requests of the first
start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from pyctl.measure.client import AskedServer, Messages, Probs, TimedReply
from pyctl.measure.coding_chat import FOLLOW_UPS, coding_chat, source_text, turn
from pyctl.measure.process_stats import evict, resident_mib
from pyctl.measure.server_process import PYCTL_SERVE

__all__ = [
    "AGAIN",
    "COLD",
    "FROM_DISK",
    "FROM_RAM",
    "NEXT",
    "OURS",
    "PEER",
    "BenchOptions",
    "BenchRun",
    "Record",
    "difference",
]

OURS = "pyctl"
PEER = "llama-server"

COLD = "cold"
NEXT = "next turn"
AGAIN = "another chat and back"
FROM_RAM = "from RAM"
FROM_DISK = "from disk, restarted"

Record = dict[str, Any]

N_SHORT = 16
"""Tokens of a short reply."""
N_PROBS = 100
"""Likeliest tokens at each place that are compared."""
N_COMPARED = 8
"""Places, tokens of a reply, that are compared."""

SAMPLE_CHARS = 20_000
WARM_TOKENS = 1000
EXACT_TOKENS = 1500

RESERVE = 2048
"""Tokens that a context needs beyond a prompt."""

MIB = 2**20


SIGN_SECONDS = 5.0
"""A step that may take longer is announced: silence looks like a hang."""


@dataclass(frozen=True)
class BenchOptions:
    """The options of a run. ``flags`` are `pyctl serve`'s, ``peer`` llama-server's command without
    them, or empty.

    ``depths`` are prompt tokens, ascending; ``budget`` is seconds. ``head_flags`` turn on drafts
    from the model's own head, empty for a model without one. ``vram`` returns the bytes in use on
    all GPUs, None without one.
    """

    flags: tuple[str, ...]
    depths: tuple[int, ...]
    budget: float
    n_decode: int = 128
    both_modes: bool = True
    is_exact: bool = False
    head_flags: tuple[str, ...] = ()
    peer: tuple[str, ...] = ()
    cache_mib: int = 16384
    vram: Callable[[], int | None] = field(default_factory=lambda: lambda: None)


@dataclass
class BenchRun:
    """A run that measures into ``records``; ``work`` is an empty directory for the cache and the
    logs, ``report`` shows progress.
    """

    options: BenchOptions
    work: Path
    report: Callable[[str], None]
    records: list[Record] = field(default_factory=list)
    chars_per_token: float = 4.0
    tokens_per_second: float = 0.0
    replies: dict[str, str] = field(default_factory=dict)
    _began: float = 0.0
    _n_ctx: int = 0
    _vram_before: int | None = None

    def run(self) -> None:
        """Measure all that fits the budget; a server that fails leaves a record of kind
        "failed".
        """
        self._began = time.monotonic()
        in_memory = partial(self._compare_in_memory, mode=self._mode)
        first_measure = partial(self._measure, is_first=True)
        self._part(
            OURS,
            self._command(),
            first_measure,
            in_memory,
        )
        if not self._n_ctx:
            return  # no measurement; the record has the reason
        small = str(min(self._n_ctx, max(self.options.depths) + RESERVE))
        from_disk = partial(self._compare_from_disk, mode=self._mode)
        self._part(
            OURS,
            self._command("-c", small),
            self._return,
            from_disk,
            is_cold=True,
        )
        if self.options.both_modes and not self.options.is_exact:
            self._exact_mode()
        if self.options.head_flags:
            self._part(OURS, self._command(*self.options.head_flags), self._drafts)
        if self.options.peer:
            self._part(PEER, self.options.peer, partial(self._measure, is_first=False))

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def _mode(self) -> str:
        return "--exact" if self.options.is_exact else "by default"

    def _command(self, *more: str) -> tuple[str, ...]:
        """Return the command `pyctl serve` with a cache below ``work``, never the user's."""
        directory = str(self.work / "cache")
        budget = str(self.options.cache_mib)
        return (
            *PYCTL_SERVE,
            *self.options.flags,
            "--kv-cache-dir",
            directory,
            "--kv-cache-budget",
            budget,
            *more,
        )

    # -- servers
    # ----------------------------------------------------------------------------------

    def _part(
        self,
        name: str,
        command: Sequence[str],
        *steps: Callable[[AskedServer], None],
        is_cold: bool = False,
    ) -> None:
        """Run ``steps`` with a separate server. Failures are recorded; the server does not outlive
        an interrupt.

        With ``is_cold`` the files of the cache are evicted from the page cache first.
        """
        if is_cold:
            evict([path for path in (self.work / "cache").rglob("*") if path.is_file()])
        server = AskedServer(name, command, self.work / "log")
        self._vram_before = self.options.vram()
        try:
            server.start()
            self.report(f"{name} is ready after {server.load_seconds:.1f} s")
            for step in steps:
                step(server)
            server.stop()
        except (OSError, HTTPException, ValueError) as error:
            reason = _last_words(str(error))
            self._record("failed", server=name, why=reason)
            self.report(f"{name} failed: {reason}")
        finally:
            server.kill()

    def _fits(self, n_tokens: int, what: str) -> bool:
        """Return whether evaluating ``n_tokens`` fits the budget; if not, record that."""
        needed = 0.0
        if self.tokens_per_second:
            needed = n_tokens / self.tokens_per_second
        remaining = self.options.budget - self.seconds
        if needed <= remaining:
            return True
        reason = f"takes about {needed:.0f} s, {max(remaining, 0):.0f} s are left"
        self._record("skipped", what=what, why=reason)
        self.report(f"skipped: {what}")
        return False

    def _record(self, kind: str, **fields: Any) -> None:
        self.records.append({"kind": kind, **fields})

    def _chat(self, name: str, n_tokens: int) -> Messages:
        return coding_chat(name, int(n_tokens * self.chars_per_token))

    # -- times
    # ----------------------------------------------------------------------------------

    def _measure(self, server: AskedServer, *, is_first: bool) -> None:
        """Measure cold prompts, next turns, and returns after another conversation."""
        self._warm_up(server, is_first=is_first)
        # a row of one compares nothing
        done = []
        n_servers = 1 + (is_first and bool(self.options.peer))
        for depth in self._depths():
            messages = self._chat(f"{depth}", depth)
            if not self._fits(n_servers * depth, f"{depth:,} tokens on {server.name}"):
                break
            reply = self.request(server, COLD, depth, messages, N_SHORT)
            self._record(
                "prefill",
                server=server.name,
                depth=depth,
                rate=_prefill_rate(reply),
            )
            self._decode(server, depth, turn(messages, reply.text, FOLLOW_UPS[0]))
            self.replies[f"{server.name} {depth}"] = reply.text
            done.append(depth)
        if not done:
            return  # memory before a prompt compares with none after it
        self._announce(server, "another conversation", done[0])
        server.request(self._chat("other", done[0]), N_SHORT)
        for depth in done:
            self.request(server, AGAIN, depth, self._follow(server, depth, 1), N_SHORT)
        self._record(
            "memory",
            server=server.name,
            ram_mib=resident_mib(server.pid),
            vram_mib=self._vram_mib(),
        )

    def _vram_mib(self) -> float | None:
        """Return the MiB on all GPUs since the start of the server; None without one."""
        now = self.options.vram()
        if now is None or self._vram_before is None:
            return None
        return (now - self._vram_before) / MIB

    def _warm_up(self, server: AskedServer, *, is_first: bool) -> None:
        """Load the kernels; at the first start, measure speed and context."""
        if is_first:
            sample = source_text()[:SAMPLE_CHARS]
            tokens = server.post("/tokenize", {"content": sample})["tokens"]
            self.chars_per_token = SAMPLE_CHARS / max(len(tokens), 1)
            settings = server.get("/props")["default_generation_settings"]
            self._n_ctx = int(settings["n_ctx"])
        warm = min(WARM_TOKENS, max(self.options.depths))
        self._announce(server, "two short conversations", 2 * warm)
        server.request(self._chat("warm", warm), N_SHORT)
        reply = server.request(self._chat("warmer", warm), N_SHORT, ignore_eos=True)
        if is_first:
            self.tokens_per_second = _prefill_rate(reply)

    def _depths(self) -> list[int]:
        """Return the depths that fit the context; at least a small one."""
        maximum = max(self._n_ctx - RESERVE, self._n_ctx // 2)
        depths = [depth for depth in self.options.depths if depth <= maximum]
        return depths or [maximum]

    def _return(self, server: AskedServer) -> None:
        """Measure each conversation from disk, the deepest last, after which the shallower ones are
        in RAM only.
        """
        depths = [depth for depth in self._depths() if f"{OURS} {depth}" in self.replies]
        for depth in depths:
            self.request(server, FROM_DISK, depth, self._follow(server, depth, 2), N_SHORT)
        for depth in depths[:-1]:
            self.request(server, FROM_RAM, depth, self._follow(server, depth, 3), N_SHORT)

    def _follow(self, server: AskedServer, depth: int, number: int) -> Messages:
        messages = self._chat(f"{depth}", depth)
        reply = self.replies[f"{server.name} {depth}"]
        return turn(messages, reply, FOLLOW_UPS[number])

    def request(
        self,
        server: AskedServer,
        way: str,
        depth: int,
        messages: Messages,
        n: int,
        **more: Any,
    ) -> TimedReply:
        """Send one conversation of about ``depth`` tokens for ``n`` tokens of reply, and record its
        first token.
        """
        self._announce(server, way, depth)
        reply = server.request(messages, n, **more)
        self._record(
            "first token",
            server=server.name,
            way=way,
            depth=depth,
            first_ms=reply.first_ms,
            source=reply.source,
            cached=reply.cached,
            evaluated=reply.evaluated,
        )
        figures = f"{reply.first_ms:,.0f} ms, {reply.evaluated:,} evaluated"
        self.report(f"{server.name}: {depth:,} tokens, {way}: {figures}")
        return reply

    def _announce(self, server: AskedServer, what: str, n_tokens: int) -> None:
        """Announce a step that evaluates at most ``n_tokens``, if it may take long."""
        text = f"{server.name}: {what}, {n_tokens:,} tokens"
        if self.tokens_per_second:
            seconds = n_tokens / self.tokens_per_second
            if seconds < SIGN_SECONDS:
                return
            text += f", at most {seconds:,.0f} s"
        self.report(f"{text} ...")

    def _decode(self, server: AskedServer, depth: int, messages: Messages) -> None:
        reply = self.request(server, NEXT, depth, messages, self.options.n_decode, ignore_eos=True)
        self._record(
            "decode",
            server=server.name,
            depth=depth,
            rate=reply.rate,
            **_drafted(reply),
        )

    def _drafts(self, server: AskedServer) -> None:
        """Measure replies with drafts of the model's head. The first one, for which steps are still
        new, does not count.
        """
        depth = self._depths()[0]
        messages = self._chat(f"{depth}", depth)
        if not self._fits(depth, "drafts"):
            return
        self._announce(server, "replies with drafts", depth)
        first = turn(messages, "Yes.", FOLLOW_UPS[1])
        second = turn(messages, "Yes.", FOLLOW_UPS[0])
        server.request(first, self.options.n_decode, ignore_eos=True)
        reply = server.request(second, self.options.n_decode, ignore_eos=True)
        self._record(
            "drafts",
            depth=depth,
            rate=reply.rate,
            **_drafted(reply),
        )

    # -- exactness
    # ----------------------------------------------------------------------------------

    def _exact_mode(self) -> None:
        """Compare again with --exact, whose caches are separate."""
        command = self._command("--exact")
        in_memory = partial(self._compare_in_memory, mode="--exact")
        from_disk = partial(self._compare_from_disk, mode="--exact")
        if self._fits(4 * EXACT_TOKENS, "--exact"):
            self._part(OURS, command, in_memory)
        if self._fits(4 * EXACT_TOKENS, "--exact"):
            self._part(
                OURS,
                command,
                from_disk,
                is_cold=True,
            )

    def _compare_in_memory(self, server: AskedServer, mode: str) -> None:
        messages = self._chat("exact", EXACT_TOKENS)
        self._announce(server, f"{mode}, a conversation to compare", EXACT_TOKENS)
        reply = server.request(messages, N_SHORT)
        other_turn = turn(messages, "It is complete.", FOLLOW_UPS[2])
        own_turn = turn(messages, reply.text, FOLLOW_UPS[2])
        self._compare(server, mode, "in memory", other_turn)
        self._compare(server, mode, "after its own reply", own_turn)

    def _compare_from_disk(self, server: AskedServer, mode: str) -> None:
        messages = self._chat("exact", EXACT_TOKENS)
        next_turn = turn(messages, "It looks complete.", FOLLOW_UPS[3])
        self._compare(server, mode, "from disk", next_turn)

    def _compare(self, server: AskedServer, mode: str, what: str, messages: Messages) -> None:
        """Compare the log-probabilities of a restored prompt and of the same prompt without the
        cache.
        """
        fields = {"logprobs": True, "top_logprobs": N_PROBS}
        self._announce(server, f"{mode}, {what}: restored and cold", EXACT_TOKENS)
        warm = server.request(
            messages,
            N_COMPARED,
            **fields,
        )
        cold = server.request(
            messages,
            N_COMPARED,
            cache_prompt=False,
            **fields,
        )
        largest = difference(warm.probs, cold.probs)
        self._record(
            "exact",
            mode=mode,
            what=what,
            source=warm.source,
            cached=warm.cached,
            difference=largest,
            tokens=N_COMPARED,
        )
        self.report(
            f"{mode}, {what}: {warm.cached:,} tokens restored, largest difference {largest:g}"
        )


def difference(warm: Sequence[Probs], cold: Sequence[Probs]) -> float:
    """Return the largest difference of log-probabilities, up to the first place where another token
    is likeliest.

    A token that only one side lists differs at least by its distance from the least of the other's.
    """
    largest = 0.0
    for warm_probs, cold_probs in zip(warm, cold, strict=False):
        largest = max(
            largest,
            _one_sided_difference(warm_probs, cold_probs),
            _one_sided_difference(cold_probs, warm_probs),
        )
        if _likeliest(warm_probs) != _likeliest(cold_probs):
            break
    return largest


def _one_sided_difference(probs: Probs, others: Probs) -> float:
    """Return the largest difference over the tokens of ``probs``."""
    minimum = min(others.values(), default=0.0)
    largest = 0.0
    for token, value in probs.items():
        other = others.get(token, minimum)
        largest = max(largest, abs(value - other))
    return largest


def _prefill_rate(reply: TimedReply) -> float:
    """Return the evaluated tokens per second up to the first token."""
    return reply.evaluated / reply.first_ms * 1e3


def _drafted(reply: TimedReply) -> dict[str, int]:
    return {
        "drafted": int(reply.timings.get("draft_n", 0)),
        "accepted": int(reply.timings.get("draft_n_accepted", 0)),
    }


def _likeliest(probs: Mapping[str, float]) -> str:
    return max(probs, key=lambda token: probs[token], default="")


def _last_words(text: str) -> str:
    """Return the last line of a server's log, which has the reason for its end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"
