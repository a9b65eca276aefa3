"""Translation of GBNF into an equivalent llguidance grammar.

Every character is a separate terminal: llguidance matches the longest terminal, and GBNF has no
terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

from pyctl.errors import RequestError
from pyctl.llama.sampling.gbnf_rules import (
    MAX_CODE_POINT,
    Alternative,
    Characters,
    Item,
    Reference,
    Repeat,
    Rules,
    Token,
)
from pyctl.settings.limit import limit

__all__ = ["translated"]

_MAX_LEVELS = limit(1_000, "nesting of rules of a grammar", "400", "request", "levels")
"""llguidance recurses per rule; a thread's stack ends somewhere above 2,000 levels."""


def translated(rules: Rules, root: int, end_tokens: frozenset[int]) -> str:
    """Return an equivalent grammar for llguidance without its header line.

    ``end_tokens`` end a reply and are never part of it. RequestError if the rules are nested too
    deeply.
    """
    if _levels(rules) > _MAX_LEVELS:
        raise RequestError("failed to parse grammar: its rules are nested too deeply")
    return _Writer(rules, end_tokens).grammar(root)


_FEW = 16
"""Alternatives of a rule that are spelled out, its own and a rule's between."""

_NEVER = "never"
"""A rule that no text matches."""


def _class(characters: Characters) -> str:
    if not (characters.ranges or characters.other):  # matches nothing
        characters = Characters(((0, MAX_CODE_POINT),), other=True)
    parts = [f"{_letter_of(low)}-{_letter_of(high)}" for low, high in characters.ranges]
    return f"[^{''.join([_letter_of(0), *parts])}]" if characters.other else f"[{''.join(parts)}]"


def _letter_of(code: int) -> str:
    letter = chr(code)
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{code:X}}}"


class _Writer:
    """A writer of rules with a terminal for each character."""

    def __init__(self, rules: Rules, end_tokens: frozenset[int]) -> None:
        self._rules = rules
        self._end_tokens = end_tokens
        self._terminals: dict[Characters, str] = {}

    def grammar(self, root: int) -> str:
        rules = [
            f"r{rule}: {self._body(rule, alternatives)}\n"
            for rule, alternatives in enumerate(self._rules)
        ]
        terminals = [
            f"{name}: /{_class(characters)}/\n" for characters, name in self._terminals.items()
        ]
        return "".join([f"start: r{root}\n", f'{_NEVER}: {_NEVER} "x"\n', *rules, *terminals])

    def _body(self, rule: int, alternatives: list[Alternative]) -> str:
        """Return the body of a rule. Tail recursion becomes repetition: otherwise the parser would
        keep an item open per character.
        """
        spelled = alternatives
        if len(alternatives) <= _FEW:
            spelled = [
                alternative for items in alternatives for alternative in self._spelled(rule, items)
            ]
        again = [items[:-1] for items in spelled if items and items[-1] == Reference(rule)]
        last = [items for items in spelled if not items or items[-1] != Reference(rule)]
        if not any(again):
            return self._choice(alternatives)
        loop = self._choice([items for items in again if items])
        return f"({loop})* ({self._choice(last)})"

    def _spelled(
        self, rule: int, items: Alternative, *, through: bool = True
    ) -> Iterator[Alternative]:
        """Yield ``items`` with an end that leads back to ``rule``, also ``through`` another one,
        spelled out.
        """
        end = items[-1] if items else None
        target = None if end is None else _rule_of(end)
        between = self._rules[target] if through and target not in (None, rule) else []
        if len(between) > _FEW or not any(
            alternative and _rule_of(alternative[-1]) == rule for alternative in between
        ):
            between = []
        if (target != rule and not between) or (
            isinstance(end, Repeat) and (end.low, end.high) != (0, 1)
        ):
            yield items
            return
        if isinstance(end, Repeat):
            yield items[:-1]
        for alternative in between:
            yield from self._spelled(rule, [*items[:-1], *alternative], through=False)
        if not between:
            yield [*items[:-1], Reference(rule)]

    def _choice(self, alternatives: Iterable[Alternative]) -> str:
        choices = dict.fromkeys(" ".join(self._items(items)) or '""' for items in alternatives)
        return " | ".join(choices) or _NEVER

    def _items(self, items: Alternative) -> Iterator[str]:
        for item in items:
            if isinstance(item, Repeat):
                bounds = f"{item.low},{'' if item.high is None else item.high}"
                yield self._single(item.item) + ("*" if bounds == "0," else f"{{{bounds}}}")
            else:
                yield self._single(item)

    def _single(self, item: Characters | Token | Reference) -> str:
        if isinstance(item, Reference):
            return f"r{item.rule}"
        if isinstance(item, Characters):
            return self._terminals.setdefault(item, f"C{len(self._terminals)}")
        if item.other:
            return f"<[^{','.join(map(str, sorted(self._end_tokens | {item.number})))}]>"
        return _NEVER if item.number in self._end_tokens else f"<[{item.number}]>"


def _levels(rules: Rules) -> int:
    """Return an upper bound of the number of distinct rules on any path; all rules in or between
    circles count.
    """
    graph = {
        rule: {
            target
            for items in alternatives
            for item in items
            if (target := _rule_of(item)) is not None
        }
        for rule, alternatives in enumerate(rules)
    }
    n_levels = 0
    for _ in range(2):  # from rules that use none, then from those that none uses
        sorter = TopologicalSorter(graph)
        with suppress(CycleError):
            sorter.prepare()
        left = set(graph)
        while ready := sorter.get_ready():
            n_levels += 1
            left.difference_update(ready)
            sorter.done(*ready)
        users: dict[int, set[int]] = {rule: set() for rule in left}
        for user in left:
            for rule in graph[user] & left:
                users[rule].add(user)
        graph = users
    return n_levels + len(graph)


def _rule_of(item: Item) -> int | None:
    """Return the rule that ``item`` refers to, once or repeatedly; None for none."""
    bare = item.item if isinstance(item, Repeat) else item
    return bare.rule if isinstance(bare, Reference) else None
