"""The findings that `pyctl serve` logs at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.cli.arguments import parse_serve
from pyctl.cli.doctor_command import cuda_version, log_findings
from tests.unit.doctor.machines import GIB, desktop

SWAPPED = "MemTotal: 67108864 kB\nSwapTotal: 8388608 kB\nSwapFree: 1048576 kB\n"


def test_serve_logs_the_two_worst_findings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {
        "proc/meminfo": SWAPPED,
        "proc/sys/vm/overcommit_memory": "2",
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "proc/self/mountinfo": None,  # unknown
    }
    desktop(tmp_path, files)
    log_findings(
        parse_serve(["--kv-cache-dir", str(tmp_path), "--cache-ram", "8192"], {}), tmp_path
    )
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert texts[0].endswith("; to fix it: sudo sysctl vm.overcommit_memory=0")
    assert texts[1].startswith("this container may use 4.0 GiB")


def test_serve_logs_nothing_on_a_good_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desktop(tmp_path)
    log_findings(parse_serve([], {}), tmp_path)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("content", "version"), [(b"..libcudart.so.13\0..", 13), (b"nothing", 0), (b"", 0), (None, 0)]
)
def test_the_cuda_version_of_a_library(tmp_path: Path, content: bytes | None, version: int) -> None:
    library = tmp_path / "libggml-cuda.so"
    if content is not None:
        library.write_bytes(content)
    assert cuda_version(library) == version
