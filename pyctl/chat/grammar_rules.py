"""The rules and terminals of a grammar, each written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

__all__ = ["GrammarRules"]


class GrammarRules:
    """Named rules and terminals. Each method returns an expression, which may be joined with
    others, a space between.
    """

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}  # names by body
        self._terminals: dict[str, str] = {}  # names by body
        self._defined: dict[str, str] = {}  # bodies by name

    def rule(self, body: str) -> str:
        """Return the name of a rule that stands for ``body``."""
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        """Return the name of a terminal that stands for ``body``, in which terminals can be joined
        by & and ~.
        """
        return self._terminals.setdefault(body, f"T{len(self._terminals)}")

    def new_rule(self) -> str:
        """Return the name of a rule whose body `define` gives later, so that it may lead to
        itself.
        """
        name = f"d{len(self._defined)}"
        self._defined[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Give the rule ``name`` its body."""
        self._defined[name] = body

    def recursive(self, body: Callable[[str], str]) -> str:
        """Return the name of a rule that stands for ``body`` of this name, which makes no other
        rule.
        """
        for text, name in self._rules.items():
            if text == body(name):
                return name
        return self.rule(body(f"r{len(self._rules)}"))

    def quoted(self, text: str) -> str:
        """Return ``text`` of a client, character by character."""
        return json.dumps(text)

    def one_of(self, choices: Sequence[str]) -> str:
        """Return one of the expressions ``choices``."""
        return self.rule(" | ".join(choices)) if len(choices) > 1 else choices[0]

    def written(self) -> str:
        """Return all rules and terminals, a line for each."""
        lines = []
        for body, name in self._rules.items():
            lines.append(f"{name}{body}" if body.startswith("[") else f"{name}: {body}")
        lines += [f"{name}: {body}" for name, body in self._defined.items()]
        lines += [f"{name}: {body}" for body, name in self._terminals.items()]
        return "".join(f"{line}\n" for line in lines)
