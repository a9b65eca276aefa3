"""Settings of replies: the defaults of requests to one model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pyctl.cache.cache_settings import DiskSettings
from pyctl.engine.sampling import Sampling
from pyctl.settings.convert import choice, integer, tokens
from pyctl.settings.setting import CACHE, FORMAT, SAMPLING, SERVER

__all__ = ["REASONING_FORMATS", "ReplySettings"]

REASONING_FORMATS: dict[str, Literal["auto", "deepseek", "none"]] = {
    "auto": "auto",
    "none": "none",
    "deepseek": "deepseek",
    "deepseek-legacy": "deepseek",  # llama-server also treats both alike
}
"""Names that users and requests may use, with their meaning."""


@dataclass(frozen=True)
class ReplySettings:
    """The settings of replies of one model: defaults of requests.

    ``chosen`` are the fields of ``sampling`` that the user set; the model's file may set the
    others. ``n_batch`` bounds the text around the gap in /infill. ``disk_policy``, ``n_batch`` and
    ``embeddings`` are the settings of these names of the disk and the model.
    """

    sampling: Sampling = field(default_factory=Sampling)
    chosen: frozenset[str] = frozenset()
    n_predict: int = SAMPLING.flag(
        -1,
        "-n --predict --n-predict",
        "maximum tokens per reply, -1 = no limit",
        tokens(-1),
        "LLAMA_ARG_N_PREDICT",
    )
    cache_prompt: bool = CACHE.flag(
        True,
        "--cache-prompt",
        "resume prompts at snapshots",
        None,
        "LLAMA_ARG_CACHE_PROMPT",
        off="--no-cache-prompt",
    )
    warm_next: bool = CACHE.flag(
        True,
        "--prewarm --warm-next",
        "while idle, evaluate the part of the next prompt that the last reply determines",
        None,
        "PYCTL_WARM_NEXT",
        off="--no-prewarm --no-warm-next",
    )
    reasoning_format: str = FORMAT.flag(
        "auto",
        "--reasoning-format",
        f"field of the reasoning: {', '.join(REASONING_FORMATS)}",
        choice(*REASONING_FORMATS),
        "LLAMA_ARG_THINK",
        "FORMAT",
    )
    reasoning_budget: int = FORMAT.flag(
        -1,
        "--reasoning-budget",
        "maximum tokens of reasoning, -1 = no limit, 0 = none",
        tokens(-1),
        "LLAMA_ARG_THINK_BUDGET",
    )
    reasoning_budget_message: str = FORMAT.flag(
        "",
        "--reasoning-budget-message",
        "text that ends the reasoning when its budget is used up",
        str,
        "LLAMA_ARG_THINK_BUDGET_MESSAGE",
        "TEXT",
    )
    prefill_assistant: bool = SERVER.flag(
        True,
        "--prefill-assistant",
        "continue the last message if it is the assistant's",
        None,
        "LLAMA_ARG_PREFILL_ASSISTANT",
        off="--no-prefill-assistant",
    )
    spm_infill: bool = SERVER.flag(
        False, "--spm-infill", "/infill puts the suffix before the prefix"
    )
    embd_normalize: int = SERVER.flag(
        2,
        "--embd-normalize",
        "norm of embeddings: -1 none, 0 int16 range, 1 taxicab, 2 Euclidean, p the p-norm",
        integer(-1),
    )
    disk_policy: str = DiskSettings.disk_policy
    n_batch: int = 2048
    embeddings: bool = False
