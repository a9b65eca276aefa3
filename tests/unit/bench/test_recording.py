"""The recorded sessions: their sums, kinds of requests, and the places where prompts leave."""

from __future__ import annotations

import lzma
from collections import Counter
from pathlib import Path

import pytest

from bench.traces.recording import BLOCK, read_sessions
from pyctl.cache.request_kind import RequestKind

HEAD = "trace\tstream\tseconds\tthink\tprompt\treply\tparent\tcommon\tnew\n"


def recording(directory: Path, *rows: tuple[object, ...]) -> Path:
    """Write a recording of one session; each row is (stream, prompt, parent, common blocks)."""
    path = directory / "sessions.tsv.xz"
    lines = [
        f"1\t{stream}\t0\t2.5\t{prompt}\t10\t{parent}\t{common}\t0\n"
        for stream, prompt, parent, common in rows
    ]
    path.write_bytes(lzma.compress((HEAD + "".join(lines)).encode()))
    return path


def test_the_recording_has_the_sums_that_its_page_names() -> None:
    sessions = read_sessions()
    requests = [request for session in sessions for request in session.requests]
    assert len(sessions) == 710
    assert len(requests) == 49_334
    assert round(sum(request.n_prompt for request in requests) / 1e9, 2) == 6.04
    kinds = Counter(request.kind for request in requests)
    assert kinds == {
        RequestKind.FIRST: 710,
        RequestKind.SUB_AGENT: 63,
        RequestKind.SIDE_REQUEST: 44,
        RequestKind.APPEND: 47_514,
        RequestKind.REWRITE: 1_003,
    }


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ((0, 6400, -1, 0), RequestKind.SIDE_REQUEST),
        ((1, 6400, -1, 0), RequestKind.SUB_AGENT),
        ((1, 6400, 0, 90), RequestKind.SUB_AGENT),
        ((0, 7000, 0, 100), RequestKind.APPEND),
        ((0, 7000, 0, 98), RequestKind.APPEND),  # the last blocks of both are not full
        ((0, 7000, 0, 97), RequestKind.REWRITE),
        ((0, 7000, 0, 1), RequestKind.REWRITE),
    ],
)
def test_a_request_has_the_kind_of_its_shared_prefix(
    tmp_path: Path, row: tuple[int, int, int, int], kind: RequestKind
) -> None:
    (session,) = read_sessions(recording(tmp_path, (0, 6400, -1, 0), row))
    assert session.requests[0].kind is RequestKind.FIRST
    assert session.requests[1].kind is kind


def test_shared_tokens_are_never_more_than_either_prompt_has(tmp_path: Path) -> None:
    (session,) = read_sessions(recording(tmp_path, (0, 100, -1, 0), (0, 90, 0, 2)))
    assert session.requests[1].n_common == 90


def test_a_message_starts_where_a_later_prompt_leaves(tmp_path: Path) -> None:
    rows = ((0, 6400, -1, 0), (0, 9600, 0, 100), (0, 9600, 1, 50), (0, 9600, 1, 140))
    (session,) = read_sessions(recording(tmp_path, *rows))
    first, second, *_ = session.cuts
    assert first == {50 * BLOCK}, "a cut in the shared part is one of both prompts"
    assert second == {50 * BLOCK, 140 * BLOCK}


def test_a_parent_that_comes_later_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="later parent"):
        read_sessions(recording(tmp_path, (0, 100, 0, 1)))
