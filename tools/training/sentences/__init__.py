"""The sentences of the dialogues, as text files: `[section]`, `field: one | another |`, and indented what goes on."""

from __future__ import annotations

from pathlib import Path

__all__ = ["sections"]


def sections(name: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """The fields of each section of a file; a `#` begins a comment."""
    result: dict[str, dict[str, str]] = {}
    field = ""
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            result[line[1:-1]] = {}
            continue
        fields = result[list(result)[-1]]
        if line.startswith(" "):
            fields[field] += line
        else:
            field, _, fields[field] = line.partition(":")
    return {
        section: {field: tuple(part.strip() for part in text.split("|")) for field, text in fields.items()}
        for section, fields in result.items()
    }
