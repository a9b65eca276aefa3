"""A grammar in GBNF as one for llguidance that accepts the same texts.

What is regular becomes one regular expression, which costs next to nothing at each token. Where rules hold each other,
every character is a terminal of its own: the library takes the longest terminal that fits, and GBNF knows no terminals.
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
"""Characters of a regular expression, and about as many states of what it becomes."""
_MAX_PATTERN_DEPTH = 60
_MAX_LEVELS = limit(1_000, "rules of a grammar that hold each other, one in the next", "400", "request", "levels")
"""The library follows one rule to the next on the stack of a thread, which ends somewhere beyond 2,000."""


def translated(rules: Rules, end_tokens: frozenset[int], n_vocab: int) -> list[str]:
    """Grammars for llguidance, without its header line, each of which accepts what ``rules`` accept.

    If the first is too much for the library, the next may not be. ``end_tokens`` end a reply and are never a part of
    it. RequestError if no text at all is accepted.
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


# -- what may come up in a reply ---------------------------------------------------------------------------------------


def _useful(rules: Rules, end_tokens: frozenset[int], n_vocab: int) -> dict[int, list[Alternative]]:
    """The rules that may come up in a text, without the alternatives that no text follows."""
    users: dict[int, list[tuple[int, int]]] = {}
    missing: list[list[int]] = []  # of each alternative of each rule: references that are not known to be possible
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
    """The rule without which ``item`` cannot be."""
    if isinstance(item, Repeat):
        return bare_rule(item) if item.low else None
    return item.rule if isinstance(item, Reference) else None


def _is_dead(item: Item, possible: set[int], end_tokens: frozenset[int], n_vocab: int) -> bool:
    """Whether ``item`` is a repetition of what cannot be, as it may be where it needs none."""
    if not isinstance(item, Repeat) or item.low:
        return False
    rule = bare_rule(item)
    return _never(item.item, end_tokens, n_vocab) or (rule is not None and rule not in possible)


def _never(item: Item, end_tokens: frozenset[int], n_vocab: int) -> bool:
    """Whether nothing in a reply can be ``item``."""
    if isinstance(item, Repeat):
        return bool(item.low) and _never(item.item, end_tokens, n_vocab)
    if isinstance(item, Characters):
        return not item.ranges
    if isinstance(item, Token):
        return len(end_tokens | {item.number}) >= n_vocab if item.other else item.number in end_tokens
    return False


# -- regular expressions -----------------------------------------------------------------------------------------------


class _Pattern(NamedTuple):
    """A regular expression; ``size`` is about what it takes to run it."""

    text: str
    size: int
    depth: int = 0


_EMPTY = _Pattern("", 0)


class _Patterns:
    """Regular expressions of rules, as far as there are any that are not too long."""

    def __init__(self, rules: dict[int, list[Alternative]]) -> None:
        self._rules = rules
        self._known: dict[int, _Pattern | None] = {}

    def of(self, rule: int) -> _Pattern | None:
        """The expression for what ``rule`` accepts; None if there is none."""
        if rule not in self._known:
            for circle in _circles(self._rules, rule):
                self._solve(circle)
        return self._known[rule]

    def _solve(self, circle: list[int]) -> None:
        """Find the expressions of rules that hold each other, given those of all others that they hold."""
        inside = frozenset(circle)
        self._known.update(dict.fromkeys(circle))
        for backwards in (False, True):
            equations = self._equations(circle, inside, backwards)
            if equations is not None:
                self._known.update(_solved(equations, backwards))
                return

    def _equations(self, circle: list[int], inside: frozenset[int], backwards: bool) -> _Equations | None:
        """Each rule as a sum: what stands before a rule of the circle, by that rule, and under None what stands alone.

        That is possible if these rules stand at the end of alternatives only, or ``backwards`` at the beginning only.
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
    """The solution of linear ``equations``: one rule after the other is put into all others (Arden's rule)."""
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
    """One after the other."""
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
        """A rule that goes on with itself at its end is written as a repetition: otherwise each of its characters
        would stay open until the last one."""
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
    """The rules under ``root``, those together that hold each other, every one after what it holds (Tarjan)."""
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
    """On no way from one rule to the next, each for the first time, are there more than so many."""
    levels: dict[int, int] = {}
    for circle in _circles(rules, root):
        held = (bare_rule(item) for rule in circle for items in rules[rule] for item in items)
        below = max((levels.get(target, 0) for target in held if target is not None), default=0)
        levels.update(dict.fromkeys(circle, below + len(circle)))
    return levels[root]
