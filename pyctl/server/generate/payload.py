"""What all kinds of replies tell besides their text: timings, usage, probabilities, settings."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from pyctl.cache import RequestStats
from pyctl.chat.cached_tokenizer import Tokenizer
from pyctl.engine.backend import TopTokens
from pyctl.engine.request import Done, Progress, Request, Timings
from pyctl.engine.sampling import Sampling
from pyctl.server.generation_body import ReplyOptions

__all__ = ["cache_json", "probs_json", "progress_json", "settings_json", "timings_json", "usage_json", "without_long"]

TextOf: TypeAlias = Callable[[Sequence[int]], str]

_LOWEST = -3.4028234663852886e38

"""Stands for minus infinity, which JSON does not have: the lowest float32."""


def probs_json(probs: Iterable[TopTokens], tokenizer: Tokenizer, after_sampling: bool = False) -> list[dict[str, Any]]:
    """One object per token, with ``top_logprobs`` inside; ``after_sampling``, with ``prob`` and ``top_probs``."""
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
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(piece)  # without half a character at the end
    return {"id": token, "token": text, "bytes": list(piece), name: max(value, _LOWEST)}


def timings_json(timings: Timings, report: RequestStats | None = None) -> dict[str, Any]:
    """Counts are tokens. The first predicted token comes with the prompt, so n tokens are n - 1 steps.

    Drafts are told of if there were any, and with --kv-pool what attention read from RAM and chose. ``report``, once it
    is complete, adds what llama-server does not have: what lookup, restore and save took of the prompt's time, and how
    many tokens had been evaluated before the request came, if any. Numbers only: typed clients want nothing else here.
    """
    n_steps = max(timings.n_predicted - 1, 0)
    drafts = timings.drafts
    counts: dict[str, float] = {}
    if drafts.n_drafted:
        counts = {"draft_n": drafts.n_drafted, "draft_n_accepted": drafts.n_accepted}
    if timings.streamed is not None:
        counts |= {"streamed_bytes": timings.streamed.n_bytes, "stream_wait_ms": timings.streamed.wait_ms}
        if timings.streamed.n_selected:
            counts |= {"selected_chunks": timings.streamed.n_selected, "fetched_chunks": timings.streamed.n_fetched}
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
        **(_cache_times(report) if report is not None else {}),
    }


def _cache_times(report: RequestStats) -> dict[str, Any]:
    return {
        **({"warmed_n": report.n_warmed} if report.n_warmed else {}),
        "lookup_ms": report.lookup_ms,
        "restore_ms": report.restore_ms,
        "save_ms": report.save_ms,
    }


def cache_json(report: RequestStats, text_of: TextOf | None) -> dict[str, Any]:
    """Where the prompt was restored from, the ids of the snapshots in GET /cache, and where it left a recent prompt.

    ``text_of`` shows the words there, which may be somebody else's; None keeps them back.
    """
    body: dict[str, Any] = {
        "source": report.source,
        "restored": report.restored,
        "saved": report.saved,
    }
    if report.miss is not None:
        miss = report.miss
        body["miss"] = {"position": miss.position, "nearest": miss.nearest}
        if text_of is not None:
            body["miss"] |= {"was": text_of(miss.recent), "is": text_of(miss.given)}
    return body


def usage_json(done: Done) -> dict[str, Any]:
    """OpenAI's account of a reply, with the part of the cached tokens that was evaluated for it before it came."""
    warmed = {"warmed_tokens": done.stats.n_warmed} if done.stats.n_warmed else {}
    n_prompt, n_predicted = done.stats.n_prompt, done.timings.n_predicted
    return {
        "completion_tokens": n_predicted,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_predicted,
        "prompt_tokens_details": {"cached_tokens": done.timings.n_cached, **warmed},
    }


def progress_json(progress: Progress) -> dict[str, Any]:
    """llama-server's ``prompt_progress``."""
    return {
        "total": progress.n_prompt,
        "cache": progress.n_cached,
        "processed": progress.n_processed,
        "time_ms": int(progress.ms),
    }


def _ratio(value: float, by: float, factor: float = 1.0) -> float:
    return value * factor / by if by > 0 else 0.0


_ELSEWHERE = frozenset({"logit_bias", "grammar_kind", "grammar_triggers", "grammar_hidden", "grammar_prefill"})
"""Members of Sampling that are shown in another form, or not at all."""

_LONG = frozenset(
    ("stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens", "dry_sequence_breakers")
)


def settings_json(
    request: Request, options: ReplyOptions, draft_types: Sequence[str], generation_prompt: str | None = None
) -> dict[str, Any]:
    """All settings; ``draft_types`` name what proposes drafts, ``generation_prompt`` is what a chat's prompt holds of
    the reply, None without a chat."""
    sampling = request.sampling
    form = "deepseek" if options.reasoning_format in (None, "auto") else options.reasoning_format
    return {
        **{item.name: _shown(getattr(sampling, item.name)) for item in fields(Sampling) if item.name not in _ELSEWHERE},
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "n_keep": options.n_keep,
        "n_discard": options.n_discard,
        "stream": options.stream,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "n_probs": request.n_probs,
        "grammar_triggers": [{"type": 2, "value": pattern} for pattern in sampling.grammar_triggers],
        "preserved_tokens": [],
        "chat_format": "Content-only" if generation_prompt is None else "peg-native",
        "reasoning_format": form,
        "reasoning_in_content": options.stream and form == "deepseek-legacy",
        "generation_prompt": generation_prompt or "",
        "speculative.types": ",".join(draft_types) or "none",
        "timings_per_token": options.timings_per_token,
        "backend_sampling": options.backend_sampling,
        "lora": [{"id": number, "scale": scale} for number, scale in options.lora],
        "cache_prompt": request.cache_prompt,
    }


def _shown(value: Any) -> Any:
    return ctypes.c_float(value).value if isinstance(value, float) else value  # llama-server has no doubles


def without_long(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What /props and /slots show of the ``settings``: all but what may be long."""
    return {key: value for key, value in settings.items() if key not in _LONG}
