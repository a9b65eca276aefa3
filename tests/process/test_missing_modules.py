"""Servers one of whose native modules does not fit: its feature is off, everything else works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.conftest import Server, package_copy

MESSAGES = [{"role": "user", "content": "north gate, " * 40}]

FEATURES = {
    "drafts": (["--spec-type", "draft-mtp", "--metrics"], "draft model disabled"),
    "pool": (["--kv-pool", "4096"], "--kv-pool disabled"),
}


def absent(native: Path) -> str:
    native.unlink()
    return "No module named"


def no_library(native: Path) -> str:
    native.write_bytes(b"no library")
    return "file too short"


def of_another_build(native: Path) -> str:
    """Make ``native`` look as if it was compiled with other headers than `_core`."""
    (build,) = set(re.findall(rb"\0([0-9a-f]{64})\0", content := native.read_bytes()))
    native.write_bytes(content.replace(build, build[::-1]))
    return "built with another _core"


def of_another_library(native: Path) -> str:
    """A function of llama.cpp that it names does not exist."""
    content = native.read_bytes()
    native.write_bytes(content.replace(b"\0llama_n_ubatch\0", b"\0llama_n_ubatcx\0"))
    return "undefined symbol: llama_n_ubatcx"


@pytest.mark.parametrize(
    ("misfit", "name"),
    [
        (absent, "drafts"),
        (no_library, "pool"),
        (of_another_build, "pool"),
        (of_another_library, "drafts"),
    ],
)
def test_its_feature_is_off_and_the_model_is_served(
    misfit: Callable[[Path], str], name: str, start: Callable[..., Server], tmp_path: Path
) -> None:
    """A native module that does not load turns its feature off with one line in the log; the
    replies are those of a server that has it.
    """
    package, statements = package_copy(tmp_path)
    (native,) = package.glob(f"_{name}*.so")
    flags, off = FEATURES[name]
    reason = misfit(native)
    replies = []
    for before in ("", statements):
        server = start("tiny-hybrid-nextn", "--exact", *flags, before=before)
        replies.append(server.chat(MESSAGES).body["choices"])
        assert server.stop() == 0
    lost = [line for line in server.log().splitlines() if "without the extension" in line]
    assert len(lost) == 1
    assert f"without the extension's {name} (" in lost[0]
    assert reason in lost[0]
    assert server.log().count(off) == 1
    assert replies[0] == replies[1]
