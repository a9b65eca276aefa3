"""A soak detects a server whose memory grows from one pause to the next."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bench.soak.findings import Findings
from bench.soak.target import Bounds, Pace, Target

SERVER = """
import sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

def grow():
    kept = []
    while True:
        kept.append(bytearray(int(sys.argv[1])))
        time.sleep(0.01)

threading.Thread(target=grow, daemon=True).start()
HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
"""


class Clock:
    """A clock on which only sleeping takes time: a machine that is busy makes no life shorter."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self._now += seconds


@pytest.mark.parametrize(("n_bytes", "is_wrong"), [(0, False), (2**20, True)])
def test_memory_at_rest(tmp_path: Path, n_bytes: int, is_wrong: bool) -> None:
    clock = Clock()
    pace = Pace(clock, clock.sleep, rest_seconds=0.1, busy_seconds=1.0)
    findings = Findings()
    bounds = Bounds(growth_mib=4, resident_mib=0)
    command = [sys.executable, "-c", SERVER, str(n_bytes)]
    watched = Target(command, tmp_path, findings, bounds, pace)
    watched.live("long", 3, "kill", [])
    assert [text for text in findings.violations if "MiB resident" in text] == findings.violations
    assert bool(findings.violations) == is_wrong
    assert str(watched.rows[0][4]).count(",") == 1, "two rests"
