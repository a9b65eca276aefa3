"""What the machine is, and what a process takes of its memory."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

__all__ = ["available_mib", "describe", "resident_mib", "storage_reads", "vram_mib"]

REPOSITORY = Path(__file__).resolve().parents[2]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe() -> dict[str, str]:
    """Devices, driver, versions and build, as the tables show them."""
    from pyctl.engine.llama.library import build_version

    fields = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    gpu = [part.strip() for part in _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader").split(",")]
    cuda = next((part for part in _output("nvidia-smi").split("|") if "CUDA Version" in part), "")
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].partition(": ")[2] if models else platform.processor()
    memory = Path("/proc/meminfo").read_text().split()[1]
    found = {
        "GPU": f"{gpu[0]}, {gpu[2]}, PCIe {gpu[3]} x{gpu[4]}" if len(gpu) == 5 else "none",
        "driver": f"{gpu[1]}, {' '.join(cuda.split()[-3:])}" if len(gpu) == 5 else "none",
        "CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "RAM": f"{int(memory) / 2**20:.0f} GiB",
        "system": f"Linux {platform.release()}, Python {platform.python_version()}",
        "build": build_version(),
        "commit": _output("git", "rev-parse", "--short", "HEAD") or _head(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    return {name: value for name, value in found.items() if value}


def _head() -> str:
    """A copy of the tree without git may name its commit in HEAD.txt."""
    try:
        return (REPOSITORY / "HEAD.txt").read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        return ""


def vram_mib() -> float | None:
    """MiB in use on all GPUs; None without one."""
    lines = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()
    return sum(float(line) for line in lines) if lines else None


def resident_mib(pid: int) -> float:
    """MiB of RAM that the process holds, shared pages of the model file left out."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return (sizes["RssAnon"] + sizes["RssShmem"]) / 1024


def available_mib() -> float:
    """MiB that could be had without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:"))


def storage_reads(pid: int) -> int:
    """Bytes that the process had fetched from storage, not from the page cache."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
