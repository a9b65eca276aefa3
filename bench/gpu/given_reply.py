"""`pyctl serve` and llama-server that reply with given tokens, so that drafts are right where the
text makes them so.

    python -m bench.gpu.given_reply TOKENS SHARE -m FILE --spec-type draft-mtp,cache ...

``TOKENS`` is a file of 32-bit numbers (`write`): prompts with replies that have no token in common.
All is computed as ever; after position p the token at p + 1 of the same text is taken, whatever the
logits are. The head, whose weights are random, drafts the given token with the chance ``SHARE``,
drawn by position. No reply ends by itself. For llama-server given_reply.c does the same.
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
from pyctl.llama.sampling.sampler import LlamaVocabulary
from pyctl.machine.probe import find_compiler

__all__ = ["give", "is_known", "preloaded", "read", "write"]

Texts = Sequence[Sequence[int]]


def write(file: Path, texts: Texts) -> None:
    """Write ``texts``, each after its length."""
    np.asarray([number for text in texts for number in (len(text), *text)], np.int32).tofile(file)


def read(file: Path) -> Texts:
    """Read a file of `write`."""
    numbers = np.fromfile(file, np.int32).tolist()
    texts = []
    while numbers:
        n = 1 + numbers[0]
        texts.append(numbers[1:n])
        numbers = numbers[n:]
    return texts


def is_known(position: int, share: float) -> bool:
    """Return whether the head drafts the given token at ``position``; as in given_reply.c."""
    drawn = position * 2654435761 & 0xFFFFFFFF
    return (drawn ^ drawn >> 15) % 10007 < share * 10007


def preloaded(directory: Path, tokens: Path, share: float) -> list[str]:
    """Return the beginning of a command that has llama-server reply with ``tokens``. OSError
    without a C compiler.
    """
    library = directory / "given_reply.so"
    source = Path(__file__).with_suffix(".c")
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
    """Which token is given after each output of the last evaluation."""

    def __init__(self, texts: Texts, share: float) -> None:
        self.texts = {token: text for text in texts for token in text}
        self.share = share
        self._outputs: list[tuple[int, int]] = []

    def decoded(self, items: Sequence[SequenceTokens]) -> None:
        self._outputs = [
            (item.tokens[i], item.position + i + 1)
            for item in items
            for i in range(item.n_committed - 1, len(item.tokens))
        ]

    def begun(self, prompt: Sequence[int]) -> None:
        self._outputs = [(prompt[-1], len(prompt))]

    def token(self, index: int, sampled: int) -> int:
        last, place = self._outputs[index]
        return self._at(last, place, sampled)

    def draft(self, item: SequenceTokens, drafted: Sequence[int]) -> tuple[int, ...]:
        """Return ``drafted``, with the tokens that the head has."""
        places = enumerate(drafted, item.position + len(item.tokens))
        return tuple(
            self._at(item.tokens[-1], place, token) if is_known(place, self.share) else token
            for place, token in places
        )

    def _at(self, last: int, place: int, otherwise: int) -> int:
        text = self.texts.get(last, ())
        return text[place] if place < len(text) else otherwise


class _GivenSampler:
    """The sampler of a request: it samples as ever, and then takes the given token."""

    def __init__(self, sampler: Any, given: _Given) -> None:
        self._sampler = sampler
        self._given = given

    def sample(self, index: int) -> int:
        return self._given.token(index, int(self._sampler.sample(index)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def give(backend: type[LlamaBackend], texts: Texts, share: float) -> None:
    """Have all backends of this class reply with ``texts`` from now on, and end no reply."""
    given = _Given(texts, share)
    decode = backend.decode
    draft = backend.draft
    sampler = backend.sampler

    def decoded(self: LlamaBackend, items: Sequence[SequenceTokens]) -> None:
        given.decoded(items)
        decode(self, items)

    def drafted(
        self: LlamaBackend, items: Sequence[SequenceTokens], n: int
    ) -> list[tuple[int, ...]]:
        found = draft(self, items, n)
        return [given.draft(item, each) for item, each in zip(items, found, strict=True)]

    def wrapped(self: LlamaBackend, sampling: Any, prompt: Any) -> Any:
        given.begun(prompt.tolist())
        return _GivenSampler(sampler(self, sampling, prompt), given)

    patched: Any = backend
    patched.decode = decoded
    patched.draft = drafted
    patched.sampler = wrapped
    vocabulary: Any = LlamaVocabulary
    vocabulary.is_end = lambda self, token: False


if __name__ == "__main__":
    give(LlamaBackend, read(Path(sys.argv[1])), float(sys.argv[2]))
    sys.exit(pyctl_main(["serve", *sys.argv[3:]]))
