"""The way of a chat request through the house gets no longer.

The ceilings may only be lowered, unless modules are parted by subject: then more of them are
entered, each for less.
"""

from __future__ import annotations

import os
import re
import subprocess

from pyctl.processes.module_command import module_command

STAYS = 147
MODULES = 43
"""Before the engine has the request."""


def test_a_request_enters_no_more_modules() -> None:
    command = module_command("bench.request_path")
    wide = os.environ | {"COLUMNS": "100"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=wide
    )
    found = re.search(r"stays +│ +(\d+) +│ +(\d+) +│", done.stdout)
    assert found is not None, done.stdout
    stays, n_modules = map(int, found.groups())
    assert stays <= STAYS
    assert n_modules <= MODULES
