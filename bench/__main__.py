"""Run all benchmarks, one after the other; fail at the end if one of them failed.

python -m bench                      # the benches of `make bench`: about an hour
python -m bench --quick policy kv    # only these two, as a smoke test
python -m bench --keep               # tables to bench/results
python -m bench --llama-server FILE  # and llama-server: exact_replies, replay, real, rows
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from bench.common import parser_of
from pyctl.processes.module_command import module_command

SCRIPTS = (
    "exact",
    "exact_replies",
    "families",
    "kv",
    "held",
    "kill",
    "loops",
    "agent_edits",
    "controller",
    "draft_length",
    "policy",
    "store",
    "budgets",
    "schedule",
    "traces",
    "builds",
    "clients",
    "replay",
    "request_path",
    "prediction",
    "real",
    "rows",
    "soak",
    "simulate",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the scripts in separate processes, and print the seconds of each. SystemExit with the
    names of those that failed, after all have run.
    """
    parser = parser_of(__doc__)
    parser.add_argument(
        "scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(SCRIPTS)}; default: all"
    )
    parser.add_argument("--llama-server", metavar="FILE")
    options = parser.parse_args(argv)
    if unknown := set(options.scripts) - set(SCRIPTS):
        parser.error(f"no script {', '.join(sorted(unknown))}")
    failed = []
    for script in options.scripts or SCRIPTS:
        command = [
            *module_command(f"bench.{script}"),
            *["--quick"] * options.quick,
            *["--keep"] * options.keep,
        ]
        if script in ("exact_replies", "replay", "real", "rows") and options.llama_server:
            command += ["--llama-server", options.llama_server]
        began = time.monotonic()
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(script)
        print(f"{script}: {time.monotonic() - began:.0f} s\n", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
