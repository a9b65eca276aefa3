"""Translation of GBNF into an equivalent llguidance grammar.

Every character is a terminal of its own: llguidance matches the longest terminal, and GBNF has no terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

from pyctl.errors import RequestError
from pyctl.limit import limit
from pyctl.llama.gbnf_rules import Alternative, Characters, Item, Reference, Repeat, Rules, Token, bare_rule

__all__ = ["translated"]

_MAX_LEVELS = limit(1_000, "nesting of rules of a grammar", "400", "request", "levels")
"""llguidance recurses per rule; a thread's stack ends somewhere above 2,000 levels."""


def translated(rules: Rules, end_tokens: frozenset[int], n_vocab: int) -> str:
    """Return an equivalent grammar for llguidance without its header line.

    ``end_tokens`` end a reply and are never part of it. RequestError if the rules accept no text or nest too deeply.
    """
    alternatives = _useful(rules, end_tokens, n_vocab)
    if rules.root not in alternatives:
        raise RequestError("the grammar allows no reply")
    if _levels(alternatives) > _MAX_LEVELS:
        raise RequestError("failed to parse grammar: its rules are nested too deeply")
    return _Writer(alternatives, end_tokens, n_vocab).grammar(rules.root)


# -- productive and reachable rules ------------------------------------------------------------------------------------


def _useful(rules: Rules, end_tokens: frozenset[int], n_vocab: int) -> dict[int, list[Alternative]]:
    """Return the reachable rules, without alternatives that match no text."""
    users: dict[int, list[tuple[int, int]]] = {}
    missing: list[list[int]] = []  # by rule and alternative: references not yet known as possible
    possible: set[int] = set()
    waiting: list[int] = []

    def settle(rule: int) -> None:
        if rule not in possible:
            possible.add(rule)
            waiting.append(rule)

    impossible: set[tuple[int, int]] = set()
    for rule, alternatives in enumerate(rules.alternatives):
        missing.append([])
        for index, items in enumerate(alternatives):
            needed = {need for item in items if (need := _needed(item)) is not None}
            missing[rule].append(len(needed))
            for need in needed:
                users.setdefault(need, []).append((rule, index))
            if any(_never(item, end_tokens, n_vocab) for item in items):
                impossible.add((rule, index))
            elif not needed:
                settle(rule)
    while waiting:
        for rule, index in users.get(waiting.pop(), ()):
            missing[rule][index] -= 1
            if not missing[rule][index] and (rule, index) not in impossible:
                settle(rule)
    useful: dict[int, list[Alternative]] = {}
    todo = [rules.root] if rules.root in possible else []
    while todo:
        rule = todo.pop()
        if rule in useful:
            continue
        useful[rule] = [
            [item for item in items if not _is_dead(item, possible, end_tokens, n_vocab)]
            for index, items in enumerate(rules.alternatives[rule])
            if (rule, index) not in impossible and not missing[rule][index]
        ]
        todo += [target for items in useful[rule] for item in items if (target := bare_rule(item)) is not None]
    return useful


def _needed(item: Item) -> int | None:
    """Return the rule that ``item`` requires, None for none."""
    if isinstance(item, Repeat):
        return bare_rule(item) if item.low else None
    return item.rule if isinstance(item, Reference) else None


def _is_dead(item: Item, possible: set[int], end_tokens: frozenset[int], n_vocab: int) -> bool:
    """Whether ``item`` is an optional repetition of an impossible item."""
    if not isinstance(item, Repeat) or item.low:
        return False
    rule = bare_rule(item)
    return _never(item.item, end_tokens, n_vocab) or (rule is not None and rule not in possible)


def _never(item: Item, end_tokens: frozenset[int], n_vocab: int) -> bool:
    """Whether nothing in a reply can match ``item``."""
    if isinstance(item, Repeat):
        return bool(item.low) and _never(item.item, end_tokens, n_vocab)
    if isinstance(item, Characters):
        return not (item.ranges or item.other)
    if isinstance(item, Token):
        return len(end_tokens | {item.number}) >= n_vocab if item.other else item.number in end_tokens
    return False


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _class(characters: Characters) -> str:
    parts = [f"{_letter_of(low)}-{_letter_of(high)}" for low, high in characters.ranges]
    return f"[^{''.join([_letter_of(0), *parts])}]" if characters.other else f"[{''.join(parts)}]"


def _letter_of(code: int) -> str:
    letter = chr(code)
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{code:X}}}"


# -- writing -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes rules with a terminal for each character."""

    def __init__(self, rules: dict[int, list[Alternative]], end_tokens: frozenset[int], n_vocab: int) -> None:
        self._rules = rules
        self._end_tokens, self._n_vocab = end_tokens, n_vocab
        self._terminals: dict[Characters, str] = {}

    def grammar(self, root: int) -> str:
        rules = [f"r{rule}: {self._body(rule, alternatives)}\n" for rule, alternatives in self._rules.items()]
        terminals = [f"{name}: /{_class(characters)}/\n" for characters, name in self._terminals.items()]
        return "".join([f"start: r{root}\n", *rules, *terminals])

    def _body(self, rule: int, alternatives: list[Alternative]) -> str:
        """Return the body of a rule. Tail recursion becomes repetition: otherwise the parser would keep an item open
        per character."""
        again = [items[:-1] for items in alternatives if items and items[-1] == Reference(rule)]
        last = [items for items in alternatives if not items or items[-1] != Reference(rule)]
        if not any(again):
            return self._choice(last)
        loop = self._choice([items for items in again if items])
        return f"({loop})* ({self._choice(last)})"

    def _choice(self, alternatives: Iterable[Alternative]) -> str:
        return " | ".join(dict.fromkeys(" ".join(self._items(items)) or '""' for items in alternatives))

    def _items(self, items: Alternative) -> Iterator[str]:
        for item in items:
            if isinstance(item, Repeat):
                many = "*" if (item.low, item.high) == (0, None) else _times(item.low, item.high)
                yield self._single(item.item) + many
            else:
                yield self._single(item)

    def _single(self, item: Characters | Token | Reference) -> str:
        if isinstance(item, Reference):
            return f"r{item.rule}"
        if isinstance(item, Characters):
            return self._terminals.setdefault(item, f"C{len(self._terminals)}")
        if item.other:
            return f"<[^{','.join(map(str, sorted(self._end_tokens | {item.number})))}]>"
        return f"<[{item.number}]>"


def _levels(rules: dict[int, list[Alternative]]) -> int:
    """Return an upper bound of the number of distinct rules on any path; all rules in or between circles count."""
    graph = {
        rule: {target for items in alternatives for item in items if (target := bare_rule(item)) is not None}
        for rule, alternatives in rules.items()
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
