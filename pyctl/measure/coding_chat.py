"""Conversations like a coding agent's: a client's messages that carry source files, pyctl's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pyctl.measure.client import Messages

__all__ = ["FOLLOW_UPS", "coding_chat", "source_text", "turn"]

FILE_CHARS = 3000
"""Characters of source text in one message."""

FOLLOW_UPS = (
    "Rename the first function of the last file, and write the file again with the new name.",
    "Write a test for the last function that you have read.",
    "Which of these functions can fail, and how?",
    "What is the first file about?",
)


@cache
def source_text() -> str:
    """Return the source of the package, in the order of file names."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return "".join(path.read_text(encoding="utf-8") for path in files)


def coding_chat(name: str, n_chars: int) -> Messages:
    """Return messages of about ``n_chars`` characters, the last one a user's; the first words
    differ for each ``name``.
    """
    messages = [
        {"role": "system", "content": f"Project {name}. You are a programmer and answer with code."}
    ]
    for number, part in enumerate(_parts(name, n_chars), 1):
        if number > 1:
            messages.append({"role": "assistant", "content": f"I have read file {number - 1}."})
        messages.append(
            {"role": "user", "content": f"File {number} of {name}:\n{part}\nIs it complete?"}
        )
    return messages


def turn(messages: Messages, reply: str, question: str) -> Messages:
    """Return ``messages``, a reply and the user's next message."""
    return [
        *messages,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": question},
    ]


def _parts(name: str, n_chars: int) -> Iterator[str]:
    text = source_text()
    start = sum(name.encode()) * 7919 % len(text)
    endless = itertools.islice(itertools.cycle(text), start, None)
    for first in range(0, max(n_chars, 1), FILE_CHARS):
        yield "".join(itertools.islice(endless, min(FILE_CHARS, n_chars - first)))
