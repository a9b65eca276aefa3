"""Recorded sessions of strangers on a simulated card: evaluated tokens against the floor, and the
seconds that people wait, by kind of request.

    python -m bench.traces --keep              # all 710 sessions, half an hour
    python -m bench.traces --sessions 20 --gib 16 --at-once 3

Engine, cache and policies are the real ones; the model is none (bench/simulated.py). Rows and
states have the bytes of a 27B with KV in q8_0, prompts, pauses and shared prefixes are recorded
(bench/traces/recording.py), and seconds are a published RTX 3090's (bench/gpu_seconds.py). The
floor of a request is its tokens less those that an earlier request of its session, or the reply to
it, had in the same places. Requests beyond the context are left out. Of a reply, 16 tokens are
generated; the rest counts as new in the next prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.common import SIMULATED, parse, parser_of, show
from bench.gpu_seconds import DEVICES
from bench.traces.household import Card, Household
from bench.traces.recording import read_sessions
from bench.traces.tables import WAITS, rows_by_kind, rows_by_reason, worst_rows
from tools.generator import QWEN36_27B

ROW_BYTES = 34_816
"""Bytes of a token's K and V in q8_0, of the 27B."""

N_CELLS = 131_072
"""Context of a card with 24 GB, within the 181,760 tokens that docs/24gb.md computes for q8_0."""

CARD = next(device for device in DEVICES if device.name.endswith("RTX 3090"))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of each budget: by kind of request, by reason, and the worst requests."""
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=0, help="the first so many, 0 = all")
    parser.add_argument("--at-once", type=int, default=3, help="sessions that take turns")
    parser.add_argument(
        "--gib", nargs="+", type=float, default=[16.0, 40.0], help="RAM for the prefix cache"
    )
    parser.add_argument("--cells", type=int, default=N_CELLS, help="tokens of context")
    options = parse(parser, argv, sessions=2, gib=[16.0])
    sessions = read_sessions()
    if options.sessions:
        sessions = sessions[: options.sessions]
    by_kind: list[list[object]] = []
    by_reason: list[list[object]] = []
    worst: list[list[object]] = []
    n_refused = 0
    for gib in options.gib:
        card = Card(CARD, options.cells, ROW_BYTES, QWEN36_27B.state_bytes, int(gib * 2**30))
        household = Household(card, sessions, options.at_once)
        served = list(household.run())
        n_refused = household.n_refused
        by_kind += [[f"{gib:g}", *row] for row in rows_by_kind(served)]
        by_reason += [[f"{gib:g}", *row] for row in rows_by_reason(served)]
        worst += [[f"{gib:g}", *row] for row in worst_rows(served)]
    title = f"{len(sessions)} recorded sessions, {options.at_once} at once"
    notes = [f"{n_refused:,} requests exceed {options.cells:,} tokens and are left out."]
    keep = "traces" if options.keep else ""
    waits = [f"below {seconds:g} s, %" for seconds in WAITS]
    columns = ["GiB", "kind", "requests", "prompt tokens", "floor", "evaluated", "ratio", *waits]
    show(title, columns, by_kind, keep=keep, notes=notes, weights=SIMULATED)
    columns = ["GiB", "why above the floor", "requests", "tokens above"]
    show(
        f"{title}: reasons",
        columns,
        by_reason,
        keep=f"{keep}-reasons" if keep else "",
        weights=SIMULATED,
    )
    columns = ["GiB", "session", "row", "kind", "prompt tokens", "floor", "evaluated", "why"]
    show(
        f"{title}: the worst",
        columns,
        worst,
        keep=f"{keep}-worst" if keep else "",
        weights=SIMULATED,
    )


if __name__ == "__main__":
    main()
