"""The compiled file of a release: found, fetched, and unpacked only as its manifest says."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from pyctl.errors import ConfigError
from pyctl.machine.pin import read_pin
from pyctl.setup.release_files import (
    UnfitError,
    check_address,
    fetch,
    find_cuda_file,
    release_place,
    unpack,
)
from tests.web_server import RedirectingHandler, web_server

LIBRARY = b"library" * 1000
MANIFEST: dict[str, Any] = {
    "format": 1,
    "release": read_pin().release,
    "digest": read_pin().digest,
    "toolkit": "13.5.0",
    "architectures": ["75", "86"],
    "driver": 580,
    "glibc": "2.31",
    "machine": platform.machine(),
    "compiler": "g++ 12.2.0",
    "requirements": ["nvidia-cublas==13.10.0.20"],
    "libraries": ["libcublas.so.13"],
    "files": {
        "libggml-cuda.so": {"sha256": hashlib.sha256(LIBRARY).hexdigest(), "size": len(LIBRARY)}
    },
}
NAME = f"pyctl-cuda-{read_pin().release}-cuda13.5.0-{platform.machine()}.tar.zst"

Members = dict[str | tarfile.TarInfo, bytes]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    return info


def release(
    directory: Path, manifest: dict[str, Any] | None = None, members: Members | None = None
) -> Path:
    """Return a release in ``directory``, whose file has ``members`` behind its manifest."""
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w") as tar:
        given = {"libggml-cuda.so": LIBRARY} if members is None else members
        for info, data in {
            "manifest.json": json.dumps({**MANIFEST, **(manifest or {})}).encode(),
            **given,
        }.items():
            info = member(info) if isinstance(info, str) else info
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = zstandard.compress(tar_bytes.getvalue())
    directory.mkdir(exist_ok=True)
    (directory / NAME).write_bytes(data)
    (directory / "SHA256SUMS").write_text(
        f"{hashlib.sha256(data).hexdigest()}  {NAME}\n{'0' * 64}  other.whl\n"
    )
    return directory


def test_the_file_of_a_release_is_fetched_whole_or_not_at_all(tmp_path: Path) -> None:
    """A file is used only if its SHA-256 is the published one, one that was changed since is
    fetched again, and a failed one leaves nothing behind.
    """
    place = release(tmp_path / "a b")
    (work := tmp_path / "work").mkdir()
    file = find_cuda_file(str(place))
    assert file is not None
    assert fetch(file, work) == fetch(file, work)
    manifest = unpack(fetch(file, work), tmp_path / "new", ("86", "89"))
    assert manifest.architectures == ("75", "86")
    assert manifest.libraries == ("libcublas.so.13",)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == {
        "libggml-cuda.so": LIBRARY
    }
    (kept := fetch(file, work)).write_bytes(b"of another user, or cut off by a power failure")
    assert fetch(file, work).read_bytes() == (place / NAME).read_bytes()
    kept.unlink()
    (place / NAME).write_bytes((place / NAME).read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is damaged: its SHA-256 is not the one in SHA256SUMS"):
        fetch(file, work)
    assert not list(work.glob("*/*"))
    (place / "SHA256SUMS").write_text(
        f"{'0' * 64}  pyctl-cuda-0.0.1-cuda13.5.0-{platform.machine()}.tar.zst\n"
    )
    assert find_cuda_file(place.as_uri()) is None
    for wrong in (str(tmp_path / "none"), "http://127.0.0.1:9/none", "ftp://127.0.0.1/none"):
        with pytest.raises(ConfigError, match="none/SHA256SUMS: "):
            find_cuda_file(wrong)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"format": 2}, "of format 2, this pyctl reads 1"),
        ({"digest": "0"}, "is of another llama.cpp"),
        ({"architectures": ["75", "89"]}, "has no code for compute capability 86"),
    ],
)
def test_a_file_that_does_not_fit_is_not_unpacked(
    manifest: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnfitError, match=words):
        unpack(release(tmp_path / "r", manifest) / NAME, tmp_path / "new", ("86",))
    assert not list(tmp_path.glob("new*"))


BOTH = {"libggml-cuda.so": LIBRARY}
HUGE = {"libggml-cuda.so": {"sha256": "", "size": 2**33}}


@pytest.mark.parametrize(
    ("manifest", "members", "words"),
    [
        ({}, {**BOTH, "more.so": b""}, "'more.so' does not match manifest.json"),
        ({}, {**BOTH, member("libggml-cuda.so"): LIBRARY}, "does not match manifest.json"),
        ({}, {"libggml-cuda.so": LIBRARY[1:]}, "does not match manifest.json"),
        ({}, {"libggml-cuda.so": LIBRARY[::-1]}, "'libggml-cuda.so' is damaged"),
        ({}, {}, "it lacks libggml-cuda.so"),
        (
            {},
            {member("libggml-cuda.so", tarfile.SYMTYPE, "/etc/passwd"): b""},
            "does not match manifest.json",
        ),
        ({}, {"../libggml-cuda.so": LIBRARY}, "does not match manifest.json"),
        (
            {"files": {"../a": {"sha256": "", "size": 0}}},
            {"../a": b""},
            "'../a' is not a valid name",
        ),
        ({"libraries": ["/lib/libc.so.6"]}, BOTH, "is not a valid name"),
        ({"toolkit": "../.."}, BOTH, "is not a valid name"),
        ({"requirements": ["--index-url=http://127.0.0.1"]}, BOTH, "is not a valid name"),
        ({"files": HUGE}, BOTH, "its content is not between 0 and"),
        ({"files": {"a": {"sha256": "", "size": -1}}}, BOTH, "its content is not between 0 and"),
        (
            {"files": {}},
            {"a": bytes(2**22)},
            "larger than in its manifest|does not match manifest.json",
        ),
        ({"more": "x" * 2**21}, BOTH, "it does not start with manifest.json"),
    ],
)
def test_a_file_has_what_its_manifest_says_and_nothing_else(
    manifest: dict[str, Any], members: Members, words: str, tmp_path: Path
) -> None:
    archive = release(tmp_path / "r", manifest, members) / NAME
    with pytest.raises(ConfigError, match=words):
        unpack(archive, tmp_path / "new", ("86",))
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {
        NAME,
        "SHA256SUMS",
        *(["libggml-cuda.so"] if (tmp_path / "new.part").exists() else []),
    }
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("note", "text", "place"),
    [
        (
            "uv-receipt.toml",
            '[tool.options]\nfind-links = ["file:///tmp/a%20b"]\n',
            "file:///tmp/a%20b",
        ),
        ("pipx_metadata.json", json.dumps({"pip_args": ["--find-links", "/r"]}, indent=4), "/r"),
        ("pipx_metadata.json", json.dumps({"pip_args": ["--find-links=/r"]}), "/r"),
        ("pipx_metadata.json", "{}", ""),
    ],
)
def test_the_release_is_where_the_wheel_came_from(
    note: str, text: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / note).write_text(text)
    assert release_place({}, tmp_path) == place
    assert release_place({"PYCTL_RELEASE": "/named"}, tmp_path) == "/named"


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({**MANIFEST, "files": ["a"]}),
        json.dumps({**MANIFEST, "files": {"a": 5}}),
        json.dumps({**MANIFEST, "files": {"a": {"size": "SIZE", "sha256": ""}}}).replace(
            '"SIZE"', "1e400"
        ),
        json.dumps({**MANIFEST, "files": {"a": {"size": None, "sha256": ""}}}),
        json.dumps({**MANIFEST, "libraries": 5}),
        json.dumps({**MANIFEST, "architectures": [None]}),
        "[" * 100_000,
        "[]",
        "5",
    ],
)
def test_an_odd_manifest_is_one_line(content: str, tmp_path: Path) -> None:
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w") as tar:
        info = member("manifest.json")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content.encode()))
    (archive := tmp_path / NAME).write_bytes(zstandard.compress(tar_bytes.getvalue()))
    with pytest.raises(ConfigError, match=f"^{archive}: .+$"):
        unpack(archive, tmp_path / "new", ("86",))
    assert not (tmp_path / "new").exists()


def test_a_release_does_not_come_by_plain_http() -> None:
    with web_server(RedirectingHandler) as url:
        for address in ("http://release.invalid", "ftp://release.invalid", url):
            with pytest.raises(
                ConfigError, match=f"^{address}/SHA256SUMS: .* an address of https, also after"
            ):
                find_cuda_file(address)
    with pytest.raises(ValueError, match="https"):
        check_address("http://127.0.0.1/a", "https://release.example/a")
