"""A restored prompt is computed as in a cold run: with --exact to the bit, by default but for near
ties.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.conftest import Server, disk_cache, lengths_on_disk
from tests.real.conftest import CODE, NAMES, Asked, Reply, ask, margin_noise
from tests.waiting import until

SYSTEM = {
    "role": "system",
    "content": "You help the keepers of a water works. Answer in one short sentence.",
}
CASES = [
    pytest.param(name, mode + rows, id=" ".join([name, *mode, *rows]))
    for name in NAMES
    for rows in ((), ("-ctk", "q8_0", "-ctv", "q8_0"))
    for mode in (("--exact",), ())
    if mode or not rows or name == "gemma3"
]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


class Conversations:
    """The requests to a server with a cache on disk and its answers, in order."""

    def __init__(self, restart: Callable[[signal.Signals | None], Server]) -> None:
        self._restart = restart
        self.server = restart(None)
        self.said: list[tuple[Asked, Reply]] = []

    def ask(self, asked: Asked) -> list[dict[str, str]]:
        """Return the reply, as the message that clients send back."""
        self.said.append((asked, reply := ask(self.server, asked)))
        return [{"role": "assistant", "content": reply.text}]

    def end(self, how: signal.Signals) -> None:
        """Once the prompt before the last is on disk, but for its end, end the server and start
        another.
        """
        until(
            lambda: max(lengths_on_disk(self.server), default=0) > self.said[-2][1].n_prompt - 128
        )
        self.server = self._restart(how)


def talk(to: Conversations, few: str, many: str) -> None:
    """Append, regenerate, branch, edit, shorten, append many lines, restart, kill."""
    opening = [SYSTEM, user(f"This is our meter.\n\n{few}\nHow many methods does it have?")]
    first = to.ask(opening)
    second = [*opening, *first, user("Which of them may raise an error?")]
    reply = to.ask(second)
    to.ask(second)
    to.ask([*opening, *first, user("What is the capital of France?")])
    to.ask([SYSTEM, user(f"{opening[1]['content']} Be brief."), *second[2:]])
    to.ask([SYSTEM, *second[3:], *reply, user("Why?")])
    raw = (
        "The water works of the north valley have three pumps.\n"
        + "The second pump was built in 1931.\n" * 8
    )
    to.ask(raw)
    to.ask(f"{raw}It was replaced in")
    long = [
        *second,
        *reply,
        user(f"Here are all of them.\n\n{many}\nWhat does the last method return?"),
    ]
    more = [*long, *to.ask(long), user("And the first?")]
    reply = to.ask(more)
    to.end(signal.SIGTERM)
    more = [*more, *reply, user("Write its name in capital letters.")]
    reply = to.ask(more)
    to.end(signal.SIGKILL)
    to.ask([*more, *reply, user("Thank you. What else does the class do?")])
    to.ask(second)


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_restored_conversations_are_those_of_a_cold_server(
    start: Callable[..., Server], tmp_path: Path, name: str, flags: tuple[str, ...]
) -> None:
    """Through edits, branches, restarts and a kill, --exact replies equal a cold server's in every
    token and probability; others part only where rounding can exchange the two best tokens.
    """
    kept = (*disk_cache(tmp_path), "--kv-cache-min-tokens", "64")
    running: list[Server] = []

    def restart(how: signal.Signals | None) -> Server:
        if how is not None:
            running[-1].process.send_signal(how)
            running[-1].process.wait(60)
        running.append(start(name, *flags, *kept))
        return running[-1]

    to = Conversations(restart)
    talk(to, *((CODE, CODE * 4) if name == "gemma3" else (CODE[:200], CODE)))
    running[-1].stop()
    assert [reply.source for _, reply in to.said[-3:-1]] == ["disk", "disk"]
    n_cached, n_prompt = (
        sum(getattr(reply, field) for _, reply in to.said[1:]) for field in ("n_cached", "n_prompt")
    )
    assert n_cached > n_prompt / 2
    cold = start(name, *flags)
    evaluated: dict[str, tuple[Asked, Reply]] = {}
    parted = []
    for number, (asked, warm) in enumerate(to.said):
        key = repr(asked)
        if key not in evaluated:
            evaluated[key] = asked, ask(cold, asked, cache_prompt=False)
        _, expected = evaluated[key]
        assert expected.n_cached == 0
        if "--exact" in flags:
            assert warm.tokens == expected.tokens, f"reply {number} to {asked}"
        elif (margin := expected.near_tie(warm)) is not None:
            parted.append((number, margin))
    cold.stop()
    noise = 0.0 if "--exact" in flags else margin_noise(start, (name, *flags), evaluated.values())
    shown = [(number, round(margin, 3)) for number, margin in parted]
    print(
        f"{' '.join([name, *flags])}: {n_cached} of {n_prompt} tokens cached, noise {noise:.3f}, "
        f"parted {shown}"
    )
    assert [(number, margin) for number, margin in parted if margin > noise] == []
