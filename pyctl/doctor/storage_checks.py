"""Checks of the model's files, and of the disk for the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

from pyctl.doctor.facts import Facts, existing
from pyctl.doctor.finding import Finding, slow, wrong
from pyctl.errors import ModelError

__all__ = [
    "cache_place",
    "cache_space",
    "chat_template",
    "memory_plan",
    "model_files",
    "model_place",
]

GIB = 2**30

SMALL = 10 * GIB
"""Free bytes of which the default cache, a tenth, is too small to be of use."""

NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "drvfs",
    "fuse.sshfs",
    "fuse.rclone",
    "ceph",
    "glusterfs",
    "lustre",
    "virtiofs",
)
"""File systems of another machine, or of the host of this one."""

IN_MEMORY = ("tmpfs", "ramfs")

HELP = "; to fix it: "
"""The text between a warning of a memory plan and its fix."""


def model_files(facts: Facts) -> list[Finding] | None:
    """Check that the model's files are whole: each tensor lies within its file."""
    if not facts.requested.model_files:
        return None
    findings = []
    for path in facts.requested.model_files:
        if not path.is_file():
            findings.append(
                wrong(f"no file {path}", "give the model's path (-m), or load all of its parts")
            )
            continue
        try:
            end = facts.llama.file(path)[0]
            size = path.stat().st_size
            text = f"{path.name} is cut off: {size:,} bytes of {end:,}" if end > size else ""
        except ModelError as error:
            text = str(error)
        if text:
            findings.append(
                wrong(
                    text, "give -m a GGUF file; download this one again (-hf) if it should be one"
                )
            )
    return findings


def chat_template(facts: Facts) -> list[Finding] | None:
    """Check that the model's file defines how a chat is written."""
    if not facts.requested.chats or not facts.requested.model_files or model_files(facts):
        return None
    if facts.llama.file(facts.requested.model_files[0])[1]:
        return []
    text = "the model has no chat template, so chats are written as ChatML, which may not suit it"
    return [
        wrong(text, "the version of it for chats (-it, -Instruct), or --chat-template-file FILE")
    ]


def model_place(facts: Facts) -> list[Finding] | None:
    """Check that the model is on a disk of this machine."""
    files = [path for path in facts.requested.model_files if path.is_file()]
    if not files:
        return None
    size = sum(path.stat().st_size for path in files)
    return _network(
        facts,
        files[0],
        f"the model of {size / GIB:.1f} GiB loads slowly",
        "copy the model to a local SSD",
    )


def cache_place(facts: Facts) -> list[Finding] | None:
    """Check that the cache directory is on a disk of this machine, which keeps files over a
    restart.
    """
    directory = facts.requested.cache_dir
    if directory is None:
        return None
    mount = facts.mount_of(directory)
    if mount.kind in IN_MEMORY:
        path = existing(directory)
        text = f"{path} is in RAM ({mount.kind}): a cache there does not outlive a reboot"
        return [wrong(text, "--kv-cache-dir on an SSD")]
    return _network(
        facts, directory, "restores from there are slow", "--kv-cache-dir on a local SSD"
    )


def cache_space(facts: Facts) -> list[Finding] | None:
    """Check that the disk has room for the cache."""
    if facts.requested.cache_dir is None:
        return None
    directory = existing(facts.requested.cache_dir)
    free = shutil.disk_usage(directory).free
    n_bytes = facts.requested.cache_bytes
    if n_bytes is None and free < SMALL:
        return [
            slow(
                f"{directory} has {free / GIB:.1f} GiB free: the disk cache is small or off",
                "remove files",
            )
        ]
    if n_bytes is None or free >= n_bytes:
        return []
    text = f"{directory} has {free / GIB:.1f} GiB free, the cache may take {n_bytes / GIB:.1f} GiB"
    return [slow(text, f"--kv-cache-budget {free // 2**21}, or remove files")]


def memory_plan(facts: Facts) -> list[Finding] | None:
    """Check that the flags fit the memory of this machine's cards and RAM."""
    if not facts.requested.model_files or model_files(facts):
        return None
    try:
        warnings = facts.llama.plan()
    except ModelError as error:
        return [
            wrong(
                str(error), "another model or a smaller one, a smaller -c, or -ctk q8_0 -ctv q8_0"
            )
        ]
    parts = (warning.partition(HELP) for warning in warnings)
    return [
        slow(text, fix or "set the flag yourself, or take a smaller model")
        for text, _, fix in parts
    ]


def _network(facts: Facts, path: Path, effect: str, fix: str) -> list[Finding]:
    mount = facts.mount_of(path)
    if not mount.kind.startswith(NETWORK):
        return []
    return [
        slow(f"{mount.point} is a file system of another machine ({mount.kind}): {effect}", fix)
    ]
