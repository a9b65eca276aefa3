"""Random grammars in GBNF."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["any_grammars", "safe_grammars"]

_ATOMS = st.sampled_from(
    [
        '"a"',
        '"ab"',
        '"b c"',
        '"é"',
        '"\\n"',
        "[a-c]",
        "[^a-c]",
        "[ab0-9]",
        '[^"\\\\]',
        ".",
        '"x"',
        '" "',
        '""',
        "[]",
    ]
)
_TIMES = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"])


@st.composite
def safe_grammars(draw: st.DrawFn) -> str:
    """Draw a grammar that llama.cpp takes without harm: no rule begins with itself."""
    n_rules = draw(st.integers(1, 4))

    def atom(rule: int, depth: int) -> str:
        kind = draw(st.integers(0, 5))
        if kind == 0 and depth < 2:
            return f"({alternatives(rule, depth + 1)})"
        if kind == 1 and rule + 1 < n_rules:
            return f"r{draw(st.integers(rule + 1, n_rules - 1))}"
        return draw(_ATOMS)

    def sequence(rule: int, depth: int) -> str:
        items = []
        for _ in range(draw(st.integers(0, 3))):
            item = atom(rule, depth)
            # a loop around nothing is one that llama.cpp refuses
            loops = item not in ('""', "[]") and not item.startswith(("(", "r"))
            items.append(
                item
                + (
                    draw(_TIMES)
                    if loops
                    else ""
                    if item in ('""', "[]")
                    else draw(st.sampled_from(["", "?"]))
                )
            )
        return " ".join(items) or '""'

    def alternatives(rule: int, depth: int) -> str:
        parts = [sequence(rule, depth) for _ in range(draw(st.integers(1, 3)))]
        if depth == 0 and draw(st.booleans()):
            target = draw(st.integers(0, n_rules - 1))
            tail = draw(st.sampled_from(["", ' ")"', " [a-c]"]))
            head = draw(
                st.sampled_from(['"("', '"["', '"{"'])
            )  # more ways would be too many for llama.cpp
            parts.append(f"{head} {'root' if not target else f'r{target}'}{tail}")
        return " | ".join(parts)

    names = ["root", *(f"r{i}" for i in range(1, n_rules))]
    return "\n".join(f"{name} ::= {alternatives(i, 0)}" for i, name in enumerate(names)) + "\n"


_PIECES = st.sampled_from(
    [
        *"()[]{}|*+?.<>!\"'\\#^-,: \n",
        *(
            *(
                "::=",
                "root",
                "a",
                "b ::= ",
                'root ::= "a"\n',
                "root ::= ",
                '"a"',
                "[a-z]",
                "{1,3}",
                "{3,1}",
            ),
            *("{0}", "{2000}"),
        ),
        *(
            "<[0]>",
            "!<[5]>",
            "</think>",
            "<|im_end|>",
            "\\x41",
            "\\u00e9",
            "# x\n",
            "{99999999999999999999}",
            '""',
            "[^]",
        ),
        *(
            "b",
            "b c",
            "(a | b)*",
            "(root)",
            'root "x"',
            "\0",
            "\ud800",
            "é",
            "c ::= c\n",
            'a ::= "x" | ""\n',
        ),
    ]
)


@st.composite
def any_grammars(draw: st.DrawFn) -> str:
    """Return pieces of grammars in any order, sometimes many times over, and safe ones with pieces
    taken out and put in.
    """
    if draw(st.booleans()):
        text = draw(safe_grammars())
        for _ in range(draw(st.integers(0, 4))):
            at = draw(st.integers(0, len(text)))
            text = text[:at] + draw(_PIECES) + text[at + draw(st.integers(0, 2)) :]
        return text
    parts = draw(st.lists(_PIECES, max_size=30))
    if parts and draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(parts) - 1))
        parts[at] *= draw(st.sampled_from([10, 1000, 20_000]))
    return ("root ::= " if draw(st.booleans()) else "") + "".join(parts)
