"""The built-in tools that run a command, or report where it would run."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from pyctl.errors import RequestError
from pyctl.limit import limit
from pyctl.tools.files import ParameterError, ToolError, absolute, parameter

__all__ = ["SHELL_SECONDS", "exec_shell_command", "get_info"]

SHELL_SECONDS = limit(60, "a shell command of a model", "the command is killed", "process", "s")
_USUAL_SECONDS = 10
OUTPUT_BYTES = limit(16 << 10, "output of a shell command of a model", "truncated", "reply", "bytes")
_AFTER_SECONDS = 0.2
"""For the last output of a command that has ended: what it left running may hold the pipe for ever."""

_SECRET = ("LLAMA_API_KEY", "LLAMA_ARG_API_KEY")
"""Variables that commands do not see."""

OnChunk = Callable[[str], bool]
"""Gets output as it comes; returns whether to continue."""


def exec_shell_command(params: Mapping[str, Any], on_chunk: OnChunk | None = None) -> dict[str, Any]:
    """The output of a command and its exit code. The command and its children are killed after the time limit."""
    try:
        command = parameter(params, "command", str)
        seconds = min(max(parameter(params, "timeout", int, _USUAL_SECONDS), 1), SHELL_SECONDS)
        most = min(max(parameter(params, "max_output_size", int, OUTPUT_BYTES), 0), OUTPUT_BYTES)
        cwd = absolute(".", params.get("cwd", ""))
    except (ParameterError, ToolError) as error:
        raise RequestError(str(error)) from error
    if "\0" in command:
        return {"error": "a command cannot hold a zero byte"}
    try:
        process = subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={name: value for name, value in os.environ.items() if name not in _SECRET},
            start_new_session=True,
        )
    except OSError as error:
        return {"error": f"cannot run a command in {cwd}: {error.strerror}"}
    assert process.stdout is not None
    with process.stdout as pipe:
        try:
            output, ended = _output(process, pipe, seconds, most, on_chunk or (lambda text: True))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    end = f"\n[exit code: {process.returncode}]" + ("" if ended else " [exit due to timed out]")
    if on_chunk is not None:
        on_chunk(end)
    return {"plain_text_response": output + end}


def _output(
    process: subprocess.Popen[bytes], pipe: IO[bytes], seconds: float, most: int, on_chunk: OnChunk
) -> tuple[str, bool]:
    """The output, the first ``most`` bytes of it, and whether the command ended by itself."""
    # Incomplete characters at the end of a piece come with the next one.
    from codecs import getincrementaldecoder

    decoder, parts, left = getincrementaldecoder("utf-8")("replace"), list[str](), most
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if process.poll() is not None:
                end = min(end, time.monotonic() + _AFTER_SECONDS)
            if (rest := end - time.monotonic()) <= 0 and process.poll() is None:
                return "".join(parts), False
            if not selector.select(max(min(rest, 0.1), 0.0)):
                if process.poll() is not None:
                    return "".join(parts), True
                wanted = on_chunk("")
            else:
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(max(rest, 0.0))
                    return "".join(parts), process.poll() is not None
                text, is_cut = decoder.decode(data[:left]), 0 < left < len(data)
                left -= min(left, len(data))
                text += "\n[output truncated]" if is_cut else ""
                parts.append(text)
                wanted = on_chunk(text)
            if not wanted:
                return "".join(parts), True


def get_info(params: Mapping[str, Any]) -> dict[str, Any]:
    """The operating system and the directory that relative paths are in."""
    try:
        cwd = absolute(".", params.get("cwd", ""))
    except ToolError as error:
        raise RequestError(str(error)) from error
    return {"os": " ".join(os.uname()), "cwd": cwd}
