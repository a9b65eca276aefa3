"""Servers that a replay starts, with tiny weights unless others are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.traces.chat_server import ChatServer
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tools.generator import TINY_FAT, TINY_HYBRID, cached_model

__all__ = [
    "LLAMA_SERVER",
    "MAX_CONTEXT",
    "PYCTL",
    "StartSettings",
    "Target",
    "command_of",
    "started",
]

PYCTL = "pyctl"
LLAMA_SERVER = "llama-server"

MAX_CONTEXT = 131_072
"""Recorded tokens of a prompt and its reply: a card with 24 GB has room for 181,760 of the 27B."""

SPARE_CONTEXT = 1.1
"""Tokens of context for each scaled one: short messages have at least a word and their tags."""

CHECKPOINT_SPACING = 8_192
"""Tokens between two checkpoints of llama-server, its default."""

FIELDS = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
"""Fields of the requests to servers that are started: replies have the recorded lengths, and no
reasoning, which some templates leave out of the history.
"""

LOAD_SECONDS = 600.0
"""Seconds for the start of a server."""


@dataclass(frozen=True)
class Target:
    """A server with the models under test.

    Attributes:
        name: The name in the tables.
        model: The model of the sessions.
        other_model: The model to switch to; None without one.
        restart: Ends the server and starts it again; None for one that runs elsewhere.
    """

    name: str
    model: ChatServer
    other_model: ChatServer | None = None
    restart: Callable[[], None] | None = None


@dataclass(frozen=True)
class StartSettings:
    """Settings of a server that is started.

    Attributes:
        scale: Tokens of the server for each recorded token.
        max_context: Recorded tokens of a prompt and its reply, which the context has room for.
        flags: More flags of the server.
        llama_server: The program of llama-server; empty if that is not started.
        file: The weights; None for tiny random ones with the 27B's ratio of state to rows.
        is_switched: True for a second model, of which the server loads one at a time.
        other_file: The weights of the second model; None for tiny random ones.
    """

    scale: float
    max_context: int = MAX_CONTEXT
    flags: str = ""
    llama_server: str = ""
    file: Path | None = None
    is_switched: bool = False
    other_file: Path | None = None


@contextmanager
def started(server: str, settings: StartSettings, directory: Path) -> Iterator[Target]:
    """Start ``server`` with its files in ``directory``, and stop it in the end. Raises OSError if
    it does not start.
    """
    files = [settings.file or cached_model(TINY_FAT, directory)]
    if settings.is_switched:
        files.append(settings.other_file or cached_model(TINY_HYBRID, directory))
    command = command_of(server, settings, files, directory)
    fields = FIELDS if server == LLAMA_SERVER else {**FIELDS, "return_cache": True}
    names = [each.stem if settings.is_switched else "" for each in files]
    log = directory / f"{server}.log"
    with ServerProcess(command, log, timeout=LOAD_SECONDS) as process:

        def restart() -> None:
            process.stop()
            process.start(process.port)

        models = [ChatServer(process.url, name, fields) for name in names]
        other_model = models[1] if settings.is_switched else None
        yield Target(server, models[0], other_model, restart)


def command_of(
    server: str, settings: StartSettings, files: Sequence[Path], directory: Path
) -> list[str]:
    """Return the command that starts ``server`` with one model, or with several of which it loads
    one at a time, from links in ``directory``.
    """
    n_ctx = round(settings.max_context * settings.scale * SPARE_CONTEXT)
    flags = ["-c", str(n_ctx), "--jinja", *settings.flags.split()]
    if len(files) == 1:
        flags += ["-m", str(files[0])]
    else:
        models = directory / "models"
        models.mkdir(exist_ok=True)
        for file in files:
            link = models / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
        flags += ["--models-dir", str(models), "--models-max", "1"]
    if server == PYCTL:
        return [*PYCTL_SERVE, *flags, "--kv-cache-dir", str(directory / "kv")]
    spacing = max(round(CHECKPOINT_SPACING * settings.scale), 1)
    return [settings.llama_server, *flags, "--checkpoint-min-step", str(spacing)]
