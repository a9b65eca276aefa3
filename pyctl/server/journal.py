"""What is said about a request once it is over: one line in the log, one header in the answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pyctl.engine.request import Done, Progress
from pyctl.errors import PyctlError
from pyctl.server.reply import Reply

__all__ = ["TextOf", "cache_header", "ended", "failed", "left"]

TextOf: TypeAlias = Callable[[Sequence[int]], str]
"""The text of some tokens, for people."""

log = logging.getLogger("pyctl.server")


def cache_header(known: Done | Progress) -> dict[str, str]:
    """``x-pyctl-cache``: where the prompt was restored from, and tokens restored and evaluated."""
    if isinstance(known, Done):
        source, cached, evaluated = known.report.source, known.report.n_cached, known.report.n_evaluated
    else:
        source, cached, evaluated = known.source, known.n_cached, known.n_total - known.n_cached
    return {"x-pyctl-cache": f"source={source}; cached={cached}; evaluated={evaluated}"}


def ended(path: str, done: Done, text_of: TextOf) -> None:
    """Log a request that was served; on a miss, also where and how its prompt left the nearest recent one."""
    report, timings = done.report, done.timings
    # A device may still be busy when the prefill has been handed to it; the first token waits for it.
    prefill_ms = max(report.prefill_ms, timings.prompt_ms - report.lookup_ms - report.restore_ms)
    restored = f"{report.n_cached} from {report.source} in {_time(report.lookup_ms + report.restore_ms)}"
    log.info(
        "%s: %d prompt tokens, %s, %d evaluated in %s%s; %d predicted in %s%s, the first after %s; stop: %s",
        path,
        report.n_prompt,
        restored if report.n_cached else "none cached",
        report.n_evaluated,
        _time(prefill_ms),
        _speed(report.n_evaluated, prefill_ms),
        timings.predicted_n,
        _time(timings.predicted_ms),
        _speed(timings.predicted_n - 1, timings.predicted_ms),
        _time(timings.first_token_ms),
        done.stop_type,
    )
    if report.miss is not None:
        miss = report.miss
        log.info(
            "%s: token %d differs from a recent prompt; nearest snapshot at %d; was %r, is %r",
            path,
            miss.position,
            miss.nearest,
            text_of(miss.known),
            text_of(miss.given),
        )


def failed(path: str, error: Exception) -> None:
    """Log a request that ended with an error, with a traceback if nobody raised it on purpose."""
    if isinstance(error, PyctlError):
        log.warning("%s: %s: %s", path, type(error).__name__, error)
    else:
        log.error("%s: unexpected error", path, exc_info=error)


def left(path: str, replies: Sequence[Reply]) -> None:
    """Log a request whose client did not wait for the end."""
    n_predicted = sum(max(reply.n_predicted, len(reply.tokens)) for reply in replies)
    log.info("%s: cancelled, the client left after %d predicted tokens", path, n_predicted)


def _time(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.1f} s"


def _speed(n: int, ms: float) -> str:
    return f" ({n * 1e3 / ms:.1f} tok/s)" if n > 0 and ms > 0 else ""
