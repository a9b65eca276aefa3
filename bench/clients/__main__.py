"""Claude Code and Codex in a session of several turns with tool calls, and every field they send.

    python -m bench.clients                # the programs of `make clients`: about 4 minutes
    python -m bench.clients --only codex

The server has a tiny model of random weights, whose calls are bound, so that the programs run their
tools. The second table has each field of the recorded requests once. It fails if pyctl would drop
one of them in silence, or if a request was not answered with 200.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.clients.programs import PROGRAMS
from bench.clients.session import Taken, take_turns
from bench.clients.session_tables import beta_line, field_rows, refusals, session_rows
from bench.common import parse, parser_of, show

SESSION = ("program", "version", "turn", "prompt", "cached", "evaluated")
FIELDS = ("program", "in", "read", "no effect")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sessions, print the tables, and return 1 if a field or a request was lost."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    options = parse(parser, argv)
    logging.getLogger("pyctl").setLevel(logging.ERROR)  # which warns of changed fields
    sessions: dict[str, tuple[Taken, ...]] = {}
    for name in options.only:
        if not PROGRAMS[name].version():
            print(f"{name} is not installed: make clients", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as directory:
            turns = 1 if options.quick else len(PROGRAMS[name].turns)
            sessions[name] = tuple(take_turns(name, Path(directory), turns))
    rows = [row for name, taken in sessions.items() for row in session_rows(name, taken)]
    keep = "client-sessions" if options.keep else ""
    show("Sessions of Claude Code and Codex", SESSION, rows, keep=keep, notes=beta_line(sessions))
    fields, unknown = field_rows(sessions)
    show("Fields of their requests", FIELDS, fields, keep=keep, is_first=False)
    refused = [each for taken in sessions.values() for each in refusals(taken)]
    for lost in (*unknown, *refused):
        print(lost, file=sys.stderr)
    return 1 if unknown or refused else 0


if __name__ == "__main__":
    sys.exit(main())
