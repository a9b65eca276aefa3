"""`pyctl serve` with settings laid over those of the command line: child.py '{"server": {"metrics": true}}' FLAGS"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from pyctl import cli
from pyctl.config import ServeSettings


def main() -> int:
    changes, parse_serve = json.loads(sys.argv[1]), cli.parse_serve

    def parse(argv: Sequence[str]) -> ServeSettings:
        settings = parse_serve(argv)
        parts = {part: replace(getattr(settings, part), **values) for part, values in changes.items()}
        return replace(settings, **parts)

    cli.parse_serve = parse
    return cli.main(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
