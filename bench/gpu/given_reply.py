"""`pyctl serve` and llama-server that reply with given tokens, so that drafts are right where the text makes them so.

    python -m bench.gpu.given_reply TOKENS SHARE -m FILE --spec-type draft-mtp,cache ...

``TOKENS`` is a file of 32-bit numbers: prompt and reply of the one conversation that is asked. All is computed as ever;
behind position p the token at p + 1 is taken, whatever the logits say. The head, whose weights are random, drafts the
given token with the chance ``SHARE``, drawn by position. No reply ends by itself. For llama-server given_reply.c does
the same.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyctl.cli import main as pyctl_main
from pyctl.engine.backend import SequenceTokens
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.sampler import LlamaVocabulary
from pyctl.setup.machine import find_compiler

__all__ = ["give", "is_known", "preloaded"]


def is_known(position: int, share: float) -> bool:
    """Whether the head drafts the given token at ``position``; as in given_reply.c."""
    drawn = position * 2654435761 & 0xFFFFFFFF
    return (drawn ^ drawn >> 15) % 10007 < share * 10007


def preloaded(directory: Path, tokens: Path, share: float) -> list[str]:
    """The beginning of a command that has llama-server reply with ``tokens``. OSError without a C compiler."""
    library, source = directory / "given_reply.so", Path(__file__).with_suffix(".c")
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C compiler: llama-server cannot be given a reply")
    if not library.exists():
        command = [compiler.cc, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise OSError(f"{source.name} is not compiled: {made.stderr[-300:]}")
    given = {"LD_PRELOAD": str(library), "GIVEN_TOKENS": str(tokens), "GIVEN_SHARE": f"{share:g}"}
    return ["env", *(f"{name}={value}" for name, value in given.items())]


class _Given:
    """Which token is given behind each output of the last evaluation."""

    def __init__(self, tokens: Sequence[int], share: float) -> None:
        self.tokens, self.share = tokens, share
        self._outputs: list[int] = []

    def decoded(self, items: Sequence[SequenceTokens]) -> None:
        self._outputs = [
            item.position + item.n_sure + i for item in items for i in range(1 + len(item.tokens) - item.n_sure)
        ]

    def begun(self, n_prompt: int) -> None:
        self._outputs = [n_prompt]

    def token(self, index: int, sampled: int) -> int:
        place = self._outputs[index]
        return self.tokens[place] if place < len(self.tokens) else sampled

    def draft(self, item: SequenceTokens, drafted: Sequence[int]) -> tuple[int, ...]:
        """``drafted``, with the tokens that the head knows."""
        first, end = item.position + len(item.tokens), len(self.tokens)
        places = range(first, first + len(drafted))
        known = (place < end and is_known(place, self.share) for place in places)
        return tuple(
            self.tokens[place] if right else token for place, token, right in zip(places, drafted, known, strict=True)
        )


class _GivenSampler:
    """The sampler of a request: it samples as ever, and then takes the given token."""

    def __init__(self, sampler: Any, given: _Given) -> None:
        self._sampler, self._given = sampler, given

    def sample(self, index: int) -> int:
        return self._given.token(index, int(self._sampler.sample(index)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def give(backend: type[LlamaBackend], tokens: Sequence[int], share: float) -> None:
    """Have all backends of this class reply with ``tokens`` from now on, and end no reply."""
    given = _Given(tokens, share)
    decode, draft, sampler = backend.decode, backend.draft, backend.sampler

    def decoded(self: LlamaBackend, items: Sequence[SequenceTokens]) -> None:
        given.decoded(items)
        decode(self, items)

    def drafted(self: LlamaBackend, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        found = draft(self, items, n)
        return [given.draft(item, each) for item, each in zip(items, found, strict=True)]

    def wrapped(self: LlamaBackend, sampling: Any, prompt: Any) -> Any:
        given.begun(len(prompt))
        return _GivenSampler(sampler(self, sampling, prompt), given)

    patched: Any = backend
    patched.decode, patched.draft, patched.sampler = decoded, drafted, wrapped
    vocabulary: Any = LlamaVocabulary
    vocabulary.is_end = lambda self, token: False


if __name__ == "__main__":
    give(LlamaBackend, np.fromfile(sys.argv[1], np.int32).tolist(), float(sys.argv[2]))
    sys.exit(pyctl_main(["serve", *sys.argv[3:]]))
