"""JSON bodies."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

__all__ = ["JsonResponse", "encode"]

encode = msgspec.json.Encoder().encode
"""Any plain value to JSON bytes; infinities become null."""


class JsonResponse(Response):
    """A JSON body under llama-server's content type."""

    media_type = "application/json; charset=utf-8"

    def render(self, content: Any) -> bytes:
        return encode(content)
