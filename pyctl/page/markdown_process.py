"""A process that renders Markdown, so that a text that takes forever delays no request and can be ended."""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from html import escape
from typing import IO

from pyctl.limit import limit
from pyctl.module_process import start_module

__all__ = ["MOST_TEXTS", "MOST_TEXT_BYTES", "MarkdownProcess"]

MOST_TEXTS = limit(64, "texts of POST /page/markdown", "400", "request")
MOST_TEXT_BYTES = limit(256 << 10, "one text of POST /page/markdown", "shown as plain text", "request", "bytes")

_SECONDS = limit(2.0, "time to render one of these texts", "shown as plain text", "request", "seconds")
_ALL_SECONDS = limit(
    6.0, "time to render all texts of POST /page/markdown", "the others are shown as plain text", "request", "seconds"
)
_MEMORY = limit(1 << 30, "memory of the process that renders Markdown", "shown as plain text", "process", "bytes")
_START_SECONDS = 20.0
_IDLE_SECONDS = 300.0
_SIZE = struct.Struct("<I")


def plain_html(text: str) -> str:
    """``text`` as it is, for what cannot be rendered."""
    return f'<p class="plain">{escape(text)}</p>\n'


class MarkdownProcess:
    """Renders in a process of its own, which starts with the first text and goes when there was none for minutes.

    Any thread; one text at a time.
    """

    def __init__(self, seconds: float = _SECONDS, all_seconds: float = _ALL_SECONDS) -> None:
        self._seconds, self._all_seconds = seconds, all_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, texts: Iterable[str]) -> list[str]:
        """The HTML of each, as `html_of` makes it; what is too long or takes too long stays as it is."""
        with self._lock:
            end = time.monotonic() + self._all_seconds
            return [self._render(text, end) for text in texts]

    def close(self) -> None:
        """End the process; the next text starts another."""
        with self._lock:
            self._end()

    def _render(self, text: str, end: float) -> str:
        body = text.encode("utf-8", "replace")
        seconds = min(self._seconds, end - time.monotonic())
        if len(body) > MOST_TEXT_BYTES or seconds <= 0:
            return plain_html(text)
        try:
            return self._ask(self._running(), body, seconds)
        except (OSError, TimeoutError):
            self._end()
            return plain_html(text)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = start_module(__name__)
            self._ask(self._process, b"", _START_SECONDS)
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], body: bytes, seconds: float) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_SIZE.pack(len(body)) + body)
        process.stdin.flush()
        end = time.monotonic() + seconds
        (size,) = _SIZE.unpack(_read(process.stdout, _SIZE.size, end))
        return _read(process.stdout, size, end).decode()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()


def _read(pipe: IO[bytes], size: int, end: float) -> bytes:
    """``size`` bytes; TimeoutError if they are not there at ``end``, OSError if they never come."""
    found = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while len(found) < size:
        if not poll.poll(max(end - time.monotonic(), 0.0) * 1e3):
            raise TimeoutError
        part = os.read(pipe.fileno(), size - len(found))
        if not part:
            raise BrokenPipeError("the process has ended")
        found += part
    return bytes(found)


def _main() -> None:
    """Answer until no text has come for some time."""
    import resource

    from pyctl.page.markdown import html_of

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the server ends by itself
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.nice(5)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    poll = select.poll()
    poll.register(source, select.POLLIN)
    html_of("```python\nx\n```")  # the first takes longest
    while poll.poll(_IDLE_SECONDS * 1e3):
        head = source.read(_SIZE.size)
        if len(head) < _SIZE.size:
            return
        text = source.read(_SIZE.unpack(head)[0]).decode()
        signal.alarm(int(_SECONDS) + 2)  # in case the server is gone
        try:
            body = html_of(text).encode("utf-8", "replace")
        except Exception:
            body = plain_html(text).encode("utf-8", "replace")
        signal.alarm(0)
        sink.write(_SIZE.pack(len(body)) + body)
        sink.flush()


if __name__ == "__main__":
    _main()
