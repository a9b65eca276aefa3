"""A process that renders Markdown, so that a text that takes forever delays no request and can be
ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from html import escape

from pyctl.processes.module_process import start_module
from pyctl.settings.limit import limit

__all__ = ["MAX_TEXTS", "MAX_TEXT_BYTES", "MarkdownProcess"]

MAX_TEXTS = limit(64, "texts of POST /page/markdown", "400", "request")
MAX_TEXT_BYTES = limit(
    256 << 10, "one text of POST /page/markdown", "shown as plain text", "request", "bytes"
)

_SECONDS = limit(2.0, "time to render one of these texts", "shown as plain text", "request", "s")
_ALL_SECONDS = limit(
    6.0,
    "time to render all texts of POST /page/markdown",
    "the others are shown as plain text",
    "request",
    "s",
)
_MEMORY = limit(
    1 << 30,
    "memory of the process that renders Markdown",
    "shown as plain text",
    "process",
    "bytes",
)
_START_SECONDS = 20.0
_IDLE_SECONDS = 300


def plain_html(text: str) -> str:
    """Return the HTML of ``text`` as it is written, for text that cannot be rendered."""
    return f'<p class="plain">{escape(text)}</p>\n'


class MarkdownProcess:
    """A renderer in a separate process, which starts with the first text and ends when there was
    none for minutes.

    Any thread; one text at a time.
    """

    def __init__(self, seconds: float = _SECONDS, all_seconds: float = _ALL_SECONDS) -> None:
        self.seconds = seconds
        self.all_seconds = all_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it does not run."""
        return self._process.pid if self._process is not None else None

    def render(self, texts: Iterable[str]) -> list[str]:
        """Return the HTML of each, as `to_html` makes it; texts that are too long or take too long
        stay unchanged.
        """
        with self._lock:
            end = time.monotonic() + self.all_seconds
            return [self._render(text, end) for text in texts]

    def close(self) -> None:
        """End the process; the next text starts another."""
        with self._lock:
            self._end()

    def _render(self, text: str, end: float) -> str:
        body = text.encode("utf-8", "replace")
        seconds = min(self.seconds, end - time.monotonic())
        if len(body) > MAX_TEXT_BYTES or seconds <= 0:
            return plain_html(text)
        try:
            return self._ask(self._running(), body.decode(), seconds)
        except (OSError, TimeoutError):
            self._end()
            return plain_html(text)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = start_module(__name__)
            self._ask(self._process, "", _START_SECONDS)
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], text: str, seconds: float) -> str:
        """Send and receive a line of JSON. Raises TimeoutError if no answer starts in time, OSError
        if it never ends.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(text).encode() + b"\n")
        process.stdin.flush()
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(seconds * 1e3):
            raise TimeoutError
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise BrokenPipeError("the process has ended")
        return str(json.loads(line))

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.communicate()  # closes the pipes


def _main() -> None:
    """Answer until no text arrives for some time."""
    import resource

    from pyctl.page.markdown import to_html

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the server ends by itself
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.nice(5)
    to_html("```python\nx\n```")  # the first takes longest
    signal.alarm(_IDLE_SECONDS)
    for line in sys.stdin.buffer:
        signal.alarm(int(_SECONDS) + 2)  # in case the server is gone
        html = plain_html(json.loads(line))
        with suppress(Exception):
            html = to_html(json.loads(line))
        sys.stdout.write(json.dumps(html) + "\n")
        sys.stdout.flush()
        signal.alarm(_IDLE_SECONDS)


if __name__ == "__main__":
    _main()
