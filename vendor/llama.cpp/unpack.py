"""Fetch the pinned source distribution through pip and unpack what the build and the tests need from it.

Runs before anything else is installed: standard library only. pip verifies the hash in pin.txt.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PIN = HERE / "pin.txt"
STAMP = HERE / "unpacked.txt"

WANTED = (
    "LICENSE",
    "CMakeLists.txt",
    "include/*.h",
    "src/*.h",
    "ggml/CMakeLists.txt",
    "ggml/include/*.h",
    "ggml/src/*.h",
    "models/ggml-vocab-qwen35.gguf",
    "models/templates/Qwen3.5-4B.jinja",
    "models/templates/Qwen3-Coder.jinja",
    "models/templates/Qwen-Qwen3-0.6B.jinja",
    "models/templates/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
    "models/templates/meta-llama-Llama-3.1-8B-Instruct.jinja",
    "models/templates/meta-llama-Llama-3.3-70B-Instruct.jinja",
    "models/templates/mistralai-Mistral-Nemo-Instruct-2407.jinja",
    "models/templates/Mistral-Small-3.2-24B-Instruct-2506.jinja",
    "models/templates/mistralai-Ministral-3-14B-Reasoning-2512.jinja",
    "models/templates/openai-gpt-oss-120b.jinja",
    "tools/server/README.md",
)
"""Patterns below vendor/llama.cpp of the source distribution; a star does not cross a slash."""


def pinned() -> tuple[str, str]:
    """The requirement (``name==version``) and the sha256 of its source distribution."""
    match = re.search(r"^(\S+==\S+) --hash=sha256:([0-9a-f]{64})$", PIN.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{PIN}: no line of the form 'name==version --hash=sha256:...'")
    return match[1], match[2]


def download(directory: Path) -> Path:
    """The source distribution, fetched by pip into ``directory`` and verified against the pin."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    command += ["--no-deps", "--no-binary", ":all:", "--dest", str(directory), "--requirement", str(PIN)]
    # Without isolation pip takes the build backend that is already here instead of fetching it once more.
    if importable("scikit_build_core"):
        command.append("--no-build-isolation")
    # The flags are meant for a build; here pip only reads the name and the version.
    environment = {name: value for name, value in os.environ.items() if name != "CMAKE_ARGS"}
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        raise SystemExit(f"pip could not fetch {pinned()[0]} (see above); the extension needs the headers inside it")
    return next(directory.glob("*.tar.gz"))


def importable(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False).returncode == 0


def unpack(archive: Path, target: Path, wanted: Callable[[str], bool]) -> int:
    """Write the files below vendor/llama.cpp in ``archive`` that are ``wanted``; returns how many."""
    count = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, path = member.name.partition("/vendor/llama.cpp/")
            if not path or not member.isfile() or ".." in path.split("/") or not wanted(path):
                continue
            destination = target / path
            destination.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with source, destination.open("wb") as out:
                shutil.copyfileobj(source, out)
            destination.chmod(0o755 if member.mode & 0o100 else 0o644)
            count += 1
    return count


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
    requirement, digest = pinned()
    identity = f"{requirement} {digest}\n" + "\n".join(WANTED) + "\n"
    if arguments.all is None and STAMP.exists() and STAMP.read_text(encoding="utf-8") == identity:
        return
    if arguments.tree is not None:
        count = copy(arguments.tree, HERE)
        STAMP.write_text(identity, encoding="utf-8")
        print(f"{count} files copied", flush=True)
        return
    with tempfile.TemporaryDirectory() as directory:
        print(f"fetching the source of {requirement} for its headers", flush=True)
        archive = download(Path(directory))
        if arguments.all is not None:
            print(f"{unpack(archive, arguments.all, lambda path: True)} files in {arguments.all}")
            return
        count = unpack(archive, HERE, is_wanted)
    STAMP.write_text(identity, encoding="utf-8")
    print(f"{count} files unpacked", flush=True)


if __name__ == "__main__":
    main()
