"""A process for each call of a tool for files, so that no pattern and no directory exceeds the time limit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pyctl.errors import EngineError, RequestError
from pyctl.limit import limit
from pyctl.module_process import answer_of_module
from pyctl.tools.files import FILE_TOOLS, ParameterError, ToolError

__all__ = ["run_file_tool"]

_SECONDS = limit(15.0, "a call of a built-in tool for files", "an error as its result", "process", "s")
_MEMORY = limit(1 << 30, "memory of the process of a tool for files", "an error as its result", "process", "bytes")


def run_file_tool(name: str, params: Mapping[str, Any], seconds: float = _SECONDS) -> dict[str, Any]:
    """The result of the tool ``name`` of `FILE_TOOLS`, ``{"error": ...}`` if it failed; blocks up to ``seconds``.

    Raises RequestError for parameters of other types.
    """
    try:
        said = answer_of_module(__name__, json.dumps([name, params]).encode(), seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"{name} took longer than {seconds:g} s; ask for less"}
    try:
        kind, value = json.loads(said)
    except ValueError:
        return {"error": f"{name} needed more than {_MEMORY >> 20} MiB of memory, or failed; ask for less"}
    if kind == "parameter":
        raise RequestError(value)
    if kind == "failure":
        raise EngineError(f"{name} failed: {value}")
    return {"error": value} if kind == "error" else dict(value)


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.alarm(int(_SECONDS) + 5)  # in case the server is gone
    name, params = json.load(sys.stdin.buffer)
    said: list[Any]
    try:
        said = ["result", FILE_TOOLS[name](params)]
    except ToolError as error:
        said = ["error", str(error)]
    except ParameterError as error:
        said = ["parameter", str(error)]
    except MemoryError:
        said = ["error", f"{name} needed too much memory; ask for less"]
    except Exception as error:
        said = ["failure", f"{type(error).__name__}: {error}"]
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    _main()
