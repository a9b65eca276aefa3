"""`pyctl worker` without a client: its flags."""

from __future__ import annotations

import re

import pytest

from pyctl.cli.worker_command import run_worker
from pyctl.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "65536"], "--port must be in [0, 65535]"),
        (["--threads", "-1"], "--threads at least 0"),
        (["--host", "::1"], "--host ::1: "),
        (["--device", "CPU,TPU"], "--device: no device TPU; found CPU"),
        (["--model", "x"], "unrecognized arguments: --model x"),
    ],
)
def test_flags_that_do_not_work(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_worker(flags)
