"""What a request body says about the reply besides its content: one engine request and how to answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyctl.cache.policy import DiskPolicy
from pyctl.engine.request import Request
from pyctl.errors import NotSupportedError, RequestError
from pyctl.prompt import Prompt
from pyctl.server.fields import Fields
from pyctl.server.sampling import sampling_of
from pyctl.server.settings import Service

__all__ = ["Options", "engine_request", "settings_json"]


@dataclass(frozen=True)
class Options:
    """How to answer; names and defaults are llama-server's."""

    stream: bool = False
    include_usage: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    return_tokens: bool = False
    verbose: bool = False
    response_fields: tuple[str, ...] = ()
    ping_seconds: int = 30

    @classmethod
    def of(cls, fields: Fields, ping_seconds: int) -> Options:
        """Read from ``fields``; ``ping_seconds`` is the server's own."""
        return cls(
            stream=fields.boolean("stream", False),
            include_usage=fields.object("stream_options").boolean("include_usage", False),
            timings_per_token=fields.boolean("timings_per_token", False),
            return_progress=fields.boolean("return_progress", False),
            return_tokens=fields.boolean("return_tokens", False),
            verbose=fields.boolean("verbose", False),
            response_fields=fields.strings("response_fields") or (),
            ping_seconds=fields.integer("sse_ping_interval", default=ping_seconds, low=-1),
        )


def engine_request(fields: Fields, prompt: Prompt, service: Service, n_probs: int | None = None) -> Request:
    """What the engine is to do for ``fields``; ``n_probs`` overrides the field. Raises RequestError."""
    _refuse_unsupported(fields)
    settings = service.settings
    if n_probs is None:
        n_probs = _n_probs(fields)
    if n_probs and fields.boolean("post_sampling_probs", False):
        raise NotSupportedError("probabilities after sampling are not supported, only those of the model")
    stream = fields.boolean("stream", False)
    return Request(
        prompt=prompt,
        sampling=sampling_of(fields, settings.sampling, service.tokenizer, service.info.n_vocab),
        max_tokens=fields.integer(
            "n_predict", "max_completion_tokens", "max_tokens", default=settings.n_predict, low=-1
        ),
        stop=tuple(word for word in fields.strings("stop") or () if word),
        n_probs=n_probs,
        cache_prompt=fields.boolean("cache_prompt", settings.cache_prompt),
        disk_policy=DiskPolicy.of_request(fields.get("prefix_cache"), settings.disk_policy),
        return_progress=stream,  # the first report of progress is what a stream's headers wait for
    )


def settings_json(request: Request, options: Options) -> dict[str, Any]:
    """llama-server's ``generation_settings``."""
    sampling = request.sampling
    return {
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": sampling.dynatemp_range,
        "dynatemp_exponent": sampling.dynatemp_exponent,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": sampling.top_n_sigma,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "typical_p": sampling.typical_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "dry_sequence_breakers": sampling.dry_sequence_breakers,
        "mirostat": sampling.mirostat,
        "mirostat_tau": sampling.mirostat_tau,
        "mirostat_eta": sampling.mirostat_eta,
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stream": options.stream,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "n_probs": request.n_probs,
        "min_keep": sampling.min_keep,
        "grammar": sampling.grammar,
        "samplers": sampling.samplers,
        "timings_per_token": options.timings_per_token,
        "cache_prompt": request.cache_prompt,
    }


def _n_probs(fields: Fields) -> int:
    value = fields.get("n_probs") if "n_probs" in fields else fields.get("logprobs")
    if isinstance(value, bool):  # OpenAI's chat writes logprobs so
        return int(value)
    return fields.integer("n_probs", "logprobs", default=0, low=0)


def _refuse_unsupported(fields: Fields) -> None:
    n = fields.integer("n_cmpl", "n", default=1, low=1)
    if n > 1:
        raise NotSupportedError("more than one reply to a prompt (n > 1) is not supported")
    kind = fields.object("response_format").string("type", "text")
    if kind in ("json_object", "json_schema") or "json_schema" in fields:
        raise NotSupportedError("replies bound to a JSON schema are not supported")
    if kind != "text":
        raise RequestError(f"'response_format.type' must be text, json_object or json_schema, not {kind!r}")
    if fields.get("lora"):
        raise NotSupportedError("LoRA adapters are not supported")
