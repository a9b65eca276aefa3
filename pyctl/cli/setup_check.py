"""Tests of built libraries: versions, devices, modules, pinned memory, and a reply of the built-in
model.

Each check runs in a new process, since a process loads llama.cpp once.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.machine.libraries import EXTENSION, BuiltLibraries
from pyctl.processes.module_command import module_command

__all__ = ["check_libraries"]

PROMPT = "My name is Anna. What is my name?"

SECONDS = 600.0
"""A driver may compile or load for long at the first use of a card."""

PINNED_BYTES = 2**28
AHEAD_BYTES = 2**26


def check_libraries(built: BuiltLibraries, *, uses_gpu: bool) -> str:
    """Load the libraries of ``built`` and try the modules with them; return text about the result.

    Raises ConfigError if the libraries do not work, or modules that are not compiled for them do
    not fit.
    """
    if built.architectures and not uses_gpu:
        return "not checked: this machine has no NVIDIA driver, which the libraries need to load"
    directory = built.directory
    facts = json.loads(output_of(directory, "pyctl.cli.setup_check"))
    line = "\n".join([*facts["losses"], f"checked: {facts['version']}"])
    if facts["losses"] and not (directory / EXTENSION).exists():
        raise ConfigError(f"the new libraries do not work:\n{line}")
    reply = _reply(directory, "0")
    if not uses_gpu:
        return f"{line}, CPU"
    if not facts["gpus"]:
        raise ConfigError("the new libraries find no GPU")
    if not facts["is_pinned"]:
        raise ConfigError(
            "the new libraries cannot pin memory: cudaHostRegister is not visible in them"
        )
    on_gpu = _reply(directory, "all")
    if on_gpu != reply:
        raise ConfigError(
            f"the built-in model replies {on_gpu!r} on the GPU, but {reply!r} on the CPU"
        )
    return f"{line}, {', '.join(facts['gpus'])}; pinned memory; the same reply as on the CPU"


def _reply(directory: Path, layers: str) -> str:
    reply = output_of(
        directory, "pyctl", "chat", "-p", PROMPT, "--temp", "0", "-n", "12", "-ngl", layers
    ).strip()
    if not reply:
        raise ConfigError("the built-in model replies nothing")
    return reply


def output_of(directory: Path, module: str, *arguments: str) -> str:
    """Return the output of ``module`` with ``arguments`` on the libraries in ``directory``.

    Raises ConfigError if it fails.
    """
    environment = {
        **os.environ,
        "LLAMA_CPP_LIB_PATH": str(directory),
        "MTMD_CPP_LIB": str(directory),
    }
    shown = subprocess.run(
        [*module_command(module), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        env=environment,
        timeout=SECONDS,
        check=False,
    )
    if shown.returncode != 0:
        lines = shown.stderr.strip().splitlines()
        raise ConfigError(
            "the new libraries do not work:\n"
            + "\n".join(lines[-12:] or [f"exit {shown.returncode}"])
        )
    return shown.stdout


def main() -> None:
    """Print the facts of this process's libraries, and the devices that they find, as JSON."""
    from pyctl.llama.library.devices import devices
    from pyctl.llama.library.extension import build_version, core, describe_missing
    from pyctl.llama.library.native import HostBuffer

    gpus = [device.description for device in devices() if device.is_gpu]
    # Without the extension nothing pins memory.
    is_pinned = core is None or HostBuffer.open(PINNED_BYTES, AHEAD_BYTES)
    HostBuffer.stop()
    print(
        json.dumps(
            {
                "version": build_version(),
                "gpus": gpus,
                "is_pinned": is_pinned,
                "losses": list(describe_missing()),
            }
        )
    )


if __name__ == "__main__":
    main()
