"""The folder of one model in a cache directory."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.snapshot import Prefix, PromptMatch
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.file_format import (
    RULES,
    SIZES,
    Name,
    StateName,
    check_fingerprint,
    rules_id,
    sizes_text,
)
from pyctl.disk.index import Key
from pyctl.disk.index_mirror import is_older
from pyctl.files.atomic_file import make_private, write_atomic

__all__ = ["ModelFolder"]

AUXILIARY_SHARE = 64
"""Recent prompts and replies may each have this fraction (1/N) of the budget: they are small next
to the snapshots.
"""


class ModelFolder:
    """The files of the model with ``fingerprint`` in a ``directory``, which other models and
    processes may share.

    Blocks of other sizes than ``sizes`` are damaged. `states`, `lengths`, `contains` and `find` are
    by the last look at the directory: they never wait. ValueError for an impossible fingerprint,
    OSError if the folder cannot be used.
    """

    def __init__(
        self, directory: CacheDirectory, fingerprint: str, sizes: BlockSizes | None = None
    ) -> None:
        self.directory = directory
        self.fingerprint = check_fingerprint(fingerprint)
        self.path = directory.path / fingerprint
        self.sizes = sizes
        if self.path.is_symlink():
            raise OSError(errno.ELOOP, "a link, which may lead to others' files", str(self.path))
        make_private(self.path)
        with suppress(OSError):  # without it the files count as older ones, which go first
            if is_older(self.path):
                write_atomic(self.path / RULES, rules_id().encode(), sync=False)
        if sizes is not None:
            with suppress(OSError):  # it is for `verify`, which has no model
                write_atomic(self.path / SIZES, sizes_text(sizes).encode(), sync=False)

    @property
    def states(self) -> Mapping[StateName, bool]:
        """The stored states, and whether each is exact."""
        return self.directory.contents.states_of(self.fingerprint)

    @property
    def lengths(self) -> frozenset[int]:
        """The positions at which some state is stored."""
        return self.directory.contents.lengths.get(self.fingerprint, frozenset())

    def contains(self, prefix: Prefix) -> bool:
        """Return whether a state for ``prefix`` is stored. Its file may still turn out to be
        damaged.
        """
        return StateName.from_prefix(prefix) in self.states

    def find(self, prompt: PromptMatch, limit: int) -> list[Prefix]:
        """Return the stored prefixes of ``prompt`` of at most ``limit`` tokens, the deepest
        first.
        """
        maximum = min(limit, int(prompt.tokens.size))
        lengths = sorted(n for n in self.lengths if 0 < n <= maximum)
        return prompt.find_prefixes(self.states, lengths)[::-1]

    def key(self, name: Name) -> Key:
        """Return the key of a file, unique in the directory."""
        return self.fingerprint, name

    def has_file(self, name: Name) -> bool:
        """Return whether the file ``name`` exists on the drive now."""
        return (self.path / str(name)).is_file()

    def auxiliary_limit(self, n_bytes: int) -> int:
        """Return how many of ``n_bytes`` prompts may take in files; replies may take as many."""
        budget = self.directory.budget
        return n_bytes if budget is None else min(n_bytes, budget // AUXILIARY_SHARE)
