"""Translation of GBNF into equivalent llguidance grammars.

Regular grammars become one regular expression, which is cheap per token. In recursive grammars every character is a
terminal of its own: llguidance matches the longest terminal, and GBNF has no terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pyctl.errors import RequestError
from pyctl.limit import limit
from pyctl.llama.gbnf_rules import (
    Alternative,
    Characters,
    Item,
    Ranges,
    Reference,
    Repeat,
    Rules,
    Token,
    bare_rule,
)

__all__ = ["translated"]

_MAX_PATTERN = 40_000
"""Characters of a regular expression, and about as many states of its automaton."""
_MAX_PATTERN_DEPTH = 60
_MAX_LEVELS = limit(1_000, "nesting of rules of a grammar", "400", "request", "levels")
"""llguidance recurses per rule; a thread's stack ends somewhere above 2,000 levels."""


def translated(rules: Rules, end_tokens: frozenset[int], n_vocab: int) -> list[str]:
    """Return equivalent grammars for llguidance without its header line, to try in order if it refuses one.

    ``end_tokens`` end a reply and are never part of it. RequestError if the rules accept no text.
    """
    alternatives = _useful(rules, end_tokens, n_vocab)
    if rules.root not in alternatives:
        raise RequestError("the grammar allows no reply")
    found = []
    pattern = _Patterns(alternatives).of(rules.root)
    if pattern is not None:
        found.append(f"start: TEXT\nTEXT: /{pattern.text}/\n" if pattern.text else 'start: ""\n')
    if _levels(alternatives, rules.root) <= _MAX_LEVELS:
        found.append(_Writer(alternatives, end_tokens, n_vocab).grammar(rules.root))
    if not found:
        raise RequestError("failed to parse grammar: its rules are nested too deeply")
    return found


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
        return not item.ranges
    if isinstance(item, Token):
        return len(end_tokens | {item.number}) >= n_vocab if item.other else item.number in end_tokens
    return False


# -- regular expressions -----------------------------------------------------------------------------------------------


class _Pattern(NamedTuple):
    """A regular expression; ``size`` approximates the states of its automaton."""

    text: str
    size: int
    depth: int = 0


_EMPTY = _Pattern("", 0)


class _Patterns:
    """Regular expressions of rules, within the limits of length and depth."""

    def __init__(self, rules: dict[int, list[Alternative]]) -> None:
        self._rules = rules
        self._known: dict[int, _Pattern | None] = {}

    def of(self, rule: int) -> _Pattern | None:
        """Return the expression equivalent to ``rule``; None if not regular or too long."""
        if rule not in self._known:
            for circle in _circles(self._rules, rule):
                self._solve(circle)
        return self._known[rule]

    def _solve(self, circle: list[int]) -> None:
        """Solve the mutually recursive rules ``circle``, given the expressions of all other rules they use."""
        inside = frozenset(circle)
        self._known.update(dict.fromkeys(circle))
        for backwards in (False, True):
            equations = self._equations(circle, inside, backwards)
            if equations is not None:
                self._known.update(_solved(equations, backwards))
                return

    def _equations(self, circle: list[int], inside: frozenset[int], backwards: bool) -> _Equations | None:
        """Return linear equations: for each rule the prefix of each target rule of ``circle``; None: no target.

        Requires that target rules occur only at the end of alternatives, with ``backwards`` only at the beginning;
        None if not.
        """
        equations: _Equations = {}
        for rule in circle:
            terms: dict[int | None, list[_Pattern]] = {}
            for items in self._rules[rule]:
                last = (items[0] if backwards else items[-1]) if items else None
                target = bare_rule(last) if last is not None else None
                if target not in inside:
                    target = None
                elif isinstance(last, Repeat) and (last.low, last.high) != (0, 1):
                    return None
                others = items if target is None else items[1:] if backwards else items[:-1]
                pattern = self._sequence(others, inside)
                if pattern is None:
                    return None
                terms.setdefault(target, []).append(pattern)
                if target is not None and isinstance(last, Repeat):
                    terms.setdefault(None, []).append(pattern)
            sums = {target: _any_of(patterns) for target, patterns in terms.items()}
            known = {target: pattern for target, pattern in sums.items() if pattern is not None}
            if len(known) < len(sums):
                return None
            equations[rule] = known
        return equations

    def _sequence(self, items: Iterable[Item], inside: frozenset[int]) -> _Pattern | None:
        parts = []
        for item in items:
            part = self._item(item, inside)
            if part is None:
                return None
            parts.append(part)
        return _joined(parts)

    def _item(self, item: Item, inside: frozenset[int]) -> _Pattern | None:
        if isinstance(item, Repeat):
            inner = self._item(item.item, inside)
            return None if inner is None else _repeated(inner, item.low, item.high)
        if isinstance(item, Reference):
            return None if item.rule in inside else self._known[item.rule]
        return _Pattern(_class(item.ranges), 1) if isinstance(item, Characters) else None


_Equations = dict[int, dict["int | None", _Pattern]]


def _solved(equations: _Equations, backwards: bool) -> dict[int, _Pattern | None]:
    """Solve linear ``equations`` by elimination with Arden's rule."""
    failed: dict[int, _Pattern | None] = dict.fromkeys(equations)
    order = list(equations)
    for index, rule in enumerate(order):
        terms = equations[rule]
        loop = terms.pop(rule, None)
        if loop is not None:
            again = _repeated(loop, 0, None)
            for target, pattern in terms.items():
                joined = _joined((pattern, again) if backwards else (again, pattern)) if again is not None else None
                if joined is None:
                    return failed
                terms[target] = joined
        for other in order[index + 1 :]:
            prefix = equations[other].pop(rule, None)
            if prefix is not None and not _put_in(equations[other], prefix, terms, backwards):
                return failed
    solved: dict[int, _Pattern | None] = {}
    for rule in reversed(order):
        terms = equations[rule]
        for target in [target for target in terms if target is not None]:
            value = solved[target]
            prefix = terms.pop(target)
            if value is None or not _put_in(terms, prefix, {None: value}, backwards):
                return failed
        solved[rule] = terms.get(None)
    return solved


def _put_in(
    terms: dict[int | None, _Pattern], prefix: _Pattern, other: dict[int | None, _Pattern], backwards: bool
) -> bool:
    for target, pattern in other.items():
        joined = _joined((pattern, prefix) if backwards else (prefix, pattern))
        both = [joined] if target not in terms else [terms[target], joined]
        found = _any_of([each for each in both if each is not None]) if joined is not None else None
        if found is None:
            return False
        terms[target] = found
    return True


def _bounded(pattern: _Pattern) -> _Pattern | None:
    fits = max(pattern.size, len(pattern.text)) <= _MAX_PATTERN and pattern.depth <= _MAX_PATTERN_DEPTH
    return pattern if fits else None


def _joined(parts: Sequence[_Pattern]) -> _Pattern | None:
    """Concatenate ``parts``; None if too long."""
    if sum(len(part.text) for part in parts) > _MAX_PATTERN:
        return None
    depth = max((part.depth for part in parts), default=0)
    return _bounded(_Pattern("".join(part.text for part in parts), sum(part.size for part in parts), depth))


def _any_of(parts: Sequence[_Pattern]) -> _Pattern | None:
    if len(parts) == 1:
        return parts[0]
    if sum(len(part.text) for part in parts) > _MAX_PATTERN:
        return None
    texts = dict.fromkeys(part.text for part in parts)
    depth = max(part.depth for part in parts) + 1
    return _bounded(_Pattern(f"(?:{'|'.join(texts)})", sum(part.size for part in parts), depth))


def _repeated(part: _Pattern, low: int, high: int | None) -> _Pattern | None:
    if not part.text:
        return _EMPTY
    text = part.text if part.size == 1 and not part.depth else f"(?:{part.text})"
    times = "*" if (low, high) == (0, None) else "+" if (low, high) == (1, None) else _times(low, high)
    return _bounded(_Pattern(f"{text}{times}", part.size * max(low, high or 0, 1), part.depth + 1))


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _letter_of(ranges[0][0])
    parts = (_letter_of(low) if low == high else f"{_letter_of(low)}-{_letter_of(high)}" for low, high in ranges)
    return f"[{''.join(parts)}]"


def _letter_of(code: int) -> str:
    letter = chr(code)
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{code:X}}}"


# -- rules -------------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes rules with a terminal for each character."""

    def __init__(self, rules: dict[int, list[Alternative]], end_tokens: frozenset[int], n_vocab: int) -> None:
        self._rules = rules
        self._end_tokens, self._n_vocab = end_tokens, n_vocab
        self._terminals: dict[Ranges, str] = {}

    def grammar(self, root: int) -> str:
        rules = [f"r{rule}: {self._body(rule, alternatives)}\n" for rule, alternatives in self._rules.items()]
        terminals = [f"{name}: /{_class(ranges)}/\n" for ranges, name in self._terminals.items()]
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
            return self._terminals.setdefault(item.ranges, f"C{len(self._terminals)}")
        if item.other:
            return f"<[^{','.join(map(str, sorted(self._end_tokens | {item.number})))}]>"
        return f"<[{item.number}]>"


def _circles(rules: dict[int, list[Alternative]], root: int) -> Iterator[list[int]]:
    """Yield the strongly connected components of the rules under ``root``, callees first (Tarjan's algorithm)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    open_rules: set[int] = set()
    calls: list[tuple[int, Iterator[int]]] = []

    def enter(rule: int) -> None:
        index[rule] = low[rule] = len(index)
        stack.append(rule)
        open_rules.add(rule)
        held = (target for items in rules[rule] for item in items if (target := bare_rule(item)) is not None)
        calls.append((rule, held))

    enter(root)
    while calls:
        rule, held = calls[-1]
        for target in held:
            if target not in index:
                enter(target)
                break
            if target in open_rules:
                low[rule] = min(low[rule], index[target])
        else:
            calls.pop()
            if calls:
                low[calls[-1][0]] = min(low[calls[-1][0]], low[rule])
            if low[rule] == index[rule]:
                circle: list[int] = []
                while rule not in circle[-1:]:
                    circle.append(stack.pop())
                open_rules.difference_update(circle)
                yield circle


def _levels(rules: dict[int, list[Alternative]], root: int) -> int:
    """Return an upper bound of the number of distinct rules on any path from ``root``."""
    levels: dict[int, int] = {}
    for circle in _circles(rules, root):
        held = (bare_rule(item) for rule in circle for items in rules[rule] for item in items)
        below = max((levels.get(target, 0) for target in held if target is not None), default=0)
        levels.update(dict.fromkeys(circle, below + len(circle)))
    return levels[root]
