"""The files of a release: wheels that pip takes, and the archive for cards."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import subprocess
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
import zstandard

from tools.release import cuda_archive, write_old_libraries, write_wheel


def test_a_wheel_lists_its_files_and_is_always_the_same(tmp_path: Path) -> None:
    files = {"a/lib/libx.so": b"x" * 1000, "a-1.dist-info/WHEEL": b"Wheel-Version: 1.0\n"}
    first = tmp_path / "first.whl"
    second = tmp_path / "second.whl"
    write_wheel(first, files, "a-1.dist-info")
    write_wheel(second, files, "a-1.dist-info")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        rows = dict(
            line.split(",", 1) for line in wheel.read("a-1.dist-info/RECORD").decode().splitlines()
        )
        assert rows.keys() == set(wheel.namelist())
    digest = urlsafe_b64encode(hashlib.sha256(b"x" * 1000).digest()).rstrip(b"=").decode()
    assert rows["a/lib/libx.so"] == f"sha256={digest},1000"


def test_the_archive_for_cards_begins_with_a_manifest_of_its_files() -> None:
    packed = cuda_archive({"format": 1}, {"libggml-cuda.so": b"code"})
    with tarfile.open(
        fileobj=io.BytesIO(zstandard.ZstdDecompressor().stream_reader(packed).read())
    ) as tar:
        assert tar.getnames() == ["manifest.json", "libggml-cuda.so"]
        manifest = json.loads(tar.extractfile("manifest.json").read())
        assert tar.extractfile("libggml-cuda.so").read() == b"code"
    assert manifest["files"] == {
        "libggml-cuda.so": {"sha256": hashlib.sha256(b"code").hexdigest(), "size": 4}
    }


@pytest.mark.skipif(platform.machine() != "x86_64", reason="old names of functions are x86_64's")
def test_links_for_old_systems_need_no_newer_functions(tmp_path: Path) -> None:
    """A library that is linked against the reduced libraries needs no symbol newer than the oldest
    supported system has, although the compiler's own headers would choose newer ones.
    """
    kept = ("libstdc++.a", "libm.so.6", "libstdc++.so.6")
    found = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in kept
    ]
    write_old_libraries([Path(name).resolve().parent for name in found], tmp_path, "gcc")
    code = "#include <cmath>\n#include <filesystem>\n"
    code += (
        "double f(double x) { return exp(log2(pow(x, log(x)))) + "
        "std::filesystem::exists(std::to_string(x)); }"
    )
    command = [
        "g++",
        "-std=c++17",
        "-O2",
        "-shared",
        "-fPIC",
        "-xc++",
        "-",
        f"-L{tmp_path}",
        "-o",
        tmp_path / "it.so",
    ]
    subprocess.run(command, input=code, text=True, check=True)
    named = set(re.findall(rb"GLIBC(?:XX)?_[\d.]+", (tmp_path / "it.so").read_bytes()))
    assert not named & {b"GLIBC_2.29", b"GLIBCXX_3.4.26"}
