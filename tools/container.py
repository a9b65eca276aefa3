"""Containerfile without a daemon: reads its instructions, and runs them in directories made by debootstrap.

    python -m tools.container DIRECTORY [--setup="--arch 86"] [--wheels DIR]

Needs root and Debian's packages. It replaces no daemon: no layers, no image, one base.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONTAINERFILE", "Instruction", "build_files", "stages", "words_of"]

CONTAINERFILE = Path(__file__).resolve().parents[1] / "Containerfile"
SUITE = re.compile(r"docker\.io/library/debian:(\w+)-slim(?: AS (\w+))?")


@dataclass(frozen=True)
class Instruction:
    """An instruction: its name in capitals, its flags (``--from=build``), and the rest of the line."""

    name: str
    flags: Mapping[str, tuple[str, ...]]
    text: str


def stages(text: str) -> list[list[Instruction]]:
    """The instructions of each stage, FROM first."""
    found: list[list[Instruction]] = []
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    for line in filter(None, map(str.strip, lines.splitlines())):
        name, _, rest = line.partition(" ")
        flags: dict[str, tuple[str, ...]] = {}
        while match := re.match(r"\s*--([\w-]+)=(\S+)", rest):
            flags[match[1]] = (*flags.get(match[1], ()), match[2])
            rest = rest[match.end() :]
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, flags, rest.strip()))
    return found


def words_of(instruction: Instruction) -> list[str]:
    """The words of an instruction in JSON's form (ENTRYPOINT, HEALTHCHECK CMD, VOLUME) or separated by blanks."""
    text = instruction.text.removeprefix("CMD ")
    return list(json.loads(text)) if text.startswith("[") else shlex.split(text)


def build_files(root: Path) -> list[Path]:
    """What `COPY . .` copies from ``root``: top-level names that .dockerignore lets through."""
    allowed = [line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return [root / name for name in allowed]


class Stage:
    """One stage in a directory of its own."""

    def __init__(self, root: Path, arguments: Mapping[str, str], wheels: Path | None) -> None:
        self.root, self._arguments, self._wheels = root, dict(arguments), wheels
        self._environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "DEBIAN_FRONTEND": "noninteractive",
        }
        self._directory, self._user = "/", "0"

    def run(self, instruction: Instruction, others: Mapping[str, Stage]) -> None:
        """Follow ``instruction``. Raises CalledProcessError if a command fails."""
        began = time.monotonic()
        if instruction.name == "FROM":
            match = SUITE.fullmatch(instruction.text)
            assert match is not None, instruction.text
            if not (self.root / "bin").exists():
                subprocess.run(["debootstrap", "--variant=minbase", match[1], str(self.root)], check=True)
            shutil.copy("/etc/resolv.conf", self.root / "etc/resolv.conf")
            if bundle := os.environ.get("SSL_CERT_FILE"):  # certificates of this machine's network
                shutil.copy(bundle, self.root / "etc/host.crt")
                self._environment |= {"SSL_CERT_FILE": "/etc/host.crt", "PIP_CERT": "/etc/host.crt"}
        elif instruction.name == "RUN":
            self.shell(instruction.text)
        elif instruction.name == "COPY":
            self._copy(instruction, others)
        elif instruction.name in ("ENV", "ARG"):
            pairs = dict(word.split("=", 1) for word in shlex.split(instruction.text))
            given = {name: self._arguments.get(name, value) for name, value in pairs.items()}
            self._environment |= given if instruction.name == "ARG" else pairs
        elif instruction.name == "WORKDIR":
            self._directory = instruction.text
            (self.root / self._directory[1:]).mkdir(parents=True, exist_ok=True)
        elif instruction.name == "USER":
            self._user = instruction.text
        print(f"{instruction.name:<12}{time.monotonic() - began:6.1f} s  {instruction.text[:90]}", flush=True)

    def _copy(self, instruction: Instruction, others: Mapping[str, Stage]) -> None:
        *sources, target = shlex.split(instruction.text)
        place = self.root / target[1:] if target.startswith("/") else self.root / self._directory[1:]
        if other := instruction.flags.get("from"):
            for source in sources:
                shutil.copytree(others[other[0]].root / source[1:], place, symlinks=True, dirs_exist_ok=True)
            return
        for path in build_files(CONTAINERFILE.parent):
            if path.is_dir():
                unwanted = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(path, place / path.name, dirs_exist_ok=True, ignore=unwanted)
            else:
                shutil.copy(path, place / path.name)

    def shell(self, text: str) -> None:
        """Run ``text`` as the shell of a build does, as the stage's user."""
        more = {"PIP_FIND_LINKS": "/wheels"} if self._wheels is not None else {}
        command = [
            "chroot",
            f"--userspec={self._user}",
            str(self.root),
            "/bin/sh",
            "-c",
            f"cd {self._directory} && {text}",
        ]
        with ExitStack() as stack:
            for source, target in (("/proc", "proc"), ("/dev", "dev"), (str(self._wheels or ""), "wheels")):
                if source:
                    stack.enter_context(_mounted(source, self.root / target))
            subprocess.run(command, check=True, env={**self._environment, **more})


@contextmanager
def _mounted(source: str, target: Path) -> Iterator[None]:
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", source, str(target)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(target)], check=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all stages; the last one's health check and entry point remain to be tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--setup", help="flags of pyctl setup, instead of those in the file")
    parser.add_argument("--wheels", type=Path, help="wheels that pip takes instead of building them")
    options = parser.parse_args(argv)
    made: dict[str, Stage] = {}
    for instructions in stages(CONTAINERFILE.read_text(encoding="utf-8")):
        match = SUITE.fullmatch(instructions[0].text)
        name = (match[2] if match is not None else None) or "image"
        arguments = {} if options.setup is None else {"SETUP": options.setup}
        made[name] = Stage(options.directory / name, arguments, options.wheels if name == "build" else None)
        for instruction in instructions:
            made[name].run(instruction, made)
    print(f"the image's files lie in {made['image'].root}")


if __name__ == "__main__":
    main()
