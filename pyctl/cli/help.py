"""Text of --help: the flags that matter with two examples, one section, or everything."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping

from pyctl.errors import ConfigError
from pyctl.settings.setting import Flag, Section

__all__ = ["help_text"]

_WIDTH = 80
_COLUMN = 26

_EXAMPLES = {
    "serve": (
        "pyctl serve -m Qwen3.6-27B-Q4_K_M.gguf",
        "pyctl serve -hf USER/MODEL:Q4_K_M --host 0.0.0.0 --api-key SECRET",
    ),
    "launch": (
        "pyctl launch claude",
        "pyctl launch codex -m Qwen3.6-27B-Q4_K_M.gguf -- exec 'Explain this project.'",
    ),
    "chat": (
        "pyctl chat -m Qwen3.6-27B-Q4_K_M.gguf",
        "pyctl chat --url http://localhost:8080 -p 'What is a prefix cache?'",
    ),
}

_ESSENTIAL = {
    "serve": """-m -hf -c -np -ngl --n-cpu-moe -ctk -ctv --cache-ram --kv-cache --kv-cache-dir
        --kv-cache-budget --exact --spec-type --mmproj --reasoning --host --port --api-key --open
        --metrics -lv""",
    "launch": """--url --dry-run -m -hf -c -np -ngl -ctk -ctv --cache-ram --kv-cache-dir
        --spec-type --mmproj --port --api-key""",
    "chat": """-m -hf --url --api-key -p -sys -c -ngl --n-cpu-moe -ctk -ctv --cache-ram --kv-cache
        --kv-cache-dir --spec-type --mmproj -n --temp --reasoning --stats -lv""",
}
"""The flags that ``--help`` without a topic shows, by command."""


def help_text(
    command: str, usage: str, sections: Mapping[Section, Iterable[Flag]], topic: str = ""
) -> str:
    """Return the help of ``command`` on ``topic``: a section, a part of a flag, a word of its text,
    ``all``, or "" for the essentials.

    ConfigError if nothing has that name.
    """
    if not topic:
        return _essentials(command, usage, sections)
    shown = {section: list(flags) for section, flags in sections.items()}
    if topic != "all":
        chosen = {section: flags for section, flags in shown.items() if topic in section.title}
        name = topic.lstrip("-")
        shown = (
            chosen
            or _matching(shown, lambda flag: any(name in each for each in flag.spellings()))
            or _matching(shown, lambda flag: topic in flag.help)
        )
    if not shown:
        raise ConfigError(f"--help: no section or flag {topic!r}; sections: {_titles(sections)}")
    lines = [f"usage: {usage}"] if topic == "all" else []
    for section, flags in shown.items():
        lines += [
            "",
            f"{section.title}:",
            *(line for flag in flags for line in _described(flag, with_default=True)),
        ]
    return "\n".join(lines).lstrip("\n") + "\n"


def _matching(
    sections: Mapping[Section, list[Flag]], is_shown: Callable[[Flag], bool]
) -> dict[Section, list[Flag]]:
    """Return the flags for which ``is_shown`` is true, and the sections that have some."""
    found = {
        section: [flag for flag in flags if is_shown(flag)] for section, flags in sections.items()
    }
    return {section: flags for section, flags in found.items() if flags}


def _essentials(command: str, usage: str, sections: Mapping[Section, Iterable[Flag]]) -> str:
    """Return the text of --help without a topic: usage, examples and the most important flags."""
    by_spelling = {
        name: flag for flags in sections.values() for flag in flags for name in flag.spellings()
    }
    flags = (by_spelling[name] for name in _ESSENTIAL[command].split() if name in by_spelling)
    lines = [
        f"usage: {usage}",
        "",
        "examples:",
        *(f"  {example}" for example in _EXAMPLES[command]),
        "",
        "flags:",
    ]
    lines += [line for flag in flags for line in _described(flag, with_default=False)]
    more = (
        f"pyctl {command} --help TOPIC shows more: all, a word of a flag, or a section: "
        f"{_titles(sections)}."
    )
    return "\n".join([*lines, "", *textwrap.wrap(more, _WIDTH - 1)]) + "\n"


def _titles(sections: Iterable[Section]) -> str:
    return ", ".join(section.title for section in sections)


def _described(flag: Flag, *, with_default: bool) -> list[str]:
    """Return the lines about ``flag``: all spellings, default and variable; without defaults, its
    first two spellings.
    """
    names = flag.spellings() if with_default else flag.names.split()[:2]
    text = flag.help
    if (
        flag.default
        and (flag.off or flag.convert)
        and (with_default or flag.default not in ("off", "-1"))
    ):
        text += f" (default: {flag.default})"
    if with_default and flag.env:
        text += f" [{flag.env}]"
    body = textwrap.wrap(text, _WIDTH - 1 - _COLUMN, break_long_words=False, break_on_hyphens=False)
    head = ", ".join(names) + (f" {flag.metavar}" if flag.convert else "")
    if len(head) <= _COLUMN - 4:
        return [f"  {head:<{_COLUMN - 2}}{body[0]}", *(" " * _COLUMN + line for line in body[1:])]
    return [f"  {head}", *(" " * _COLUMN + line for line in body)]
