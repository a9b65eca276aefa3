"""The prefix tree finds the parents, children and users of segments that a plain search finds."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.prefix_tree import ConversationEnd, PrefixTree
from tests.unit.cache.grown import SHAPES, Held, grown


@given(SHAPES, st.lists(st.integers(0, 39)))
def test_the_tree_knows_what_a_plain_search_finds(
    shapes: list[tuple[int, int, bool]], gone: list[int]
) -> None:
    """After each insertion and removal, the parents, children and snapshots of a segment are those
    that a search through all snapshots finds, in whatever order they came and went.
    """
    tree: PrefixTree[int] = PrefixTree()
    held: dict[int, Held] = {}
    steps: list[tuple[str, int]] = [("add", key) for key in range(len(shapes))]
    for at, key in enumerate(gone):
        steps.insert(min(len(steps), 2 * at + 1), ("remove", key))
    everything = grown(shapes)
    for verb, key in steps:
        if verb == "remove" and key in held:
            tree.remove(key)
            del held[key]
        elif verb == "add":
            tree.add(key, everything[key].n, everything[key].chain.items(), 0.0)
            held[key] = everything[key]
        assert {node.key for node in tree} == held.keys()
        for node in tree:
            one = held[node.key]
            assert (node.parent.n if node.parent is not None else 0) == one.below(held)
            deeper = any(other.stems_from(one) for other in held.values())
            assert bool(node.children) == deeper
        for node in tree:
            node.expected_resumes = 1.0
        weights = tree.expected_resumes()
        for segment in {segment for one in held.values() for segment in one.chain}:
            needing = {key for key, one in held.items() if segment in one.chain}
            assert {node.key for node in tree.through(segment)} == needing
            assert weights[segment] == len(needing)


@given(SHAPES, st.randoms(use_true_random=False))
def test_the_order_of_additions_makes_no_difference(
    shapes: list[tuple[int, int, bool]], random: Random
) -> None:
    """Equal keys of a segment name one segment, such as the names of files in two records."""
    everything = dict(enumerate(grown(shapes)))
    order = list(everything)
    random.shuffle(order)
    tree: PrefixTree[int] = PrefixTree()
    for key in order:
        chain = [(("segment", segment), last) for segment, last in everything[key].chain.items()]
        tree.add(key, everything[key].n, chain, 0.0)
    for node in tree:
        n_parent = node.parent.n if node.parent is not None else 0
        assert n_parent == everything[node.key].below(everything)
        assert all(child.parent is node for child in node.children)


def fork() -> PrefixTree[str]:
    """Return a tree of a beginning of 10 tokens with two continuations."""
    tree: PrefixTree[str] = PrefixTree()
    tree.add("root", 10, [("a", 10)], 1.0)
    tree.add("left", 20, [("b", 20), ("a", 10)], 2.0)
    tree.add("right", 30, [("c", 30), ("a", 10)], 3.0)
    return tree


def test_a_use_counts_and_moves_the_end_of_a_conversation() -> None:
    tree = fork()
    tree["root"].own.n_opening = 7
    tree.touch("root", 9.0)
    node = tree["root"]
    assert node.hits == 1
    assert node.used == 9.0
    assert node.own == ConversationEnd(9.0, 10, 7)


def test_a_removed_snapshot_hands_its_children_and_its_end_to_its_parent() -> None:
    tree = fork()
    tree.add("deep", 40, [("d", 40), ("c", 30), ("a", 10)], 4.0)
    node = tree["right"]
    tree.remove("right")
    assert not tree.has(node)
    assert "right" not in tree
    assert tree["deep"].parent is tree["root"]
    assert tree["root"].own == ConversationEnd(3.0, 30)


def test_an_older_end_does_not_replace_that_of_the_parent() -> None:
    tree = fork()
    tree.touch("root", 9.0)
    tree.remove("left")
    assert tree["root"].own == ConversationEnd(9.0, 10)


def test_the_search_goes_below_matching_snapshots_only() -> None:
    tree = fork()
    asked = []

    def matches(key: str) -> bool:
        asked.append(key)
        return key != "root"

    assert tree.matching(matches) == []
    assert asked == ["root"]
    assert sorted(tree.matching(lambda key: True)) == ["left", "right", "root"]


def test_those_whose_neighbours_changed_are_noted() -> None:
    tree = fork()
    tree.changed.clear()
    tree.add("middle", 15, [("b", 15), ("a", 10)], 5.0)
    assert tree.changed == {tree["middle"], tree["root"], tree["left"]}
    tree.changed.clear()
    tree.remove("middle")
    assert tree.changed == {tree["root"], tree["left"]}
