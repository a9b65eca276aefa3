"""The files of a release: wheels that pip takes, and the archive for cards."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import zstandard

from tools.release import cuda_archive, write_wheel


def test_a_wheel_lists_its_files_and_is_always_the_same(tmp_path: Path) -> None:
    files = {"a/lib/libx.so": b"x" * 1000, "a-1.dist-info/WHEEL": b"Wheel-Version: 1.0\n"}
    first, second = tmp_path / "first.whl", tmp_path / "second.whl"
    write_wheel(first, files, "a-1.dist-info")
    write_wheel(second, files, "a-1.dist-info")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        rows = dict(line.split(",", 1) for line in wheel.read("a-1.dist-info/RECORD").decode().splitlines())
        assert rows.keys() == set(wheel.namelist())
    digest = urlsafe_b64encode(hashlib.sha256(b"x" * 1000).digest()).rstrip(b"=").decode()
    assert rows["a/lib/libx.so"] == f"sha256={digest},1000"


def test_the_archive_for_cards_begins_with_a_manifest_of_its_files() -> None:
    packed = cuda_archive({"format": 1}, {"libggml-cuda.so": b"code"})
    with tarfile.open(fileobj=io.BytesIO(zstandard.ZstdDecompressor().stream_reader(packed).read())) as tar:
        assert tar.getnames() == ["manifest.json", "libggml-cuda.so"]
        manifest = json.loads(tar.extractfile("manifest.json").read())
        assert tar.extractfile("libggml-cuda.so").read() == b"code"
    assert manifest["files"] == {"libggml-cuda.so": {"sha256": hashlib.sha256(b"code").hexdigest(), "size": 4}}
