"""Small source trees of llama.cpp and its bindings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VERSIONS = "".join(
    f"set(LLAMA_VERSION_{part} {n})\n" for part, n in (("MAJOR", 0), ("MINOR", 7), ("PATCH", 2))
)


def write(directory: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


TREE = {"include/llama.h": "", "CMakeLists.txt": VERSIONS}


BINDINGS = {
    "__init__.py": '__version__ = "0.9.1"\n',
    "llama_cpp.py": "",
    "lib/libllama.so": "not this one",
}


DISTRIBUTION = {
    **{f"vendor/llama.cpp/{name}": text for name, text in TREE.items()},
    **{f"llama_cpp/{name}": text for name, text in BINDINGS.items()},
}
