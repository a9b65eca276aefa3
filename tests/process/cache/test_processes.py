"""Real processes: killed in the middle of writing, and several on one directory."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.snapshot import PromptMatch, Snapshot
from pyctl.disk.file_format import PROMPTS, RULES
from pyctl.disk.recent_files import RecentFiles
from pyctl.prompt import Prompt
from tests.unit.disk.making import DirectStore, check_directory, check_read, conversation
from tests.unit.engine.drive import tier_on
from tests.waiting import until

Opener = Callable[..., DirectStore]

BUDGET = 60_000
N_CONVERSATIONS = 12
ROUNDS = int(os.environ.get("PYCTL_KILL_ROUNDS", "20"))
"""More for a stress test."""

SPAWN = multiprocessing.get_context("spawn")


def all_snapshots(first: int = 0) -> list[Snapshot]:
    return [
        made
        for seed in range(first, first + N_CONVERSATIONS)
        for made in conversation(seed, turns=4, step=40)
    ]


def write_for_ever(directory: str, seed: int, written: ctypes.c_int) -> None:
    """Write all of it in turn, removing some, until killed; ``written`` says how much, and is -1
    before.
    """
    store = DirectStore(Path(directory), "model", BUDGET)
    store.directory.recover()
    choice = random.Random(seed)
    made = all_snapshots()
    written.value = 0
    while True:
        for each in choice.sample(made, len(made)):
            written.value += store.write(each) > 0
            store.touch(each.prefix)
            if choice.random() < 0.1:
                store.directory.remove(each.prefix.name)


def check_all(store: DirectStore) -> int:
    """Check that every entry of the index reads back equal; return their number."""
    there = [each for each in all_snapshots() if store.contains(each.prefix)]
    for each in there:
        check_read(store, each)
    assert store.damaged == 0
    check_directory(store)
    return len(there)


IN_A_CONTAINER = """
import os, sys, time
from pathlib import Path
from tests.unit.disk.making import DirectStore
from tests.unit.disk.making import conversation

def slow(descriptor):
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)

os.fsync = slow
store = DirectStore(Path(sys.argv[1]), "model", None)
print(store.write(conversation(3)[-1]))
"""


def may_make_namespaces() -> bool:
    try:
        return (
            subprocess.run(
                ["unshare", "-pf", "true"], stderr=subprocess.DEVNULL, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


@pytest.mark.skipif(not may_make_namespaces(), reason="no right to make namespaces")
def test_two_containers_share_a_volume(tmp_path: Path, open_store: Opener) -> None:
    """Recovery leaves the temporary file of a writer in another namespace of process ids alone: it
    cannot look the writer up there, and removing the file would lose the snapshot.
    """
    go = tmp_path / "go"
    command = [
        "unshare",
        "-pf",
        sys.executable,
        "-c",
        IN_A_CONTAINER,
        str(tmp_path / "cache"),
        str(go),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        until(lambda: list(tmp_path.rglob("*.tmp")))
        store = open_store(directory=tmp_path / "cache")
        store.directory.recover()
        go.touch()
        written, _ = child.communicate(timeout=120)
    assert int(written) > 0
    store.directory.refresh()
    check_read(store, conversation(3)[-1])


def start(
    target: Callable[..., None], directory: Path, number: int, done: ctypes.c_int
) -> multiprocessing.process.BaseProcess:
    child = SPAWN.Process(target=target, args=(str(directory), number, done), daemon=True)
    child.start()
    return child


def wait_until(done: ctypes.c_int, n: int) -> None:
    """Wait until a child has done ``n``. It counts without a lock, which it could be killed
    with.
    """
    until(lambda: done.value >= n, every=0.001)


def kill(child: multiprocessing.process.BaseProcess) -> None:
    assert child.pid is not None
    child.kill()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    child.close()


def test_reads_while_recovering_and_writing(open_store: Opener) -> None:
    """A read beside writes and a recovery in other threads finds the right bytes or nothing; every
    entry that stays is readable.
    """
    made = all_snapshots()
    store = open_store(budget=BUDGET)
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [
            guarded(lambda: [store.write(each) for each in made]),
            guarded(lambda: [store.directory.recover() for _ in range(20)]),
            guarded(lambda: [store.touch(each.prefix) for each in made]),
        ]
        while any(thread.is_alive() for thread in threads):
            for each in made:
                found = store.read(each.prefix, each.last_tokens(each.n))
                assert (
                    found is None
                    or found.state.recurrent.tobytes() == each.state.recurrent.tobytes()
                )
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert check_all(store) > 0


def serve_for_ever(directory: str, first: int, served: ctypes.c_int) -> None:
    """Store one conversation after the other in the disk tier, with replies beside it, until
    killed; ``served`` counts the prompts, and is -1 before.
    """
    tier = tier_on(
        Path(directory),
        "model",
        DiskPolicy("auto"),
        budget=BUDGET,
        min_tokens=1,
        cold_max=0,
        text_of=lambda tokens: str(list(tokens)),
    )
    served.value = 0
    while True:
        for made in all_snapshots(first):
            prompt = Prompt.from_ids(made.last_tokens(made.n))
            tier.recent.add(prompt)
            tier.write(made)
            tier.flush(30)
            tier.find(PromptMatch(prompt.tokens), made.n)
            served.value += 1


def test_a_killed_tier_leaves_nothing_that_stays(tmp_path: Path) -> None:
    """After a kill at any moment the directory is consistent, within its budget, and without
    temporary files; the index counts every byte. A kill loses one label at most.
    """
    choice = random.Random(1)
    found = []
    for number in range(max(ROUNDS // 4, 3)):
        served = SPAWN.RawValue(ctypes.c_int, -1)
        child = start(serve_for_ever, tmp_path, number, served)
        wait_until(served, choice.randrange(2, 12))
        time.sleep(choice.uniform(0.0, 0.1))  # so that it is somewhere within the next one
        kill(child)
        store = DirectStore(tmp_path, "model", BUDGET)
        report = store.directory.recover()
        assert not report.foreign
        assert store.directory.verify().is_consistent
        assert not list(tmp_path.rglob("*.tmp"))
        n_bytes = store.directory.n_bytes
        assert n_bytes <= BUDGET, (
            n_bytes,
            store.directory.auxiliary_bytes(),
            len(store.directory.entries()),
            report,
        )
        size = sum(
            path.stat().st_size
            for path in tmp_path.rglob("*")
            if path.is_file() and path.parent != tmp_path and path.name != RULES
        )
        assert size == store.directory.n_bytes, "prompts count, too"
        recent = RecentFiles(store.home / PROMPTS).load()
        assert all(len(one.prompt) % 40 == 0 for one in recent)
        labels = [entry.label for entry in store.directory.entries()]
        found.append((len(recent), len(labels)))
        # One kill between the renaming of a file and the entry in the index loses one label.
        assert sum(not label.startswith("[") for label in labels) <= number + 1
        store.close()
    assert max(n for n, _ in found) > 0
    assert max(n for _, n in found) > 0


LOOK = """
import sys
from pathlib import Path
from pyctl.disk.directory import CacheDirectory

directory = CacheDirectory(Path(sys.argv[1]))
if sys.argv[2] == "verify":
    print(directory.verify().is_consistent)
elif sys.argv[2] == "prune":
    directory.prune(10**9)
print(len(directory.entries()))
directory.close()
"""


def look(directory: Path, what: str = "ls") -> list[str]:
    command = [sys.executable, "-c", LOOK, str(directory), what]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    ).stdout.split()


def lost_files() -> list[str]:
    """Return files that this process has open, and that are gone."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(descriptor))
    return [name for name in found if "index.sqlite3" in name and name.endswith(" (deleted)")]


@pytest.mark.parametrize("what", ["ls", "verify", "prune"])
def test_a_look_from_another_process_leaves_the_index_alone(
    open_store: Opener, tmp_path: Path, what: str
) -> None:
    directory = tmp_path / "cache"
    store = open_store(directory=directory)
    made = conversation(1, turns=6)
    for n, each in enumerate(made, 1):
        store.write(each)
        assert look(directory, what)[-1] == str(n)
        assert not lost_files()
    assert look(directory, "verify") == ["True", "6"]
    check_directory(store)


def test_two_processes_hold_one_budget_whoever_is_killed_or_looks(
    open_store: Opener, tmp_path: Path
) -> None:
    """Two writers of one directory stay within its budget together, and read no wrong bytes, while
    one of them is killed again and again and others list the directory.
    """
    directory = tmp_path / "cache"
    store = open_store(directory=directory, budget=BUDGET)
    for number in range(max(ROUNDS // 4, 4)):
        written = SPAWN.RawValue(ctypes.c_int, -1)
        child = start(write_for_ever, directory, number, written)
        wait_until(written, 2)
        for each in all_snapshots()[number % 4 :: 4]:
            store.write(each)
            found = store.read(each.prefix, each.last_tokens(each.n))
            assert (
                found is None or found.state.recurrent.tobytes() == each.state.recurrent.tobytes()
            )
            assert store.directory.n_bytes <= BUDGET
        look(directory)
        wait_until(written, 4)
        kill(child)
    assert not store.directory.recover().broken
    assert not lost_files()
    assert look(directory, "verify")[0] == "True"
    assert check_all(store) > 0
