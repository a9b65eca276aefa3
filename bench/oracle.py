"""A bound for every policy: the tokens to evaluate if the future is known and bytes are limited.

A linear programme: every state and every segment of rows may be kept, in any fraction, from one
request that contains it to the next. The bound is optimistic: it allows a state at every token of a
request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pyctl.prompt import Tokens, common_prefix

__all__ = ["min_evaluated"]


@dataclass(eq=False)
class _Node:
    """A prefix at which some request may resume; the requests that contain it have the numbers
    ``times``.
    """

    n: int
    parent: _Node | None = None
    times: list[int] = field(default_factory=list)


def min_evaluated(
    prompts: Sequence[int], known: Sequence[Tokens], budget: float, row: float, state: float
) -> float:
    """Return the minimum of tokens to evaluate for requests of ``prompts`` tokens, which with their
    replies are ``known``.

    ``budget`` is in bytes, for rows of ``row`` bytes each and states of ``state``.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    paths = _paths(prompts, known)
    costs: list[float] = []  # of each variable, negative: tokens saved
    entries: list[tuple[int, int, float]] = []  # constraint, variable, factor
    bounds: list[float] = []
    used_at: list[list[tuple[int, float]]] = [
        [] for _ in prompts
    ]  # before each request: variables and their bytes

    def variable(cost: float = 0.0) -> int:
        costs.append(cost)
        return len(costs) - 1

    def constraint(terms: Sequence[tuple[int, float]], bound: float) -> None:
        entries.extend((len(bounds), at, factor) for at, factor in terms)
        bounds.append(bound)

    kept: dict[tuple[_Node, int, str], int] = {}

    def keeping(node: _Node, until: int, kind: str, n_bytes: float) -> int | None:
        """Return the variable of keeping a state or rows from the last request before ``until``
        that contains ``node``.
        """
        since = max((time for time in node.times if time < until), default=None)
        if since is None:
            return None
        if (node, until, kind) not in kept:
            at = kept[node, until, kind] = variable()
            for time in range(since + 1, until + 1):
                used_at[time].append((at, n_bytes))
        return kept[node, until, kind]

    for time, path in enumerate(paths):
        uses: list[tuple[int, float]] = []
        through: defaultdict[_Node, list[int]] = defaultdict(
            list
        )  # who needs the rows between a node and its parent
        for node in path:
            if min(node.n, prompts[time] - 1) <= 0:
                continue
            has = keeping(node, time, "state", state)
            if has is None:
                continue
            use = variable(-float(min(node.n, prompts[time] - 1)))
            uses.append((use, 1.0))
            constraint([(use, 1.0), (has, -1.0)], 0.0)
            below: _Node | None = node
            while below is not None:
                through[below].append(use)
                below = below.parent
        for node, users in through.items():
            start = node.parent.n if node.parent is not None else 0
            rows = keeping(node, time, "rows", (node.n - start) * row)
            if rows is not None:
                constraint([*((use, 1.0) for use in users), (rows, -1.0)], 0.0)
        if uses:
            constraint(uses, 1.0)
    for used in used_at:
        if used:
            constraint(used, budget)
    total = float(sum(prompts))
    if not costs:
        return total
    which, at, factors = (np.array(column) for column in zip(*entries, strict=True))
    matrix = coo_array((factors, (which, at)), shape=(len(bounds), len(costs)))
    return total + float(linprog(costs, A_ub=matrix.tocsr(), b_ub=bounds, bounds=(0, 1)).fun)


def _paths(prompts: Sequence[int], known: Sequence[Tokens]) -> list[list[_Node]]:
    """Return for each request the nodes of the prefixes that it shares with other requests, the
    shortest first.
    """
    shared = [[common_prefix(a, b) for b in known] for a in known]
    nodes: dict[tuple[int, int], _Node] = {}
    paths: list[list[_Node]] = []
    for i in range(len(known)):
        lengths = {min(shared[i][j], prompts[max(i, j)]) for j in range(len(known)) if j != i}
        path: list[_Node] = []
        for n in sorted(lengths - {0}):
            first = next(j for j in range(len(known)) if shared[i][j] >= n or j == i)
            node = nodes.setdefault((first, n), _Node(n))
            if node.parent is None and path:
                node.parent = path[-1]
            node.times.append(i)
            path.append(node)
        paths.append(path)
    return paths
