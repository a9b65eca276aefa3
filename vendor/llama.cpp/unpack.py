"""Fetch the pinned source distribution through pip and unpack what the build and the tests need from it.

Runs before anything else is installed: standard library only. pip verifies the hash in pin.txt.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from pyctl.errors import ConfigError  # noqa: E402
from pyctl.machine.pin import read_pin  # noqa: E402
from pyctl.setup.source import download_source, pip_command, unpack_source  # noqa: E402

STAMP = HERE / "unpacked.txt"

WANTED = (
    "LICENSE",
    "CMakeLists.txt",
    "include/*.h",
    "common/*.h",
    "common/jinja/*.h",
    "src/*.h",
    "ggml/CMakeLists.txt",
    "ggml/include/*.h",
    "ggml/src/*.h",
    "ggml/src/ggml-rpc/ggml-rpc.cpp",
    "ggml/src/ggml-rpc/transport.cpp",
    "ggml/src/ggml-rpc/transport.h",
    "models/ggml-vocab-llama-bpe.gguf",
    "models/ggml-vocab-qwen2.gguf",
    "models/ggml-vocab-qwen35.gguf",
    "models/templates/*.jinja",
    "tools/server/README.md",
)
"""Patterns below vendor/llama.cpp of the source distribution; a star does not cross a slash."""


def copy(tree: Path, target: Path) -> int:
    """Copy what is wanted of an unpacked source tree, whose release the caller vouches for; returns how many files."""
    files = [path for pattern in WANTED for path in sorted(tree.glob(pattern))]
    if tree / "include" / "llama.h" not in files:
        raise SystemExit(f"{tree} is no source tree of llama.cpp")
    for path in files:
        destination = target / path.relative_to(tree)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination)
    return len(files)


def is_wanted(path: str) -> bool:
    return any(path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern) for pattern in WANTED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="DIR", help="unpack the complete source tree into DIR")
    parser.add_argument("--from", type=Path, dest="tree", metavar="DIR", help="copy from such a tree, without pip")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except ConfigError as error:
        raise SystemExit(f"{error}; the extension needs the headers inside it") from error


def run(arguments: argparse.Namespace) -> None:
    pin = read_pin()
    identity = f"{pin.requirement} {pin.digest}\n" + "\n".join(WANTED) + "\n"
    if arguments.all is None and STAMP.exists() and STAMP.read_text(encoding="utf-8") == identity:
        return
    if arguments.tree is not None:
        count = copy(arguments.tree, HERE)
        STAMP.write_text(identity, encoding="utf-8")
        print(f"{count} files copied", flush=True)
        return
    with tempfile.TemporaryDirectory() as directory:
        print(f"fetching the source of {pin.requirement} for its headers", flush=True)
        archive = download_source(pip_command(Path(directory)), Path(directory))
        if arguments.all is not None:
            print(f"{unpack_source(archive, arguments.all)} files in {arguments.all}")
            return
        count = unpack_source(archive, HERE, is_wanted)
    STAMP.write_text(identity, encoding="utf-8")
    print(f"{count} files unpacked", flush=True)


if __name__ == "__main__":
    main()
