"""Results of trials of native modules: how long they hold, and where they are kept."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pyctl.llama.library.module_trial import (
    MAX_RESULTS,
    NOT_TRIED,
    STAMP,
    loaded_libraries,
    reason_of_trial,
    try_modules,
)
from pyctl.llama.library.trial_models import memory_classes


class Trials:
    """Stands for processes: ``reasons`` by module, or "!" where a trial cannot take place."""

    def __init__(self, directory: Path) -> None:
        self.package = directory / "package"
        self.cache = directory / "cache"
        self.package.mkdir()
        for name in ("_core", "_drafts", "_pool"):
            (self.package / f"{name}.abi.so").write_bytes(b"module")
        self.reasons: dict[str, str] = {}
        self.tried: list[str] = []

    def attempt(self, file: Path) -> str:
        name = file.name.partition(".")[0]
        self.tried.append(name)
        if self.reasons.get(name) == "!":
            raise OSError("no room")
        return self.reasons.get(name, "")

    def attempt_memory(self, file: Path, memory: str) -> str:
        assert file.name.startswith("_core")
        return self.reasons.get(memory, self.reasons["_core"])

    def start(self) -> tuple[dict[str, str], list[str]]:
        """Return the modules that a start finds, and those that it tries."""
        self.tried = []
        environ = {"XDG_CACHE_HOME": str(self.cache)}
        found = try_modules(
            self.package / "_core.abi.so", self.attempt, environ, self.attempt_memory
        )
        return found, self.tried


@pytest.fixture
def trials(tmp_path: Path) -> Trials:
    return Trials(tmp_path)


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b".")


def test_each_module_is_tried_once_for_the_files_of_an_installation(trials: Trials) -> None:
    """Results of trials hold as long as the files of the installation are the same, wherever it is
    moved, and a changed library or module starts all trials anew. A failure names the file to
    remove.
    """
    trials.reasons["_pool"] = "other bits"
    again = f"; to try again, remove {trials.package / STAMP}"
    found = {"_core": "", "_drafts": "", "_pool": f"other bits{again}"}
    assert trials.start() == (found, ["_core", "_drafts", "_pool"])
    assert trials.start() == (found, [])
    trials.package = trials.package.rename(trials.package.with_name("elsewhere"))
    found["_pool"] = f"other bits; to try again, remove {trials.package / STAMP}"
    assert trials.start() == (found, [])
    change(trials.package / "_drafts.abi.so")
    assert trials.start() == (found, ["_core", "_drafts", "_pool"])
    os.utime(trials.package / "_core.abi.so", (1.0, 1.0))
    trials.reasons["_core"] = "its trial ends with SIGSEGV"
    (reason,), tried = trials.start()[0].values(), trials.tried
    assert reason.partition(";")[0] == "its trial ends with SIGSEGV"
    assert tried == ["_core"]
    assert trials.start()[1] == []
    assert not trials.cache.exists()


def test_what_could_not_be_tried_is_tried_again(trials: Trials) -> None:
    trials.reasons["_drafts"] = "!"
    reason = "it cannot be tried: no room; the next start tries again"
    for _ in range(2):
        assert trials.start() == (
            {"_core": "", "_drafts": reason, "_pool": reason},
            ["_core", "_drafts"],
        )
    trials.reasons.clear()
    assert trials.start()[0] == {"_core": "", "_drafts": "", "_pool": ""}


@pytest.mark.parametrize(
    ("code", "is_shortage"),
    [
        (f"raise SystemExit({NOT_TRIED})", True),
        ("print('CUDA error: out of memory', file=sys.stderr, flush=True); os.abort()", True),
        ("raise MemoryError", True),
        ("time.sleep(600)", True),
        ("os.kill(os.getpid(), 9)", True),
        ("raise SystemExit('a restored sequence has other bits')", False),
        ("os.kill(os.getpid(), 11)", False),
    ],
)
def test_a_shortage_is_no_reason_against_a_module(code: str, is_shortage: bool) -> None:
    """It raises OSError, so nothing is kept."""
    command = [sys.executable, "-I", "-c", f"import os, sys, time; sys.stdin.buffer.read(); {code}"]
    seconds = 0.5 if "sleep" in code else 60.0
    if not is_shortage:
        assert reason_of_trial((), {}, seconds, command=command)
        return
    with pytest.raises(
        OSError, match=r"memory|MemoryError|exit code 75|takes longer|SIG(ABRT|KILL)"
    ):
        reason_of_trial((), {}, seconds, command=command)


@pytest.mark.parametrize(
    "content",
    [b"", b"no JSON", b"[]", b'{"a": 1}', b'{"a": {"_core": 1}}', b"[" * 2**15, b"{" * 2**17],
)
def test_a_damaged_file_is_as_none(content: bytes, trials: Trials) -> None:
    (trials.package / STAMP).write_bytes(content)
    assert len(trials.start()[1]) == 3
    assert trials.start()[1] == []


def test_where_modules_cannot_be_written_the_user_has_a_file(trials: Trials) -> None:
    (trials.package / STAMP).mkdir()  # root may write everywhere else
    assert len(trials.start()[1]) == 3
    assert trials.start()[1] == []
    assert json.loads((trials.cache / "pyctl" / STAMP).read_bytes())


def test_the_file_stays_small(trials: Trials) -> None:
    for _ in range(MAX_RESULTS + 3):
        change(trials.package / "_core.abi.so")
        trials.start()
    assert len(json.loads((trials.package / STAMP).read_bytes())) == MAX_RESULTS
    assert trials.start()[1] == []


def test_libraries_are_those_that_the_process_has(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    names = (
        "/opt/a b/libllama.so.0.5.0",
        "/opt/libggml-cpu.so",
        "/lib/libc.so.6",
        "/opt/libllama.so.0.5.0/notes",
        "[heap]",
    )
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 00:01 7   {name}\n" for name in names * 2))
    assert loaded_libraries(maps) == [
        Path("/opt/a b/libllama.so.0.5.0"),
        Path("/opt/libggml-cpu.so"),
    ]


def test_a_class_of_memory_that_fails_costs_only_itself(trials: Trials) -> None:
    classes = memory_classes()
    assert "llama_kv_cache_msa" in classes
    trials.reasons = {"_core": "other bits", **dict.fromkeys(classes, "")}
    trials.reasons["llama_kv_cache_msa"] = "its trial ends with SIGSEGV"
    again = f"; to try again, remove {trials.package / STAMP}"
    lost = {"llama_kv_cache_msa": f"its trial ends with SIGSEGV{again}"}
    found = {"_core": "", **lost, "_drafts": "", "_pool": ""}
    assert trials.start() == (found, ["_core", "_drafts", "_pool"])
    assert trials.start() == (found, [])
