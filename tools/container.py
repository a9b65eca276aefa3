"""The instructions of Containerfile, for the tests that read them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONTAINERFILE", "Instruction", "stages", "words_of"]

CONTAINERFILE = Path(__file__).resolve().parents[1] / "Containerfile"


@dataclass(frozen=True)
class Instruction:
    """An instruction: its name in capitals, its flags (``--from=build``), and the rest of the
    line.
    """

    name: str
    flags: Mapping[str, tuple[str, ...]]
    text: str


def stages(text: str) -> list[list[Instruction]]:
    """Return the instructions before the first stage, then each stage's, FROM first."""
    found: list[list[Instruction]] = [[]]
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace(
        "\\\n", " "
    )
    for line in filter(None, map(str.strip, lines.splitlines())):
        name, _, rest = line.partition(" ")
        flags: dict[str, tuple[str, ...]] = {}
        while match := re.match(r"\s*--([\w-]+)=(\S+)", rest):
            flags[match[1]] = (*flags.get(match[1], ()), match[2])
            rest = rest[match.end() :]
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, flags, rest.strip()))
    return found


def words_of(instruction: Instruction) -> list[str]:
    """Return the words of an instruction in JSON's form (ENTRYPOINT, HEALTHCHECK CMD, VOLUME) or
    separated by blanks.
    """
    text = instruction.text.removeprefix("CMD ")
    return list(json.loads(text)) if text.startswith("[") else shlex.split(text)
