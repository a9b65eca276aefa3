"""`pyctl worker`: lends the devices of this machine to a server on another one, which names it with
--rpc.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyctl.cli.command_parser import CommandParser
from pyctl.errors import ConfigError

if TYPE_CHECKING:
    from pyctl.llama.library.devices import Device

__all__ = ["run_worker"]

PORT = 50052
"""The port of llama.cpp's rpc-server."""

WARNING = """warning: {address} is open to other machines, and has neither a key nor
encryption: anyone who reaches it can read and change the memory of this process, and may run code
in it; open it to machines of your own only"""


def run_worker(argv: Sequence[str]) -> int:
    """Lend devices until a signal; return the exit code, 1 if ggml has ended it. Raises
    ConfigError.
    """
    arguments = _parser().parse_args(argv)
    if not 0 <= arguments.port < 2**16 or arguments.threads < 0:
        raise ConfigError("--port must be in [0, 65535] and --threads at least 0")
    try:
        host = socket.getaddrinfo(arguments.host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(
            f"--host {arguments.host}: {error.strerror or error}; an IPv4 address is needed"
        ) from error
    # Flags are read before the slow imports.
    from pyctl.llama.library.rpc import serve_devices

    devices = _chosen(arguments.device.split(",") if arguments.device else [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(0))  # the serving thread never ends
    n_threads = arguments.threads or max((os.cpu_count() or 1) // 2, 1)
    port, thread = serve_devices(str(host), arguments.port, devices, n_threads)
    if not ipaddress.ip_address(host).is_loopback:
        print(WARNING.format(address=f"{host}:{port}"), file=sys.stderr)
    names = ", ".join(f"{device.name} ({device.description})" for device in devices)
    print(
        f"worker at {host}:{port} lends {names} to one server at a time",
        file=sys.stderr,
        flush=True,
    )
    thread.join()
    return 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `pyctl worker`."""
    parser = CommandParser(
        prog="pyctl worker",
        description="Lend the devices of this machine to a server on another one: pyctl serve "
        "--rpc HOST:PORT. Both "
        "need the same release of pyctl. It serves one server at a time.",
    )
    parser.add_argument(
        "-H", "--host", default="127.0.0.1", help="IPv4 address to listen at (127.0.0.1)"
    )
    parser.add_argument(
        "-p", "--port", type=int, default=PORT, help=f"port, 0 = any free one ({PORT})"
    )
    parser.add_argument(
        "-d",
        "--device",
        default="",
        metavar="NAMES",
        help="devices to lend (all GPUs, else the CPU)",
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="threads of the CPU (half of them)",
    )
    return parser


def _chosen(names: Sequence[str]) -> list[Device]:
    """Return the devices called ``names``, by default all GPUs, else the CPU. Raises ConfigError
    for an unknown one.
    """
    from pyctl.llama.library.devices import devices

    by_name = {device.name: device for device in devices()}
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(f"--device: no device {unknown[0]}; found {', '.join(by_name)}")
    own = [by_name[name] for name in dict.fromkeys(names)] or [
        device for device in by_name.values() if device.is_gpu
    ]
    return own or list(by_name.values())
