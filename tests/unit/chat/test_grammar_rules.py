"""Rules and terminals of a grammar."""

from __future__ import annotations

from pyctl.chat.grammar_rules import GrammarRules


def test_equal_bodies_are_one_rule() -> None:
    rules = GrammarRules()
    first = rules.rule('"a" "b"')
    assert rules.rule('"c"') != first == rules.rule('"a" "b"')
    assert rules.written().count('"a" "b"') == 1


def test_a_rule_may_lead_to_itself() -> None:
    rules = GrammarRules()
    name = rules.new_rule()
    rules.define(name, f'"a" {name}?')
    assert rules.written() == f'{name}: "a" {name}?\n'


def test_recursive_rules_of_one_body_are_one() -> None:
    rules = GrammarRules()
    assert rules.recursive(lambda name: f'"a" {name}?') == rules.recursive(
        lambda name: f'"a" {name}?'
    )
    assert rules.written() == 'r0: "a" r0?\n'


def test_a_choice_of_one_needs_no_rule() -> None:
    rules = GrammarRules()
    assert rules.one_of(['"a"']) == '"a"'
    assert rules.written() == ""
    assert rules.one_of(['"a"', '"b"']) == "r0"
    assert rules.written() == 'r0: "a" | "b"\n'


def test_texts_of_clients_are_quoted() -> None:
    assert GrammarRules().quoted('say "a"') == r'"say \"a\""'


def test_attributes_and_terminals() -> None:
    rules = GrammarRules()
    rules.rule('[suffix="x"]: /a/')
    rules.terminal("/b/")
    assert rules.written() == 'r0[suffix="x"]: /a/\nT0: /b/\n'
