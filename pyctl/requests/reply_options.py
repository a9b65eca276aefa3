"""The form of the answer to a request."""

from __future__ import annotations

from typing import Annotated, Any

from pyctl.requests.adapters import parse_adapter_scales
from pyctl.requests.body_reader import (
    MAX_NAMES,
    Body,
    Flattened,
    Integer,
    Names,
    at_most,
    strings,
)

__all__ = ["EchoedOptions", "ReplyOptions"]


def _member_names(value: Any, name: str) -> tuple[str, ...]:
    """Return the names of members. Anything but a list means all members, as in llama-server."""
    if not isinstance(value, list):
        return ()
    at_most(MAX_NAMES, len(value), name)
    return strings(value, name)


class _StreamOptions(Body, frozen=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False


class EchoedOptions(Body, frozen=True):
    """Fields of llama-server that have no effect here.

    Their values are checked as there, and the settings of a reply repeat all but
    ``n_cache_reuse``.
    """

    n_keep: Annotated[int, Integer(low=-1)] = 0
    n_discard: Annotated[int, Integer(low=0)] = 0
    n_cache_reuse: Annotated[int, Integer(low=0)] = 0
    backend_sampling: bool = False


class ReplyOptions(Body, frozen=True):
    """The form of the answer; names and defaults are llama-server's.

    ``ping_seconds`` is the silence after which a stream sends a comment, None for the server's own,
    as for the ``reasoning_format`` and ``verbose``. ``return_cache`` is not llama-server's:
    ``timings.cache`` reports on the prefix cache.
    """

    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    timings_per_token: bool = False
    return_progress: bool = False
    return_cache: bool = False
    return_tokens: bool = False
    echo: bool = False
    verbose: bool | None = None
    response_fields: Annotated[tuple[str, ...], _member_names] = ()
    ping_seconds: Annotated[int | None, Integer(low=-1), Names("sse_ping_interval")] = None
    reasoning_format: str | None = None
    reasoning_control: bool = False
    lora: Annotated[tuple[tuple[int, float], ...], parse_adapter_scales] = ()
    echoed: Annotated[EchoedOptions, Flattened(EchoedOptions.from_json)] = EchoedOptions()
