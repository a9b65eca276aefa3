"""Made-up pip, compiler, cmake and ninja: small scripts that note how they were called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PIP = """
echo "$@" >> {calls}
while [ $# -gt 0 ]; do
  case $1 in --target) T=$2;; --dest) D=$2;; cmake*) C=1;; ninja*) N=1;; nvidia-cublas*) B=1;; esac
  shift
done
[ -e {broken} ] && echo no such package >&2 && exit 1
if [ "$B" ]; then
  mkdir -p $T/nvidia/cu13/bin $T/nvidia/cu13/lib
  touch $T/nvidia/cu13/bin/nvcc
  for each in cudart cublas cublasLt; do echo $each > $T/nvidia/cu13/lib/lib$each.so.13; done
fi
[ "$C" ] && mkdir -p $T/cmake/data/bin && touch $T/cmake/data/bin/cmake
[ "$N" ] && mkdir -p $T/bin && touch $T/bin/ninja
if [ "$D" ]; then
  mkdir -p $D/x/llama_cpp/vendor/llama.cpp/src && echo source > $D/x/llama_cpp/vendor/llama.cpp/src/a.cpp
  tar -czf $D/llama_cpp.tar.gz -C $D/x llama_cpp
fi
exit 0
"""


CMAKE = """
echo "$CC $CXX $@" >> {calls}
"""


NINJA = """
echo "$NINJA_STATUS $@" >> {calls}
echo "[1/3] Building CXX object a.cpp.o"
[ -e {broken} ] && cat {broken} && exit 1
mkdir -p $2/bin && cd $2/bin && echo library > libllama.so.0 && ln -sf libllama.so.0 libllama.so && touch libmtmd.so
exit 0
"""


@dataclass
class Programs:
    """The scripts and their directory; ``broken`` makes them fail with its text while it exists."""

    directory: Path

    @property
    def calls(self) -> Path:
        return self.directory / "calls"

    @property
    def broken(self) -> Path:
        return self.directory / "broken"

    def make(self, name: str, script: str) -> str:
        path = self.directory / name
        path.write_text(
            "#!/bin/sh\n" + script.format(calls=self.calls, broken=self.broken), encoding="utf-8"
        )
        path.chmod(0o755)
        return str(path)

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()
