"""Settings with which batches of any width agree to four digits and more, on any CPU: rows in f32
as the weights.

With f16, which of two tokens is likelier now and then depends on the width of a batch, and on the
CPU.
"""

from __future__ import annotations

from typing import Any

F32_ROWS: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
"""Settings of a model; flash attention computes with f16."""
