"""The log of requests: a line for each that was served, and why others ended."""

from __future__ import annotations

import logging
from functools import partial

from pyctl.cache.cache_stats import Divergence
from pyctl.engine.request import Done, Progress
from pyctl.errors import NotFoundError, PyctlError
from pyctl.requests.service import Service
from pyctl.server.cache_advice import explain

__all__ = ["log_disconnect", "log_done", "log_error"]

log = logging.getLogger("pyctl.server")


def log_done(path: str, done: Done, service: Service) -> None:
    """Log a served request in one line, and why it evaluated tokens again in more."""
    report = done.stats
    timings = done.timings
    drafts = done.timings.drafts
    source = "RAM" if report.source == "ram" else report.source
    cached = f"{report.n_cached:,} from {source}" if report.n_cached else "0 cached"
    fields = [
        f"{_endpoint(path)} {report.n_prompt:7,} tokens",
        f"{cached:>17}",
        f"{report.n_evaluated:7,} evaluated",
        f"{f'first {timings.first_token_ms / 1e3:.2f} s':>14}",
        f"{timings.n_predicted:6,}{_speed(timings.n_predicted - 1, timings.predicted_ms)}",
        *(
            [f"{drafts.n_accepted:,} of {drafts.n_drafted:,} drafts accepted"]
            if drafts.n_drafts
            else ()
        ),
    ]
    log.info(
        "%s",
        "  ".join(fields).rstrip(),
        extra={"strong": cached.strip() if report.n_cached else ""},
    )
    if timings.loop is not None:
        loop = timings.loop
        outcome = "ended by --loop-guard" if loop.is_ended else "not ended without --loop-guard"
        log.warning(
            "%s the reply repeats %s tokens for %s more: a loop, %s",
            *(_endpoint(path), f"{loop.period:,}", f"{loop.n_tokens:,}", outcome),
        )
    explanation = explain(report.comparison, report.n_prompt, report.n_cached)
    if explanation is not None:
        kind = report.kind.value if report.kind is not None else ""
        log.info("%s %s: %s", _endpoint(path), kind, explanation.text)
    if report.miss is not None and not report.miss.is_by_chance:
        service.post_reply.add(partial(_log_miss, path, report.miss, service))


def _log_miss(path: str, miss: Divergence, service: Service) -> None:
    """Log the position where a prompt differs from a recent one."""
    was = service.readable(miss.recent)
    prompt_text = service.readable(miss.given)
    log.info(
        "%s token %s differs from a recent prompt  nearest snapshot %s  was '%s'  is '%s'",
        *(_endpoint(path), f"{miss.position:,}", f"{miss.nearest:,}", was, prompt_text),
    )


def _endpoint(path: str) -> str:
    """Return the endpoint as lines of the log start with it: "chat" for /v1/chat/completions."""
    return f"{path.rpartition('/v1/')[2].strip('/').removesuffix('/completions'):<12}"


def log_error(path: str, error: Exception) -> None:
    """Log a request that ended with an error, with a traceback if it is unexpected."""
    if isinstance(error, PyctlError):  # a page that was reloaded requests streams that may be over
        level = logging.INFO if isinstance(error, NotFoundError) else logging.WARNING
        log.log(level, "%s: %s", _endpoint(path).rstrip(), error)
    else:
        log.error("%s: unexpected error", _endpoint(path).rstrip(), exc_info=error)


def log_disconnect(path: str, progress: Progress | None, n_predicted: int) -> None:
    """Log a request whose client closed the connection; ``progress`` is its prompt's."""
    cached = (
        f"{progress.n_cached:,} of {progress.n_prompt:,} tokens cached  "
        if progress is not None
        else ""
    )
    log.info(
        "%s cancelled: the client disconnected  %s%s generated",
        _endpoint(path),
        cached,
        f"{n_predicted:,}",
    )


def _speed(n: int, ms: float) -> str:
    if n <= 0 or ms <= 0:
        return ""
    speed = n * 1e3 / ms
    return f" at {speed:.1f}/s" if speed < 100 else f" at {speed:.0f}/s"
