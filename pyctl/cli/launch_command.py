"""`pyctl launch`: runs an installed program on a server, which is started for it if none runs."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import FrameType
from urllib.parse import urlsplit

from pyctl.cli.arguments import CommandSettings, parse_launch
from pyctl.cli.command_parser import did_you_mean
from pyctl.cli.programs import NO_KEY, PROGRAMS, ClientProgram, Endpoint, LaunchSettings
from pyctl.cli.signals import handled
from pyctl.errors import ConfigError
from pyctl.text import one_line

__all__ = ["run_launch"]


@dataclass(frozen=True)
class Invocation:
    """The command to run, its whole environment, and the differences from pyctl's own."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    added: Mapping[str, str]
    removed: tuple[str, ...]


def run_launch(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    find: Callable[[str, str], Endpoint | None] | None = None,
) -> int:
    """Run the program that ``argv`` starts with; return its exit code, 128 + N after signal N.

    Words after "--" are its arguments. ``find`` returns the server that answers at an address,
    given its key; by default it connects there. Raises ConfigError if the program or the server
    cannot be started.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    ours = argv[:end]
    theirs = argv[end + 1 :]
    if not ours or ours[0] in ("-h", "--help"):
        print(
            "usage: pyctl launch PROGRAM [flags of pyctl serve] [-- arguments of the "
            "program]\n\nprograms:"
        )
        print("".join(f"  {name:<12}{program.install}\n" for name, program in PROGRAMS.items()))
        print("pyctl launch PROGRAM --help lists the flags.")
        return 0 if ours else 2
    name = ours[0]
    flags = ours[1:]
    if (program := PROGRAMS.get(name)) is None:
        hint = did_you_mean(name, PROGRAMS) or f"; the programs are {', '.join(PROGRAMS)}"
        raise ConfigError(f"unknown program: {name!r}{hint}")
    settings, own = parse_launch(name, flags, environ)
    if shutil.which(name, path=environ.get("PATH")) is None and not own.dry_run:
        raise ConfigError(f"{name} is not installed: {_install_hint(program, environ)}")
    with ExitStack() as stack:
        endpoint = _endpoint(settings, own, flags, stack, find)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyctl-launch-")))
        invocation = build_invocation(name, endpoint, theirs, environ, directory)
        if own.dry_run:
            _show(invocation, program, endpoint, directory)
            return 0
        return _run(invocation)


def _install_hint(program: ClientProgram, environ: Mapping[str, str]) -> str:
    """Return the command that installs the program, and the one before it on a fresh machine, which
    has no npm or pipx either.
    """
    installer = program.install.partition(" ")[0]
    if shutil.which(installer, path=environ.get("PATH")) is not None:
        return program.install
    return f"{program.install} (before that: sudo apt install {installer})"


def _endpoint(
    settings: CommandSettings,
    own: LaunchSettings,
    flags: Sequence[str],
    stack: ExitStack,
    find: Callable[[str, str], Endpoint | None] | None,
) -> Endpoint:
    """Return the server that was named, or runs, or is started and ends with ``stack``."""
    # Only now: --help and mistakes need no HTTP client.
    from pyctl.cli.launched_server import find_server, server_address, started_server

    key = settings.server.api_keys[0] if settings.server.api_keys else ""
    url = own.url.removesuffix("/v1") or server_address(settings)
    endpoint = (find or find_server)(url, key)
    if endpoint is None and own.url:
        raise ConfigError(f"neither pyctl nor llama-server answers at {url}")
    if endpoint is not None:
        model_path = settings.model.path
        served = endpoint.model_path
        if model_path and served and os.path.realpath(model_path) != os.path.realpath(served):
            message = "leave -m out to use it, stop it, or choose another --port"
            raise ConfigError(f"{url} serves {one_line(served)}; {message}")
        if idle := [
            flag for flag in own.server_flags if own.url or flag != "--port"
        ]:  # which chose this server
            print(f"pyctl: {url} runs already; without effect: {', '.join(idle)}", file=sys.stderr)
    elif own.dry_run:
        model = (
            *settings.model.alias,
            Path(settings.model.path).name or settings.hub.hf_repo or "MODEL",
        )[0]
        server = shlex.join(["pyctl", "serve", *(flag for flag in flags if flag != "--dry-run")])
        print(f"# no server answers at {url}; this starts: {server}")
        if not settings.model.n_ctx:
            print("# the size of the context, 0 below, is known when the server is ready")
        return Endpoint(url, key or NO_KEY, model, settings.model.n_ctx)
    return endpoint or stack.enter_context(started_server(settings, own, flags, key))


def build_invocation(
    name: str, to: Endpoint, arguments: Sequence[str], environ: Mapping[str, str], directory: Path
) -> Invocation:
    """Return the command and environment of the program ``name``; its files are written to
    ``directory``.
    """
    program = PROGRAMS[name]
    command = [name, *program.arguments(to)]
    added = dict(program.environment(to))
    for number, (place, text) in enumerate(program.files(to).items()):
        path = directory / f"{number}.json"
        path.write_text(text, encoding="utf-8")
        if place.startswith("--"):
            command += [place, str(path)]
        else:
            added[place] = str(path)
    host = urlsplit(to.url).hostname or ""
    if host in ("127.0.0.1", "localhost", "::1"):  # no proxy reaches this machine's own addresses
        added |= {
            each: ",".join(filter(None, (environ.get(each), host)))
            for each in ("NO_PROXY", "no_proxy")
        }
    removed = tuple(each for each in environ if each.startswith(program.unset))
    inherited = {each: value for each, value in environ.items() if each not in removed}
    return Invocation((*command, *arguments), {**inherited, **added}, added, removed)


def _show(invocation: Invocation, program: ClientProgram, to: Endpoint, directory: Path) -> None:
    """Print the lines of a shell that would run the program."""
    for number, (name, text) in enumerate(program.files(to).items()):
        print(f"# {name} names a temporary file, here {directory / f'{number}.json'}: {text}")
    for name in invocation.removed:
        print(f"unset {name}")
    for name, value in invocation.added.items():
        print(f"export {name}={shlex.quote(value)}")
    print(shlex.join(invocation.command))


def _run(invocation: Invocation) -> int:
    """Run the program in the foreground, with this terminal; return its exit code."""
    process: Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def leave_to_program(number: int, _: FrameType | None) -> None:
        """Ignore signals that the terminal sends to the program as well. It is a handler, since the
        program would inherit SIG_IGN.
        """

    handlers = {signal.SIGINT: leave_to_program, signal.SIGQUIT: leave_to_program}
    handlers |= {signal.SIGTERM: pass_on, signal.SIGHUP: pass_on}
    with handled(handlers):
        try:
            process = Popen(invocation.command, env=dict(invocation.environment))
        except OSError as error:
            raise ConfigError(f"cannot start {invocation.command[0]}: {error.strerror}") from error
        while True:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            # Ctrl-Z in a program that stops itself alone: the shell gets the terminal back if this
            # process stops.
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(process.pid, signal.SIGCONT)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
