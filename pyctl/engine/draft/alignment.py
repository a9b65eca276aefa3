"""The alignment of a reply with the text that it copies, and the edits that it makes on the way.

An agent that rewrites a file copies long stretches and changes a few tokens, often in the same way
at each place. So the alignment keeps the place in the source, and each change as an `Edit` that it
expects again. In this example `x` replaced `=` once, and the reply is about to do it again:

    place      1   2   3   4   5   6   7   8
    source     a   =   1   ;   b   =   2   ;     a text of the index
    reply      a   x   1   ;   b                 its tokens so far
                   |   |           |
                   |   |           +-- place 6, length 3: the last three tokens agree
                   |   +-------------- the reply agrees again: the edit (= to x) is learnt
                   +------------------ the divergence, at place 2
    expected                       x   2   ;     the source with the edit made again

While the reply agrees with the source, ``place`` is set. At another token than the expected one the
alignment first tries the source without an edit. If that fails it *diverges*: ``place`` becomes 0,
and it collects the tokens since then, until they are found in the source again, after the
divergence or elsewhere.

An insertion takes no source token. It is learnt as a replacement of the token after it, by the
inserted tokens and that token, so that each edit has a first token by which it is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from pyctl.engine.draft.token_index import AHEAD, TokenIndex

__all__ = ["Alignment"]

LONGEST_EDIT = 8
"""Most tokens of a change that is expected again."""

MAX_EDITS = 4
"""Most changes that start with the same token."""

SPAN_TOLERANCE = 2
"""Tokens by which an edit's span may be longer at another place, where numbers have more digits."""


@dataclass(eq=False)
class Edit:
    """A replacement of the source's tokens from ``first`` to ``last``, ``span`` of them, by
    ``replacement``, which is empty for a deletion.
    """

    first: int
    last: int
    span: int
    replacement: tuple[int, ...]
    n_right: int = 0
    n_wrong: int = 0

    @property
    def is_likely(self) -> bool:
        """Return whether it was right often enough to be expected."""
        return self.n_right > 2 * self.n_wrong

    def span_in(self, text: Sequence[int], start: int) -> int:
        """Return how many tokens of ``text`` it replaces from ``start`` on, where its first token
        is; 0 if its last one does not follow.
        """
        if self.span == 1:
            return 1
        for span in range(2, self.span + SPAN_TOLERANCE + 1):
            last = start + span - 1
            if last < len(text) and text[last] == self.last:
                return span
        return 0


class ExpectedToken(NamedTuple):
    """An expected ``token``, and the source place after it.

    ``edit`` is the edit that it belongs to, or the deletion before it. ``ends_edit``: it is the
    last token of an edit, or of none.
    """

    token: int
    position: int
    edit: Edit | None = None
    ends_edit: bool = True


class Alignment:
    """The alignment of one reply with the texts of ``index``.

    ``length`` is how many tokens before ``place`` agree with the reply, as far as they were
    compared.
    """

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self.place = 0
        self.length = 0
        self._edits: dict[int, list[Edit]] = {}  # by their first token, the newest first
        self._rest_of_edit: list[ExpectedToken] = []
        self._diverged_at = 0
        self._since: list[int] = []

    @property
    def preferred_place(self) -> int:
        """The place near which a text is looked for, 0 for anywhere."""
        return self.place or self._diverged_at

    def advance(self, fresh: list[int], text: list[int]) -> None:
        """Compare ``fresh``, the new last tokens of the reply, whose ``text`` ends with them; find
        the reply in the index if it is not aligned.
        """
        if self.place:
            self._compare(fresh)
        else:
            self._since += fresh
        if not self.place:
            self._anchor(text)

    def restart(self) -> None:
        """Forget the place, but not the edits, as tokens in between are not known."""
        self._diverge([])
        self._diverged_at = 0

    # -- expected tokens
    # ----------------------------------------------------------------------------------

    def expect(self, n: int) -> Iterator[ExpectedToken]:
        """Yield ``n`` expected tokens or more if the source has them: its text with the edits
        learnt so far.
        """
        yield from self._rest_of_edit
        position = self._rest_of_edit[-1].position if self._rest_of_edit else self.place
        text = self._index.read(position, 2 * (n + LONGEST_EDIT))
        deletion: Edit | None = None
        i = 0
        while i < len(text):
            edit, span = self._likely_edit(text, i)
            after = position + i + span
            if edit is None:
                yield ExpectedToken(text[i], after, deletion)
                deletion = None
            elif not edit.replacement:
                deletion = edit
            else:
                for token in edit.replacement[:-1]:
                    yield ExpectedToken(token, position + i, edit, ends_edit=False)
                yield ExpectedToken(edit.replacement[-1], after, edit)
            i += span

    def _likely_edit(self, text: list[int], i: int) -> tuple[Edit | None, int]:
        """Return the edit that is expected at token ``i`` of ``text``, None for none, and the
        source tokens that it takes, 1 without one.
        """
        for edit in self._edits.get(text[i], ()):
            if edit.is_likely and (span := edit.span_in(text, i)):
                return edit, span
        return None, 1

    # -- comparison
    # ----------------------------------------------------------------------------------

    def _compare(self, fresh: list[int]) -> None:
        """Follow the source by ``fresh`` tokens; diverge at the first other one than expected."""
        self.length += len(fresh)
        while fresh:
            maximum = len(fresh) + LONGEST_EDIT
            expected = list(islice(self.expect(maximum), maximum))
            n = _n_equal(expected, fresh)
            self._accept(expected, n)
            fresh = fresh[n:]
            if not fresh:
                return
            n = self._skip_edit(expected[n:], fresh)
            if not n:
                return self._diverge(fresh)
            fresh = fresh[n:]

    def _accept(self, expected: list[ExpectedToken], n: int) -> None:
        """Move past the first ``n`` of the ``expected`` tokens."""
        for expected_token in expected[:n]:
            if expected_token.edit is not None and expected_token.ends_edit:
                expected_token.edit.n_right += 1
        if n:
            self.place = expected[n - 1].position
            self._rest_of_edit = _rest_of_edit(expected, n)

    def _skip_edit(self, expected: list[ExpectedToken], fresh: list[int]) -> int:
        """Follow the source without the edit that is ``expected`` next; return by how many of the
        ``fresh`` tokens.
        """
        edit = expected[0].edit if expected else None
        if edit is None:
            return 0
        edit.n_wrong += 1
        if self._rest_of_edit:  # the reply has begun to make it
            return 0
        n = self._index.follow(self.place, fresh)
        self.place += n
        return n

    def _diverge(self, fresh: list[int]) -> None:
        """Leave the source, which has ended or does not continue with ``fresh``."""
        done: tuple[int, ...] = ()
        if self._rest_of_edit and (edit := self._rest_of_edit[0].edit) is not None:
            # An edit that was made in part is another change.
            done = edit.replacement[: len(edit.replacement) - len(self._rest_of_edit)]
        self._since = [*done, *fresh]
        self._diverged_at = self.place
        self.place = 0
        self.length = 0
        self._rest_of_edit = []

    # -- after a divergence
    # ----------------------------------------------------------------------------------

    def _anchor(self, text: list[int]) -> None:
        """Find the source place for the end of ``text``: near the divergence, else anywhere."""
        if self._diverged_at and len(self._since) <= AHEAD:
            place, length = self._index.find_near(self._diverged_at, self._since)
            if place:
                self._learn_change(place - length, self._since[:-length])
                self.place = place
                self.length = length
                return
        self.place, self.length = self._index.find(text, self._diverged_at)

    def _learn_change(self, end: int, written: list[int]) -> None:
        """Learn that the source's tokens from the divergence up to place ``end`` were ``written``
        as others, if those are few.
        """
        n = end - self._diverged_at
        if not 0 <= n <= LONGEST_EDIT or len(written) > LONGEST_EDIT:
            return
        is_insertion = n == 0
        if is_insertion and not written:
            return
        n_read = 1 if is_insertion else n
        source = self._index.read(self._diverged_at, n_read)
        if len(source) < n_read:  # the index has overwritten it
            return
        self._learn(source, (*written, *source[n:]))

    def _learn(self, source: list[int], replacement: tuple[int, ...]) -> None:
        """Record the edit of ``source`` into ``replacement`` as the newest."""
        edits = self._edits.setdefault(source[0], [])
        edit = _find(edits, source[-1], replacement)
        if edit is None:
            edit = Edit(source[0], source[-1], len(source), replacement)
        else:
            edits.remove(edit)
        edit.n_right += 1
        edits.insert(0, edit)
        del edits[MAX_EDITS:]


def _n_equal(expected: list[ExpectedToken], tokens: list[int]) -> int:
    """Return how many of the first ``tokens`` are the ``expected`` ones."""
    n = 0
    for each, token in zip(expected, tokens, strict=False):
        if each.token != token:
            break
        n += 1
    return n


def _rest_of_edit(expected: list[ExpectedToken], n: int) -> list[ExpectedToken]:
    """Return the tokens that are left of the edit within which the first ``n`` end."""
    if expected[n - 1].ends_edit:
        return []
    rest: list[ExpectedToken] = []
    for each in expected[n:]:
        rest.append(each)
        if each.ends_edit:
            break
    return rest


def _find(edits: list[Edit], last: int, replacement: tuple[int, ...]) -> Edit | None:
    for edit in edits:
        if edit.last == last and edit.replacement == replacement:
            return edit
    return None
