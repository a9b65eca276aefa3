"""Recorded sessions of coding agents: the lengths, times and shared prefixes of their prompts.

bench/recorded/agent-sessions.md names the source and the licence of the file. Its columns:

| column | meaning |
|---|---|
| trace | number of the session |
| stream | 0 for the main conversation, 1 and more for sub-agents in the order of their start |
| seconds | since the start of the session |
| think | seconds that the client waited before this request |
| prompt, reply | tokens |
| parent | row of the session, from 0, whose prompt shares the longest prefix; -1 for none |
| common | blocks of 64 tokens shared with that prompt |
| new | blocks that are not shared |
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from pyctl.cache.request_kind import RequestKind, kind_of_request

FILE = Path(__file__).resolve().parents[1] / "recorded" / "agent-sessions.tsv.xz"

BLOCK = 64
"""Tokens of a block, the unit in which the recording compares prompts."""

UNALIGNED_BLOCKS = 2
"""A prompt that shares all but this many of its parent's blocks continues it: the last block is
shared only if both prompts fill it.
"""


@dataclass(frozen=True)
class RecordedRequest:
    """A request of a session.

    Attributes:
        row: The number of the request in its session, from 0.
        stream: 0 for the main conversation, else the number of a sub-agent.
        think: Seconds that the client waited before it.
        n_prompt: Tokens of the prompt.
        n_reply: Tokens of the reply.
        parent: The row whose prompt shares the longest prefix; None without one.
        n_common: Tokens shared with the parent's prompt, in whole blocks.
        kind: How the request follows from earlier ones.
        seconds: Since the start of the session.
    """

    row: int
    stream: int
    think: float
    n_prompt: int
    n_reply: int
    parent: int | None
    n_common: int
    kind: RequestKind
    seconds: float = 0.0


@dataclass(frozen=True)
class Session:
    """The requests of one person's session, in the order of their start."""

    number: int
    requests: Sequence[RecordedRequest]

    @cached_property
    def cuts(self) -> Sequence[frozenset[int]]:
        """For each row, the token counts at which later prompts leave its prompt.

        Clients replace whole messages, so a message is assumed to start there.
        """
        cuts: list[set[int]] = [set() for _ in self.requests]
        for request in reversed(self.requests):
            if request.parent is None:
                continue
            if request.kind is not RequestKind.APPEND:
                cuts[request.parent].add(request.n_common)
            # The part that the prompt shares with its parent has the same messages in both.
            shared = {cut for cut in cuts[request.row] if cut <= request.n_common}
            cuts[request.parent] |= shared
        return [frozenset(each) for each in cuts]


def read_sessions(path: Path = FILE) -> list[Session]:
    """Return all sessions of the recording. Raises OSError, and ValueError for another format."""
    with lzma.open(path, "rt", encoding="ascii", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    sessions = groupby(rows, key=lambda row: int(row["trace"]))
    return [Session(number, list(_requests(list(group)))) for number, group in sessions]


def _requests(rows: Sequence[dict[str, str]]) -> Iterator[RecordedRequest]:
    """Yield the requests of the session in ``rows``; ValueError for a parent that comes later."""
    streams: set[int] = set()
    lengths: list[int] = []
    for number, row in enumerate(rows):
        parent = int(row["parent"]) if int(row["parent"]) >= 0 else None
        if parent is not None and parent >= number:
            raise ValueError(f"row {number} of session {row['trace']} has a later parent {parent}")
        stream = int(row["stream"])
        n_blocks = int(row["common"])
        n_prompt = int(row["prompt"])
        n_parent = lengths[parent] if parent is not None else 0
        yield RecordedRequest(
            row=number,
            stream=stream,
            think=float(row["think"]),
            n_prompt=n_prompt,
            n_reply=int(row["reply"]),
            parent=parent,
            n_common=min(n_blocks * BLOCK, n_prompt, n_parent),
            kind=_kind(
                row=number,
                is_new=stream not in streams,
                stream=stream,
                n_blocks=n_blocks,
                n_parent=n_parent,
            ),
            seconds=float(row["seconds"]),
        )
        streams.add(stream)
        lengths.append(n_prompt)


def _kind(*, row: int, is_new: bool, stream: int, n_blocks: int, n_parent: int) -> RequestKind:
    """Return the kind of a request; ``is_new`` for the first one of its stream.

    The names and their order are the server's. The server infers a sub-agent from the heads of
    prompts, where the recording has its stream; of a prompt that shares nothing with any other, the
    recording does not have the tools, so that one within the session counts as a side request. The
    server compares tokens, the recording blocks of 64.
    """
    opens_agent = is_new and stream > 0
    is_same = n_blocks > 0 and not opens_agent
    return kind_of_request(
        is_continued=is_same and n_blocks + UNALIGNED_BLOCKS >= n_parent // BLOCK,
        is_same_conversation=is_same,
        is_main=row == 0 and not opens_agent,
        has_tools=opens_agent,
    )
