"""The command `pyctl`: reads the settings, builds the objects, runs them; nothing else uses
concrete classes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

__all__ = ["main"]

USAGE = """usage: pyctl COMMAND [flags]

commands:
  serve    answer llama-server's HTTP API
  chat     talk in the terminal, to a model here or with --url to a server
  launch   run Claude Code, Codex, OpenCode or another program on a server
  service  print a systemd unit
  setup    build llama.cpp for this machine's NVIDIA card
  worker   lend this machine's devices to a server on another one (--rpc)
  models   list local models, and whether they fit this machine
  cache    list and change a cache directory: ls, verify, prune, pin, unpin, rm
  verify   evaluate replies of a server again, and compare their bits
  doctor   name faults and slow settings of this machine, with fixes
  completion  let bash or zsh complete commands, flags, values and files
  bench    measure this machine with a model: first tokens, replies, exactness

pyctl COMMAND --help lists the flags; pyctl --version prints the version.
"""

OWN_FLAGS = {
    "launch": "launch_command:run_launch",
    "service": "service_command:run_service",
    "setup": "setup_command:run_setup",
    "models": "models_command:run_models",
    "cache": "cache_command:run_cache",
    "verify": "verify_command:run_verify",
    "doctor": "doctor_command:run_doctor",
    "bench": "bench_command:run_bench",
    "worker": "worker_command:run_worker",
    "completion": "completion_command:run_completion",
}
"""Module and function of each command that parses its own flags."""

COMMANDS = ("serve", "chat", *OWN_FLAGS)

INSTEAD = {
    "run": "; pyctl chat -m FILE talks to a model, pyctl serve -m FILE serves it",
    "pull": "; pyctl serve -hf USER/MODEL fetches a model and serves it",
    "list": "; pyctl models lists local models",
    "ls": "; pyctl models lists local models, pyctl cache ls the snapshots",
    "ps": "; pyctl cache ls lists the snapshots, GET /api/ps of a server the loaded models",
    "show": "; pyctl models lists local models",
}
"""Commands of ollama, and pyctl's instead."""

SWITCH_SECONDS = 0.0005


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0, 1 after a failure, 2 when it cannot start as
    requested.
    """
    argv = sys.argv[1:] if argv is None else argv
    # The engine's thread needs the interpreter several times a token; no thread may hold it for 5
    # ms.
    sys.setswitchinterval(SWITCH_SECONDS)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] in ("-V", "--version", "version"):
        from pyctl.cli.version import print_version

        print_version()
        return 0
    from pyctl.errors import ConfigError
    from pyctl.text import clean

    try:
        if argv[0] not in COMMANDS:
            from pyctl.cli.command_parser import did_you_mean

            what = (
                "flags come after a command, not before it"
                if argv[0].startswith("-")
                else "unknown command"
            )
            hint = INSTEAD.get(argv[0]) or did_you_mean(argv[0], COMMANDS)
            hint = hint or f"; the commands are {', '.join(COMMANDS)}"
            raise ConfigError(f"{what}: {argv[0]!r}{hint}")
        return _run(argv[0], argv[1:])
    except ConfigError as error:
        # Hubs, model files and templates contribute to these.
        print(f"pyctl: error: {clean(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(command: str, argv: Sequence[str]) -> int:
    """Run ``command`` with its arguments; return the exit code.

    The imports are in the order of their cost: a wrong flag is refused before anything heavy is
    loaded, and the environment is set before the libraries that read it.
    """
    # Help and mistakes end in the parsing, before the slow imports.
    if command in OWN_FLAGS:
        return _function(OWN_FLAGS[command])(argv)
    from pyctl.cli.import_block import without_collections

    with without_collections():
        from pyctl.cli.arguments import parse_chat, parse_serve

    settings = parse_serve(argv) if command == "serve" else parse_chat(argv)
    from pyctl.engine.openmp import limit_spinning
    from pyctl.machine.environment import USE_EXTENSION

    # Before the libraries load, which read it. Parts of layers on the CPU wait for the others on a
    # GPU.
    os.environ[USE_EXTENSION] = "on" if settings.model.extension else "off"
    limit_spinning(settings.model.poll, waits_for_gpu=bool(settings.model.placements))
    if settings.action != "run":
        return _answer(settings.action, settings.model.workers)
    if command == "serve":
        with without_collections():
            run_serve = _function("serve_command:run_serve")
        return run_serve(settings, argv)
    from pyctl.cli.chat_command import chat

    return chat(settings)


def _function(name: str) -> Callable[..., int]:
    """Return the function that runs a command; ``name`` is ``module:function`` of this package."""
    module, function = name.split(":")
    run: Callable[..., int] = getattr(import_module(f"pyctl.cli.{module}"), function)
    return run


def _answer(action: str, workers: Sequence[str]) -> int:
    """Print the requested list: of devices, with the ``workers``'."""
    if action == "models":
        from pyctl.model_files.hub_cache import cached_files
        from pyctl.text import one_line

        for name in cached_files():
            print(one_line(name))
        return 0
    from pyctl.llama.library.devices import devices
    from pyctl.llama.library.rpc import connect_workers

    connect_workers(workers)
    for device in devices():
        memory = (
            f" ({device.total // 2**20} MiB, {(device.free or 0) // 2**20} MiB free)"
            if device.total
            else ""
        )
        print(f"{device.name}: {device.description}{memory}")
    return 0
