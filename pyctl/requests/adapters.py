"""The LoRA adapters of a request: their scales, which stay the model's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pyctl.errors import NotSupportedError, RequestError
from pyctl.requests.body_reader import MAX_NAMES, Body, at_most

if TYPE_CHECKING:
    from pyctl.engine.backend import EngineInfo

__all__ = ["check_scales", "parse_adapter_scales"]


class _Scale(Body, frozen=True):
    id: int = -1
    scale: float = 0.0


def parse_adapter_scales(value: Any, name: str = "lora") -> tuple[tuple[int, float], ...]:
    """Return the adapters of a request by number and scale. Raises RequestError for other
    values.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"'{name}' must be an array of objects with 'id' and 'scale' fields")
    at_most(MAX_NAMES, len(value), name)
    return tuple((scale.id, scale.scale) for scale in map(_Scale.from_json, value))


def check_scales(info: EngineInfo, scales: Iterable[tuple[int, float]]) -> None:
    """Raise NotSupportedError if ``scales`` are not the model's. An adapter that they omit gets 0.

    None at all change nothing, as in llama-server.
    """
    requested = dict(scales)
    if not requested:
        return
    own = {number: scale for number, (_, scale) in enumerate(info.lora)}
    if all(requested.get(number, 0.0) == scale for number, scale in own.items()):
        return
    scales_text = ", ".join(f"{number} has {scale:g}" for number, scale in own.items())
    raise NotSupportedError(
        f"adapters keep their scales while the server runs ({scales_text}): 'lora' must list "
        "them so"
    )
