"""The log of requests: a line for each that was served, and why others ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from pyctl.cache import Divergence
from pyctl.engine.pool import PoolPlan
from pyctl.engine.request import Done
from pyctl.errors import PyctlError
from pyctl.server.service import Service

__all__ = ["log_disconnect", "log_done", "log_error"]

log = logging.getLogger("pyctl.server")

MIB = 2**20


def log_done(path: str, done: Done, service: Service) -> None:
    """Log a served request in one line, a miss in a second one, and at -lv 4 the details."""
    report, timings = done.stats, done.timings
    source = "RAM" if report.source == "ram" else report.source
    cached = f"{report.n_cached:,} from {source}" if report.n_cached else "0 cached"
    drafts = timings.drafts
    fields = [
        f"{_endpoint(path)} {report.n_prompt:7,} tokens",
        f"{cached:>19}",
        f"{report.n_evaluated:7,} new",
        f"{f'first {timings.first_token_ms / 1e3:.2f} s':>14}",
        f"{timings.n_predicted:6,}{_speed(timings.n_predicted - 1, timings.predicted_ms)}",
        *([f"drafts {drafts.n_accepted:,}/{drafts.n_drafted:,}"] if drafts.n_drafts else ()),
    ]
    log.info("%s", "  ".join(fields).rstrip(), extra={"strong": cached.strip() if report.n_cached else ""})
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s %s", _endpoint(path), "  ".join(_details(done, service.info.pool)))
    if report.miss is not None:
        service.afterwards.add(partial(_log_miss, path, report.miss, service))


def _details(done: Done, pool: PoolPlan | None) -> Iterable[str]:
    """With a pool, also the MiB of restored rows that went to the device and that stayed in RAM."""
    report, timings = done.stats, done.timings
    yield f"restore {_time(report.lookup_ms + report.restore_ms)}"
    yield f"stop {done.stop_type}"
    if report.n_warmed:
        yield f"{report.n_warmed:,} prewarmed"
    if timings.drafts.n_drafts:
        yield f"{timings.drafts.n_accepted / timings.drafts.n_drafts:.2f} tokens accepted a draft"
    if pool is not None and report.n_loaded:
        yield from _moved(pool, report.n_loaded)


def _log_miss(path: str, miss: Divergence, service: Service) -> None:
    """Log where a prompt differs from a recent one."""
    was, given = service.text_of(miss.recent), service.text_of(miss.given)
    log.info(
        "%s token %s differs from a recent prompt  nearest snapshot %s  was %r  is %r",
        *(_endpoint(path), f"{miss.position:,}", f"{miss.nearest:,}", was, given),
    )


def _endpoint(path: str) -> str:
    """The endpoint as lines of the log begin with it: "chat" for /v1/chat/completions."""
    return f"{path.rpartition('/v1/')[2].strip('/').removesuffix('/completions'):<12}"


def _moved(pool: PoolPlan, n: int) -> Iterable[str]:
    row_bytes = pool.layer_bytes / pool.n_rows / MIB
    up, kept = (n * row_bytes * n_layers for n_layers in (pool.n_resident, pool.n_streamed))
    yield f"K and V: {up:,.0f} MiB to the device, {kept:,.0f} MiB in RAM"


def log_error(path: str, error: Exception) -> None:
    """Log a request that ended with an error, with a traceback if it is unexpected."""
    if isinstance(error, PyctlError):
        log.warning("%s: %s", _endpoint(path).rstrip(), error)
    else:
        log.error("%s: unexpected error", _endpoint(path).rstrip(), exc_info=error)


def log_disconnect(path: str, n_predicted: int) -> None:
    """Log a request whose client closed the connection."""
    log.info("%s cancelled: the client disconnected  %s generated", _endpoint(path), f"{n_predicted:,}")


def _time(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.1f} s"


def _speed(n: int, ms: float) -> str:
    if n <= 0 or ms <= 0:
        return ""
    speed = n * 1e3 / ms
    return f" at {speed:.1f}/s" if speed < 100 else f" at {speed:.0f}/s"
