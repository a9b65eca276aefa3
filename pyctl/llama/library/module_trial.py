"""Trials in separate processes, of which a file keeps the results: whether native modules fit the
libraries.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pyctl.files.atomic_file import make_private, read_regular, write_atomic
from pyctl.files.user_directory import user_directory
from pyctl.llama.library.trial_models import memory_classes
from pyctl.machine.environment import TRIAL
from pyctl.machine.libraries import MODULES
from pyctl.processes.module_command import module_command
from pyctl.processes.module_process import end_with_parent
from pyctl.settings.limit import limit

__all__ = [
    "NOT_TRIED",
    "STAMP",
    "TRY_AGAIN",
    "Kept",
    "reason_of_trial",
    "remembered",
    "run_trial",
    "try_modules",
]

STAMP = "trials.json"
"""The file with results: by the digest of libraries and modules, the reason against each module,
empty if it fits.
"""

TRIAL_SECONDS = limit(120.0, "trial of a native module", "the module is not used", "process", "s")
TRIAL_BYTES = limit(2**32, "memory of such a trial", "the module is not used", "process", "bytes")
"""A trial takes about a second and 150 MB, but sizes that a misfit reads can be anything."""

MAX_RESULTS = 16
MAX_REASON = 300
MAX_BYTES = 2**16
"""Sets of files with results, characters of a reason, and bytes of the file."""

HEAD_BYTES = 4096
"""The beginning of a library, where its build id is."""

NOT_TRIED = 75
"""The exit code of a trial that could not take place; sysexits.h has it for failures that pass."""

SHORTAGES = re.compile(
    rb"out of memory|(failed|unable) to allocate|cannot allocate|MemoryError", re.IGNORECASE
)
"""Words that llama.cpp, the dynamic linker or Python print if a card or the machine is full: such a
failure proves nothing either.
"""

TRY_AGAIN = "the next start tries again"
"""Follows the reason of a trial that could not take place."""

FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
"""Signals that prove nothing about a module."""

WITHOUT_CARDS = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Hides cards, which another program may have filled, and gives numpy one thread."""


def try_memory(core: Path, memory: str) -> str:
    """Return the reason against ``core`` for models of one class of memory as `reason_of_trial`."""
    return run_trial(core, memory=memory)


def run_trial(file: Path, seconds: float = TRIAL_SECONDS, memory: str = "") -> str:
    """Return the reason against a module as `reason_of_trial`; with ``memory`` for one class of
    memory only.
    """
    with tempfile.TemporaryDirectory(prefix="pyctl-") as place:
        return reason_of_trial(
            (Path(place), memory), {**WITHOUT_CARDS, TRIAL: str(file)}, seconds, TRIAL_BYTES
        )


def reason_of_trial(
    arguments: tuple[object, ...],
    environment: Mapping[str, str],
    seconds: float,
    maximum: int = resource.RLIM_INFINITY,
    command: Sequence[str] = (),
) -> str:
    """Run `pyctl.llama.trial`, or ``command``, with ``arguments`` and ``maximum`` bytes of memory,
    and return the reason why it fails.

    Empty if it does not; it may crash. Raises OSError if it lacks memory or room, TimeoutError if
    it lacks time, and InterruptedError if it is killed: none of these counts against the module or
    the settings.
    """
    with subprocess.Popen(
        command or module_command("pyctl.llama.trial"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "GGML_NO_BACKTRACE": "1",
            **environment,
        },  # a backtrace would come after the reason
        start_new_session=True,
        preexec_fn=partial(_restrict, maximum),
    ) as process:
        try:
            _, said = process.communicate(pickle.dumps(arguments), seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"its trial takes longer than {seconds:g} seconds") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return ""
    reason = _reason(said, process.returncode)
    if -process.returncode in FROM_OUTSIDE:
        raise InterruptedError(reason)
    if process.returncode == NOT_TRIED or SHORTAGES.search(said):
        raise OSError(reason)
    return reason


def _reason(said: bytes, returncode: int) -> str:
    """Why a process failed: the last line that it ``said``, or the signal that ended it."""
    if returncode < 0:
        return f"its trial ends with {signal.Signals(-returncode).name}"
    lines = said.decode("utf-8", "replace").split("\n")
    reason = next((line for line in reversed(lines) if line.strip()), f"exit code {returncode}")
    return " ".join(reason.split())[:MAX_REASON]


def _restrict(maximum: int) -> None:
    """Between fork and exec: bound the memory, leave no core dump, and end with the parent."""
    for kind, bound in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, maximum)):
        with suppress(OSError, ValueError):  # a lower limit is there already
            resource.setrlimit(kind, (bound, bound))
    end_with_parent(signal.SIGKILL)


def try_modules(
    core: Path,
    attempt: Callable[[Path], str] = run_trial,
    environ: Mapping[str, str] = os.environ,
    attempt_memory: Callable[[Path, str], str] = try_memory,
) -> dict[str, str]:
    """Return the reason against ``core`` and each module next to it with the loaded libraries,
    empty if it fits.

    If ``core`` fails, ``attempt_memory`` tries it with each class of memory. One class that passes
    is enough; then the result has the reasons against the other classes, by their names.

    ``attempt`` returns the reason against a module's file. If it raises OSError, as without room
    for the models, the next call tries again. Each reason ends with how to try again. Processes
    that come at the same time may each try.
    """
    beside = {
        name: core.with_name(core.name.replace(MODULES[0], name)) for name in MODULES
    }  # of the same Python
    files = {name: file for name, file in beside.items() if file.exists()}
    reasons: dict[str, str] = {}

    def attempt_all() -> dict[str, str]:
        for name, file in files.items():
            if not reasons.get(MODULES[0]):  # the others need it
                reasons[name] = attempt(file)
            if name == MODULES[0] and reasons[name]:
                classes = {memory: attempt_memory(file, memory) for memory in memory_classes()}
                if "" in classes.values():
                    reasons[name] = ""
                    reasons.update({memory: reason for memory, reason in classes.items() if reason})
        return reasons

    try:
        digest = _digest([*loaded_libraries(), *files.values()])
        kept = remembered(STAMP, digest, attempt_all, [core.parent], environ)
    except OSError as error:
        return {**dict.fromkeys(files, f"it cannot be tried: {error}; {TRY_AGAIN}"), **reasons}
    return {name: kept.explain(reason) for name, reason in kept.results.items()}


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> list[Path]:
    """Return the files of llama.cpp and ggml in this process."""
    mapped = {line.partition("/")[2] for line in os.fsdecode(maps.read_bytes()).splitlines()}
    return sorted(
        Path("/", path)
        for path in mapped
        if re.fullmatch(r"(.*/)?lib(llama|ggml)[^/]*\.so[^/]*", path)
    )


def _digest(files: list[Path]) -> str:
    """Return a digest of names, sizes, times and build ids: not of directories and fractions of
    seconds, which differ between an image of a container and its copies.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(
                f"{path.name} {status.st_size} {int(status.st_mtime)} ".encode()
                + file.read(HEAD_BYTES)
            )
    return digest.hexdigest()


class Kept(NamedTuple):
    """The results of trials, and the file that keeps them.

    Attributes:
        results: The results.
        file: The file, None if no file could be written.
    """

    results: dict[str, str]
    file: Path | None

    def explain(self, reason: str) -> str:
        """Return ``reason`` with how to try again; empty if there is none."""
        if not reason:
            return ""
        return (
            f"{reason}; {TRY_AGAIN if self.file is None else f'to try again, remove {self.file}'}"
        )


def remembered(
    name: str,
    key: str,
    attempt: Callable[[], dict[str, str]],
    directories: Sequence[Path] = (),
    environ: Mapping[str, str] = os.environ,
) -> Kept:
    """Return the results for ``key`` in the file ``name`` of ``directories`` or the user's cache
    directory.

    Else the results of ``attempt``, kept in the first of these files that can be written, for all
    users. Errors of ``attempt`` are not kept.
    """
    places = [directory / name for directory in directories]
    with suppress(RuntimeError):  # a user without a home directory
        places.append(user_directory("cache", environ) / name)
    for place in places:
        if key in (known := _results_in(place)):
            return Kept(known[key], place)
    found = attempt()
    for place in places:
        with suppress(OSError):
            make_private(place.parent)
            kept = list({**_results_in(place), key: found}.items())[-MAX_RESULTS:]
            write_atomic(place, json.dumps(dict(kept), indent=1).encode() + b"\n")
            place.chmod(0o644)
            return Kept(found, place)
    return Kept(found, None)


def _results_in(place: Path) -> dict[str, dict[str, str]]:
    """Return the results in a file; none if it is missing or damaged."""
    try:
        stored = json.loads(read_regular(place, MAX_BYTES))
        is_whole = all(
            isinstance(text, str)
            for found in stored.values()
            for text in (*found.keys(), *found.values())
        )
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return stored if is_whole else {}
