"""Each flag of llama-server is one of pyctl, with a decision where the default reads differently.

`LLAMA_SERVER=/path/to/llama-server`, as `make contract` sets it, compares with that program.
"""

from __future__ import annotations

import os
import re

import pytest

from tools.peer_flags import (
    PAGE,
    Comparison,
    PeerFlag,
    compare,
    decisions,
    help_of,
    name_of,
    parse_help,
    recorded,
    undecided,
    written,
)

HELP = """----- some params -----

-a,    --alpha, --first N               number of things ('x' or 'y', default: 3, 0 = no limit)
                                        (env: LLAMA_ARG_ALPHA)
--beta, --no-beta                       whether to do it (default: enabled)
-g FNAME                                a file with --alpha in its text
"""
"""A text in the form of llama-server's --help."""


def test_flags_have_all_names_and_the_default() -> None:
    assert parse_help(HELP) == [
        PeerFlag(("-a", "--alpha", "--first"), "3, 0 = no limit"),
        PeerFlag(("--beta", "--no-beta"), "enabled"),
        PeerFlag(("-g",), ""),
    ]


@pytest.mark.parametrize(
    ("names", "default", "verdict"),
    [
        (("--port",), "8080", "same"),
        (("--port",), "9931", "differs"),
        (("--prio",), "0", "ignored"),
        (("-dr", "--docker-repo"), "", "refused"),
        (("--never-heard-of",), "", "unknown"),
    ],
)
def test_each_kind_of_flag_has_its_verdict(
    names: tuple[str, ...], default: str, verdict: str
) -> None:
    (comparison,) = compare([PeerFlag(names, default)])
    assert comparison.verdict == verdict


def test_a_flag_without_a_decision_is_named() -> None:
    port = Comparison(PeerFlag(("--port",), "9931"), "differs", "8080")
    unknown = Comparison(PeerFlag(("--never-heard-of",), ""), "unknown")
    assert [line.split("\t")[0] for line in undecided([port, unknown])] == [
        "--port",
        "--never-heard-of",
    ]


def test_decisions_are_about_pyctl_as_it_is() -> None:
    """The default that a decision has for pyctl is that of --help; each other default has a
    reason.
    """
    peer = [PeerFlag((name,), each.theirs) for name, each in decisions().items()]
    found = {name_of(each.flag): each.ours for each in compare(peer)}
    assert {name: each.ours for name, each in decisions().items()} == found
    assert all(each.reason for each in decisions().values())


def test_sentences_of_llama_server_are_not_recorded() -> None:
    assert recorded("8192, -1 for no limit") == "8192"
    assert re.fullmatch("#[0-9a-f]{8}", recorded("as another flag"))


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "run python -m tools.peer_flags --write"


def test_each_flag_of_llama_server_has_a_decision() -> None:
    program = os.environ.get("LLAMA_SERVER", "")
    if not program:
        pytest.skip("LLAMA_SERVER names no llama-server")
    compared = compare(parse_help(help_of(program)))
    assert len(compared) > 200
    assert list(undecided(compared)) == []
