"""How many tokens and how long, as llama-server's ``timings`` and OpenAI's ``usage``."""

from __future__ import annotations

from typing import Any

from pyctl.cache.report import Report
from pyctl.engine.request import Done, Progress, Timings

__all__ = ["progress_json", "timings_json", "usage_json"]


def timings_json(timings: Timings, report: Report | None = None) -> dict[str, Any]:
    """Counts are tokens. The first predicted token comes with the prompt, so n tokens are n - 1 steps.

    ``report``, once it is complete, adds what llama-server does not have: where the cached tokens were restored from,
    and what lookup, restore and save took of the prompt's time.
    """
    n_steps = max(timings.predicted_n - 1, 0)
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_token_ms": _ratio(timings.prompt_ms, timings.prompt_n),
        "prompt_per_second": _ratio(timings.prompt_n, timings.prompt_ms, 1e3),
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_token_ms": _ratio(timings.predicted_ms, n_steps),
        "predicted_per_second": _ratio(n_steps, timings.predicted_ms, 1e3),
        **(_cache_json(report) if report is not None else {}),
    }


def _cache_json(report: Report) -> dict[str, Any]:
    return {
        "source": report.source,
        "lookup_ms": report.lookup_ms,
        "restore_ms": report.restore_ms,
        "save_ms": report.save_ms,
    }


def usage_json(done: Done) -> dict[str, Any]:
    """OpenAI's account of a reply."""
    n_prompt, n_predicted = done.report.n_prompt, done.timings.predicted_n
    return {
        "completion_tokens": n_predicted,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_predicted,
        "prompt_tokens_details": {"cached_tokens": done.timings.cache_n},
    }


def progress_json(progress: Progress) -> dict[str, Any]:
    """llama-server's ``prompt_progress``."""
    return {
        "total": progress.n_total,
        "cache": progress.n_cached,
        "processed": progress.n_processed,
        "time_ms": int(progress.ms),
    }


def _ratio(value: float, by: float, factor: float = 1.0) -> float:
    return value * factor / by if by > 0 else 0.0
