"""`pyctl worker`: lends the devices of this machine to a server on another one, which names it with --rpc."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyctl.cli.command_parser import CommandParser
from pyctl.cli.tensor_directory import BUDGET_MIB, LOOK_SECONDS, TensorDirectory
from pyctl.errors import ConfigError
from pyctl.user_directory import user_directory

if TYPE_CHECKING:
    from pyctl.llama import Device

__all__ = ["run_worker"]

PORT = 50052
"""That of llama.cpp's rpc-server."""

MIB = 2**20

WARNING = """warning: {address} is open to other machines, and has neither a key nor encryption: anyone who reaches it
can read and change the memory of this process, and may run code in it; open it to machines of your own only"""


def run_worker(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Lend devices until a signal; returns the exit code, 1 if ggml has ended it. Raises ConfigError."""
    arguments = _parser().parse_args(argv)
    if not 0 <= arguments.port < 2**16 or arguments.threads < 0 or arguments.cache_budget < 1:
        raise ConfigError("--port must be in [0, 65535], --threads at least 0 and --cache-budget at least 1")
    address = _address(arguments.host, arguments.port)
    tensors = None
    if arguments.cache is not None:
        directory = (
            Path(arguments.cache).expanduser() if arguments.cache else user_directory("cache", environ) / "worker"
        )
        tensors = TensorDirectory(directory, arguments.cache_budget * MIB)
    # Flags are read before what takes a while to import.
    from pyctl.llama import start_worker

    devices = _chosen(arguments.device.split(",") if arguments.device else [])
    n_threads = arguments.threads or max((os.cpu_count() or 1) // 2, 1)
    over, failed = threading.Event(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: over.set())

    def end() -> None:
        failed.set()
        over.set()
        threading.Event().wait()  # the thread that calls would abort the process

    port = start_worker(address, devices, n_threads, tensors.path if tensors is not None else None, end)
    bound = f"{address[0]}:{port}"
    if not ipaddress.ip_address(address[0]).is_loopback:
        print(WARNING.format(address=bound), file=sys.stderr)
    names = ", ".join(f"{device.name} ({device.description})" for device in devices)
    print(f"worker at {bound} lends {names} to one server at a time", file=sys.stderr, flush=True)
    while not over.wait(LOOK_SECONDS):
        if tensors is not None:
            with contextlib.suppress(OSError):  # it was removed; ggml then keeps nothing there
                tensors.look()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failed.is_set())  # the serving thread never ends


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pyctl worker",
        description="Lend the devices of this machine to a server on another one: pyctl serve --rpc HOST:PORT. Both "
        "need the same release of pyctl. It serves one server at a time.",
    )
    parser.add_argument("-H", "--host", default="127.0.0.1", help="IPv4 address to listen at (127.0.0.1)")
    parser.add_argument("-p", "--port", type=int, default=PORT, help=f"port, 0 = any free one ({PORT})")
    parser.add_argument("-d", "--device", default="", metavar="NAMES", help="devices to lend (all GPUs, else the CPU)")
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads of the CPU (half of them)")
    parser.add_argument(
        "-c", "--cache", nargs="?", const="", metavar="DIR", help="keep large tensors in DIR, so that loads send less"
    )
    parser.add_argument(
        "--cache-budget", type=int, default=BUDGET_MIB, metavar="MiB", help=f"size of that directory ({BUDGET_MIB})"
    )
    return parser


def _address(host: str, port: int) -> tuple[str, int]:
    """The IPv4 address of ``host``. Raises ConfigError."""
    try:
        return str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]), port
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}; an IPv4 address is needed") from error


def _chosen(names: Sequence[str]) -> list[Device]:
    """The devices called ``names``, by default all GPUs, else the CPU. Raises ConfigError for an unknown one."""
    from pyctl.llama import devices

    found = {device.name: device for device in devices()}
    if unknown := [name for name in names if name not in found]:
        raise ConfigError(f"--device: no device {unknown[0]}; found {', '.join(found)}")
    own = [found[name] for name in dict.fromkeys(names)] or [device for device in found.values() if device.is_gpu]
    return own or list(found.values())
