"""The parts of replies that several APIs have in common, as JSON."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from pyctl.cache.cache_stats import RequestStats
from pyctl.chat.tokenizer import Tokenizer
from pyctl.engine.backend import TopTokens
from pyctl.engine.request import Done, Progress, Request, Timings
from pyctl.engine.sampling import Sampling
from pyctl.requests.reply_options import ReplyOptions
from pyctl.server.cache_advice import explain

__all__ = [
    "cache_json",
    "probs_json",
    "progress_json",
    "settings_json",
    "timings_json",
    "usage_json",
    "without_long",
]

TextOf: TypeAlias = Callable[[Sequence[int]], str]
"""The text of some tokens, for people."""

_LOWEST = -3.4028234663852886e38
"""The number in place of minus infinity, which JSON does not have: the lowest float32."""


def probs_json(
    probs: Iterable[TopTokens], tokenizer: Tokenizer, after_sampling: bool = False
) -> list[dict[str, Any]]:
    """Return one object per token, with ``top_logprobs`` inside; ``after_sampling``, with ``prob``
    and ``top_probs``.
    """
    name, top = ("prob", "top_probs") if after_sampling else ("logprob", "top_logprobs")
    return [
        {
            **_entry(token[0], tokenizer, name),
            top: [_entry(candidate, tokenizer, name) for candidate in token[1:]],
        }
        for token in probs
    ]


def _entry(candidate: tuple[int, float], tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    token, value = candidate
    piece = tokenizer.piece(token, special=False)
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(
        piece
    )  # without half a character at the end
    return {"id": token, "token": text, "bytes": list(piece), name: max(value, _LOWEST)}


def timings_json(
    timings: Timings, report: RequestStats | None = None, receipt: int = 0
) -> dict[str, Any]:
    """Return llama-server's ``timings``: counts are tokens. The first predicted token comes with
    the prompt, so n tokens are n - 1 steps.

    Drafts are counted if there were any, and the tokens of a loop that repeat its first block of
    ``loop_period_n`` tokens. A complete ``report`` adds fields that llama-server does not have: the
    time of lookup, restore and save within the prompt's, and the tokens evaluated before the
    request arrived, if any. So does the id of a ``receipt``. Numbers only, as typed clients
    require.
    """
    n_steps = max(timings.n_predicted - 1, 0)
    drafts = timings.drafts
    counts: dict[str, float] = {}
    if drafts.n_drafted:
        counts = {"draft_n": drafts.n_drafted, "draft_n_accepted": drafts.n_accepted}
    loop: dict[str, float] = {}
    if timings.loop is not None:
        loop = {"loop_n": timings.loop.n_tokens, "loop_period_n": timings.loop.period}
    return {
        "cache_n": timings.n_cached,
        "prompt_n": timings.n_evaluated,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_token_ms": _ratio(timings.prompt_ms, timings.n_evaluated),
        "prompt_per_second": _ratio(timings.n_evaluated, timings.prompt_ms, 1e3),
        "predicted_n": timings.n_predicted,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_token_ms": _ratio(timings.predicted_ms, n_steps),
        "predicted_per_second": _ratio(n_steps, timings.predicted_ms, 1e3),
        **counts,
        **loop,
        **(_cache_times(report) if report is not None else {}),
        **({"receipt": receipt} if receipt else {}),
    }


def _cache_times(report: RequestStats) -> dict[str, Any]:
    return {
        **({"warmed_n": report.n_prewarmed} if report.n_prewarmed else {}),
        "lookup_ms": report.lookup_ms,
        "restore_ms": report.restore_ms,
        "save_ms": report.save_ms,
    }


def cache_json(report: RequestStats, text_of: TextOf | None) -> dict[str, Any]:
    """Return the source from which the prompt was restored, the ids of the snapshots in GET /cache,
    and the position where it diverged from a recent prompt.

    ``text_of`` shows the words there. It is None for a client that must not read the texts of
    others. That client gets neither the position, which steps by single tokens, nor the ids, which
    are digests of all tokens of a snapshot: with all but a few of them the rest could be found by
    trying.
    """
    body: dict[str, Any] = {"source": report.source}
    if text_of is None:
        return body
    body |= {"restored": report.restored, "saved": report.saved}
    explanation = explain(report.comparison, report.n_prompt, report.n_cached)
    if explanation is not None:
        body["why"] = explanation.as_json()
    if (miss := report.miss) is not None:
        words = {"was": text_of(miss.recent), "is": text_of(miss.given)}
        body["miss"] = {"position": miss.position, "nearest": miss.nearest, **words}
    return body


def usage_json(
    done: Done, n_reasoning: int | None = None, *, has_prediction: bool = False
) -> dict[str, Any]:
    """Return OpenAI's account of a reply, with the cached tokens that were evaluated before the
    request arrived.

    ``n_reasoning`` tokens are reasoning, None if they are not counted. With ``has_prediction`` the
    drafts from the prediction are counted as well: those that are part of the reply, and those that
    were evaluated in vain.
    """
    completion_details: dict[str, int] = {}
    if n_reasoning is not None:
        completion_details["reasoning_tokens"] = n_reasoning
    if has_prediction:
        drafts = done.timings.drafts
        n_rejected = drafts.n_predicted - drafts.n_predicted_accepted
        completion_details["accepted_prediction_tokens"] = drafts.n_predicted_accepted
        completion_details["rejected_prediction_tokens"] = n_rejected
    warmed = {"warmed_tokens": done.stats.n_prewarmed} if done.stats.n_prewarmed else {}
    n_prompt = done.stats.n_prompt
    n_predicted = done.timings.n_predicted
    return {
        "completion_tokens": n_predicted,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_predicted,
        "prompt_tokens_details": {
            "cached_tokens": done.timings.n_cached,
            "cache_write_tokens": done.stats.n_written,
            **warmed,
        },
        **({"completion_tokens_details": completion_details} if completion_details else {}),
    }


def progress_json(progress: Progress, options: ReplyOptions) -> dict[str, Any]:
    """Return llama-server's ``prompt_progress``.

    ``waiting`` is added while the request waits: its place, 1 for the next. With ``return_cache``
    also ``left_ms``, the estimate for the rest.
    """
    waiting = {"waiting": progress.queue_position} if progress.queue_position else {}
    estimate = (
        {"left_ms": round(progress.seconds_left * 1e3)}
        if options.return_cache and progress.seconds_left
        else {}
    )
    return {
        "total": progress.n_prompt,
        "cache": progress.n_cached,
        "processed": progress.n_processed,
        "time_ms": int(progress.ms),
        **waiting,
        **estimate,
    }


def _ratio(value: float, by: float, factor: float = 1.0) -> float:
    return value * factor / by if by > 0 else 0.0


_ELSEWHERE = frozenset(
    {"logit_bias", "grammar_kind", "grammar_triggers", "grammar_hidden", "grammar_prefill"}
)
"""Members of Sampling that are shown in another form, or not at all."""

_LONG = frozenset(
    (
        "stop",
        "logit_bias",
        "grammar",
        "grammar_lazy",
        "grammar_triggers",
        "preserved_tokens",
        "dry_sequence_breakers",
    )
)


def settings_json(
    request: Request,
    options: ReplyOptions,
    draft_types: Sequence[str],
    generation_prompt: str | None = None,
) -> dict[str, Any]:
    """Return all settings; ``draft_types`` name the sources of drafts, ``generation_prompt`` is the
    part of a chat's prompt that belongs to the reply, None without a chat.
    """
    sampling = request.sampling
    form = "deepseek" if options.reasoning_format in (None, "auto") else options.reasoning_format
    return {
        **{
            item.name: _single_precision(getattr(sampling, item.name))
            for item in fields(Sampling)
            if item.name not in _ELSEWHERE
        },
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "n_keep": options.echoed.n_keep,
        "n_discard": options.echoed.n_discard,
        "stream": options.stream,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "n_probs": request.n_probs or 0,
        "grammar_triggers": [
            {"type": 2, "value": pattern} for pattern in sampling.grammar_triggers
        ],
        "preserved_tokens": [],
        "chat_format": "Content-only" if generation_prompt is None else "peg-native",
        "reasoning_format": form,
        "reasoning_in_content": options.stream and form == "deepseek-legacy",
        "generation_prompt": generation_prompt or "",
        "speculative.types": ",".join(draft_types) or "none",
        "timings_per_token": options.timings_per_token,
        "backend_sampling": options.echoed.backend_sampling,
        "lora": [{"id": number, "scale": scale} for number, scale in options.lora],
        "cache_prompt": request.cache_prompt,
    }


def _single_precision(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return ctypes.c_float(value).value  # llama-server has no doubles


def without_long(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``settings`` in /props and /slots: all but those that may be long."""
    return {key: value for key, value in settings.items() if key not in _LONG}
