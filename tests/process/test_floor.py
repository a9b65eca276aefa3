"""Servers without the extension: it does not fit, or --no-extension turns it off."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.llama.library.extension import LIBRARIES, library_file, library_versions
from tests.process.conftest import Server, disk_cache, package_copy
from tests.process.conftest import pyctl as run

SYSTEM = {"role": "system", "content": "You keep the manual of the north gate. " * 25}
FIRST, SECOND = ({"role": "user", "content": text * 30} for text in ("north? ", "south? "))


def doctored(directory: Path, change: Callable[[bytes], bytes]) -> str:
    """Return a copy of the package with a changed extension."""
    package, statements = package_copy(directory)
    (native,) = package.glob("_core*.so")
    native.write_bytes(change(native.read_bytes()))
    return statements


def broken(directory: Path) -> str:
    """It is no library."""
    return doctored(directory, lambda content: b"no library")


def crashing(directory: Path) -> str:
    """All checks of the import pass, as with a library whose structs have grown: llama.cpp returns
    other things than the extension expects.
    """
    return doctored(
        directory, lambda content: content.replace(b"\0llama_get_model\0", b"\0llama_n_seq_max\0")
    )


def losing_tokens(directory: Path) -> str:
    """The same, and it does not crash."""
    names = (b"\0llama_memory_seq_pos_max\0", b"\0llama_memory_seq_pos_min\0")
    return doctored(directory, lambda content: content.replace(*names))


def of_another_release(directory: Path, name: str = "llama.cpp") -> str:
    """llama.cpp's libraries, of which one says that it is of another release."""
    libraries, (file, _) = directory / "libraries", LIBRARIES[name]
    shutil.copytree(library_file(file).parent, libraries, symlinks=True)
    library = (libraries / file).resolve()
    version = library_versions()[name].encode()
    content = library.read_bytes()
    assert content.count(version) == 1
    library.write_bytes(content.replace(version, b"9" + version[1:]))
    return f"import os; os.environ['LLAMA_CPP_LIB_PATH'] = {str(libraries)!r}"


def of_another_ggml(directory: Path) -> str:
    """The same of the library whose version the extension looks at itself."""
    return of_another_release(directory, "ggml")


def turned_off(directory: Path) -> str:
    """Return the variable of --no-extension."""
    del directory
    return "import os; os.environ['PYCTL_EXTENSION'] = 'off'"


REASONS = {
    broken: "file too short",
    crashing: "its trial ends with SIGSEGV",
    losing_tokens: "a restored sequence has other bits",
    of_another_release: "built for llama.cpp",
    of_another_ggml: "built for ggml",
    turned_off: "--no-extension",
}


@pytest.mark.parametrize("misfit", REASONS)
def test_it_says_what_is_lost_and_serves_exactly(
    misfit: Callable[[Path], str], start: Callable[..., Server], tmp_path: Path
) -> None:
    """However the extension fails to fit, the server starts, names the reason once, and gives the
    same greedy replies from RAM, from disk and cold: it degrades in speed and never in exactness.
    """
    before = misfit(tmp_path)
    replies = list[str]()
    sources = list[str]()
    for directory in ("kv", "kv", "none"):
        flags = ("--exact", *disk_cache(tmp_path / directory))
        server = start("tiny-hybrid", *flags, before=before)
        is_by_class = misfit is losing_tokens  # some classes of memory pass their trial
        start_of_line = "without rows of " if is_by_class else "without the extension ("
        (line,) = (line for line in server.log().splitlines() if start_of_line in line)
        assert REASONS[misfit] in line
        assert ("whole sequences are saved" if is_by_class else "one request at a time") in line
        for user in (FIRST, SECOND):
            reply = server.chat([SYSTEM, user], cache_prompt=directory == "kv")
            replies.append(reply.text)
            sources.append(reply.source)
        assert REASONS[misfit] in server.client.get_json("/props")["build_info"]
        assert server.stop() == 0
    assert replies[:2] == replies[2:4] == replies[4:], "in RAM, from disk, cold"
    assert sources[2] == "disk"


def test_files_are_not_those_of_the_extension(start: Callable[..., Server], tmp_path: Path) -> None:
    flags = disk_cache(tmp_path)
    sources = []
    for more in ((), ("--no-extension",), (), ("--no-extension",)):
        server = start("tiny-moe", *flags, *more)
        sources.append(server.chat([SYSTEM, FIRST], max_tokens=1).source)
        assert server.stop() == 0
    assert sources == ["none", "none", "disk", "disk"]


def test_the_version_says_so() -> None:
    assert "without the extension" not in run("--version").stdout
    assert (
        "\nwithout the extension (--no-extension): "
        in run("--version", PYCTL_EXTENSION="off").stdout
    )
