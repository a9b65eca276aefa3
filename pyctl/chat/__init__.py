"""Conversations as text and tokens. Their settings: how messages become text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyctl.settings.convert import choice, json_object
from pyctl.settings.setting import FORMAT

__all__ = ["CHATML", "FormatSettings", "keep_reasoning"]


def keep_reasoning(keep: bool) -> dict[str, bool]:
    """Return the variables of templates that keep, or drop, the reasoning of earlier turns."""
    return {
        "preserve_thinking": keep,
        "clear_thinking": not keep,
        "truncate_history_thinking": not keep,
    }


CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def jinja_text(text: str) -> str:
    """Return ``text`` if it is Jinja text, or chatml. Raises ValueError for other names."""
    if text == "chatml":
        return CHATML
    if "{" not in text:
        raise ValueError(
            f"{text!r} is not a Jinja template. Of llama.cpp's names only chatml is supported: "
            "leave the flag out to use the file's own template, or pass a Jinja file as "
            "--chat-template-file"
        )
    return text


@dataclass(frozen=True)
class FormatSettings:
    """The settings that turn messages into text; an empty ``chat_template`` selects the model's
    own.
    """

    chat_template: str = FORMAT.flag(
        "",
        "--chat-template",
        "Jinja template in place of the model's, or chatml",
        jinja_text,
        "LLAMA_ARG_CHAT_TEMPLATE",
        "TEXT",
    )
    template_kwargs: Mapping[str, Any] = FORMAT.flag(
        {},
        "--chat-template-kwargs",
        "values for the template",
        json_object,
        "LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        "JSON",
    )
    prompt_replay: str = FORMAT.flag(
        "equal",
        "--prompt-replay",
        "use the sampled tokens of earlier replies in prompts: equal (if the client's message has "
        "the "
        "same meaning), full (also if it lacks the reasoning) or off",
        choice("equal", "full", "off"),
        "PYCTL_PROMPT_REPLAY",
        "MODE",
    )
