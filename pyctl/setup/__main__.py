"""python -m pyctl.setup: before an installation, whether this machine can compile it; silent if it can."""

from __future__ import annotations

import sys

from pyctl.setup.machine import look_at_machine
from pyctl.setup.plan import missing_packages

if missing := missing_packages(look_at_machine()):
    print(f"pyctl: error: {missing}", file=sys.stderr)
    sys.exit(2)
