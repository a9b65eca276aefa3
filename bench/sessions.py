"""Conversations in the shapes of programs that use a server, for a real server or a simulation.

Lengths are characters; a tiny model has a token for each, so heads and results are as long in
tokens as in the programs they are modelled on. All words are replaced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

from bench.common import words

__all__ = [
    "AGENTS",
    "BUDGETED",
    "PLAIN",
    "WORKLOADS",
    "Answers",
    "Message",
    "Reply",
    "Workload",
    "text",
]

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """Lengths of a model's reasoning, reply and call, in characters. A real model writes as many in
    one go.
    """

    said: int = 100
    thought: int = 0
    called: int = 0

    @property
    def n(self) -> int:
        return self.said + self.thought + self.called


PLAIN = Reply()


class Answers(Protocol):
    """Answers chat requests: a server or a simulation."""

    def chat(
        self, messages: Sequence[Message], reply: Reply = ..., tools: Sequence[Message] = ...
    ) -> Message:
        """Send ``messages`` and return the assistant's message, with its reasoning as
        ``reasoning_content``.
        """

    def complete(self, prompt: str, reply: Reply = ...) -> str:
        """Return the continuation of a raw prompt."""

    def restart(self) -> None:
        """End the server in good order and start it again."""


Workload: TypeAlias = Callable[[Answers], None]


@cache
def text(seed: object, n: int) -> str:
    """Return ``n`` characters in lines, another text for each seed."""
    rng = random.Random(repr((seed, n)))
    plain = words(repr(seed), n)
    lines = []
    while plain:
        cut = rng.randrange(20, 100)
        lines.append(plain[:cut])
        plain = plain[cut + 1 :]
    return "\n".join(lines)


def system(seed: object, n: int = 3000) -> Message:
    return {"role": "system", "content": text(("system", seed), n)}


def user(seed: object, n: int = 240) -> Message:
    return {"role": "user", "content": text(("user", seed), n)}


def said(seed: object, n: int = 48) -> Message:
    return {"role": "assistant", "content": text(("said", seed), n)}


def result(seed: object, n: int) -> Message:
    return {"role": "tool", "tool_call_id": "call", "content": text(("result", seed), n)}


def tools(program: str, n: int, n_each: int) -> list[Message]:
    """Return ``n`` functions of one program with descriptions of ``n_each`` characters."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"{program}_{i}",
                "description": text((program, i), n_each),
                "parameters": {"type": "object", "properties": {"value": {"type": "string"}}},
            },
        }
        for i in range(n)
    ]


def named(*workloads: Workload) -> dict[str, Workload]:
    return {workload.__name__.strip("_"): workload for workload in workloads}


def turn(
    server: Answers, conversation: list[Message], message: Message, reply: Reply = PLAIN
) -> None:
    """Append ``message`` and the reply to it to ``conversation``."""
    conversation.append(message)
    conversation.append(server.chat(conversation, reply))


def talked(server: Answers, n: int) -> list[Message]:
    """Return a conversation of ``n`` short turns."""
    conversation = [system("a")]
    for i in range(n):
        turn(server, conversation, user(i))
    return conversation


# -- shapes
# ----------------------------------------------------------------------------------


def growing(server: Answers) -> None:
    talked(server, 10)


def shortened(server: Answers) -> None:
    conversation = talked(server, 6)[:3]
    turn(server, conversation, user("follow-up"))
    turn(server, conversation, user("and another"))


def alternating(server: Answers) -> None:
    conversations = [[system("shared")] for _ in range(3)]
    for round_ in range(5):
        for i, conversation in enumerate(conversations):
            turn(server, conversation, user((i, round_)))


def fan_out(server: Answers) -> None:
    for i in range(12):
        turn(server, [system("long", 8000)], user(i))


def dynamic_tail(server: Answers) -> None:
    for i in range(12):
        question = {"role": "user", "content": f"{text('stable', 400)}\n{text(('found', i), 900)}"}
        turn(
            server,
            [system("rag"), user("rules", 600), {"role": "assistant", "content": "Understood."}],
            question,
        )


def branching(server: Answers) -> None:
    conversation = talked(server, 5)
    edited = conversation[:5]
    for i in range(3):
        turn(server, edited, user(("edited", i)))
    turn(server, conversation, user("back on the first branch"))
    turn(server, edited, user("and on the second"))


def titles(server: Answers) -> None:
    conversation = [system("a")]
    for i in range(8):
        turn(server, conversation, user(i))
        title = {
            "role": "user",
            "content": "Title for: " + conversation[-2]["content"] + conversation[-1]["content"],
        }
        server.chat([system("title writer", 300), title])


def regenerate(server: Answers) -> None:
    conversation = talked(server, 1)
    for _ in range(4):
        server.chat([*conversation, user(1)])


def tool_loop(server: Answers) -> None:
    conversation = [system("agent", 6000), user("task", 500)]
    for i in range(20):
        conversation += [server.chat(conversation), result(i, 60)]


def sub_agents(server: Answers) -> None:
    main = [system("agent", 6000)]
    for i in range(3):
        turn(server, main, user(i))
        for j in range(3):
            helper = [system("helper", 2000)]
            for k in range(3):
                turn(server, helper, user((i, j, k)))
        turn(server, main, user(("result", i)))


WORKLOADS = named(
    *(growing, shortened, alternating, fan_out, sub_agents),
    *(dynamic_tail, branching, titles, regenerate, tool_loop),
)


# -- more than a budget holds
# ----------------------------------------------------------------------------------


def three_agents(server: Answers, n_steps: int = 48, *, in_turn: bool = False) -> None:
    """Run three agents on one head that take turns as they please; now and then one exchange is
    undone and sent again.
    """
    rng = random.Random(3)
    agents = [[system("head", 6000), user(("task", i), 400)] for i in range(3)]
    calls = Reply(said=40, thought=120, called=80)
    for step in range(n_steps):
        at = step % 3 if in_turn else rng.randrange(3)
        agent = agents[at]
        if step % 12 == 11 and len(agent) > 6:
            del agent[-2:]
            agent[-1] = result((at, step, "other"), rng.randrange(1000, 4000))
        agent.append(server.chat(agent, calls))
        if step % 10 == 9:
            agent.append(user((at, step), 200))
        else:
            agent.append(result((at, step), rng.randrange(1000, 4000)))


def long_agents(server: Answers) -> None:
    """Run three agents one after the other, until each has 90,000 tokens."""
    three_agents(server, 64, in_turn=True)


def visits(server: Answers) -> None:
    """Hold eight conversations of some length on separate heads; people return to one of them and
    stay a while.
    """
    rng = random.Random(5)
    people = [[system(("person", i), 1500), user((i, "first"), 800)] for i in range(8)]
    for visit in range(24):
        at = min(int(rng.expovariate(0.4)), 7)
        conversation = people[(at + visit // 6) % 8]
        for i in range(rng.randrange(1, 4)):
            if conversation[-1]["role"] == "assistant":
                conversation.append(user((at, visit, i), rng.randrange(100, 900)))
            conversation.append(server.chat(conversation, Reply(said=300)))


def long_and_short(server: Answers) -> None:
    """Shorten and resume a long conversation with documents among short questions."""
    main: list[Message] = [system("reader", 2000)]
    for i in range(6):
        turn(server, main, user(("document", i), 6000), Reply(said=200))
    for i in range(4):
        for j in range(5):
            turn(server, [system("helper", 1200)], user((i, j), 300))
        shorter = main[: len(main) - 4 * (i % 2) - 2]
        turn(server, shorter, user(("again", i), 300), Reply(said=200))
    turn(server, main, user("last", 300))


BUDGETED = named(three_agents, visits, long_and_short)
LONG = named(long_agents)
"""Contexts of a whole card, which take minutes."""


# -- programs
# ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Parts of the prompt that differ between two sessions of a program: day, folder and git's
    state.
    """

    day: str
    folder: str
    git: str

    @property
    def environment(self) -> str:
        return (
            f"<env>\nWorking directory: /home/someone/{self.folder}\nIs directory a git repo: Yes\n"
            f"Platform: linux\nToday's date: {self.day}\n</env>"
        )

    @property
    def status(self) -> str:
        return f"gitStatus: the state at the start.\nBranch: main\n{text(('git', self.git), 240)}"


def places() -> Iterator[Place]:
    """Yield sessions in their order: two in one folder on one day, the next day, another folder,
    the first again.
    """
    yield Place("2026-03-02", "parser", "clean")
    yield Place("2026-03-02", "parser", "two files")
    yield Place("2026-03-03", "parser", "three files")
    yield Place("2026-03-03", "website", "clean")
    yield Place("2026-03-03", "parser", "four files")


def loop(
    server: Answers,
    messages: list[Message],
    seed: object,
    steps: int,
    listed: Sequence[Message] = (),
    *,
    reply: Reply = Reply(said=40, thought=120, called=70),
    keeps: bool = True,
    results: tuple[int, int] = (300, 2500),
) -> None:
    """Have the model call tools until it is done; with ``keeps`` its reasoning is sent back."""
    rng = random.Random(repr(seed))
    for i in range(steps):
        last = i == steps - 1
        answer = dict(server.chat(messages, Reply(200, reply.thought) if last else reply, listed))
        if not keeps:
            answer.pop("reasoning_content", None)
        messages.append(answer)
        if not last:
            messages.append(result((seed, i), rng.randrange(*results)))


def claude_code(server: Answers) -> None:
    """Send a title, a long head with the environment late in it, reminders in the first message, a
    sub-agent.
    """
    listed = tools("claude", 16, 700)
    helpers = tools("claude", 12, 700)
    for i, place in enumerate(places()):
        title = [{"role": "system", "content": text("claude title", 900)}, user((i, "task"), 160)]
        server.chat(title, Reply(20))
        head = (
            f"{text('claude', 7000)}\n{place.environment}\n"
            f"{text('claude later', 900)}\n{place.status}"
        )
        reminder = (
            f"<system-reminder>\n{text('CLAUDE.md', 1800)}\nToday's date is "
            f"{place.day}.\n</system-reminder>\n"
        )
        messages = [{"role": "system", "content": head}]
        messages.append({"role": "user", "content": reminder + text((i, "task"), 160)})
        loop(server, messages, (i, "main"), 5, listed)
        helper = f"{text('claude helper', 2500)}\n{place.environment}\n{place.status}"
        loop(
            server,
            [{"role": "system", "content": helper}, user((i, "search"), 200)],
            (i, "helper"),
            4,
            helpers,
        )
        messages.append(user((i, "go on"), 90))
        loop(server, messages, (i, "more"), 4, listed)


def codex(server: Answers) -> None:
    """Send instructions, then a separate message that describes the folder; all reasoning is sent
    back.
    """
    listed = tools("codex", 7, 600)
    for i, place in enumerate(places()):
        messages = [{"role": "system", "content": text("codex", 9000)}]
        rules = (
            "# AGENTS.md instructions for "
            f"/home/someone/{place.folder}\n{text(('AGENTS.md', place.folder), 1500)}"
        )
        messages.append({"role": "user", "content": rules})
        messages.append(
            {
                "role": "user",
                "content": f"<environment_context>\n{place.environment}\n</environment_context>",
            }
        )
        for j in range(2):
            messages.append(user((i, j), 150))
            loop(server, messages, (i, j), 5, listed)


def opencode(server: Answers) -> None:
    """Send a title with its own head; the environment in the middle of the head, rules of the
    folder after it.
    """
    listed = tools("opencode", 10, 1000)
    for i, place in enumerate(places()):
        title = [{"role": "system", "content": text("opencode title", 1400)}]
        title.append({"role": "user", "content": "Generate a title for this conversation:\n"})
        server.chat(
            [*title[:1], {"role": "user", "content": title[1]["content"] + text((i, "task"), 200)}],
            Reply(20),
        )
        head = (
            f"{text('opencode', 5000)}\n{place.environment}\n{text(('rules', place.folder), 1800)}"
        )
        messages = [{"role": "system", "content": head}, user((i, "task"), 200)]
        loop(server, messages, i, 6, listed)
        messages.append(user((i, "go on"), 80))
        loop(server, messages, (i, "more"), 4, listed)


def cline(server: Answers) -> None:
    """Send heads with the folder in the middle, and messages that end with the editor's present
    state.
    """
    for i, place in enumerate(places()):
        folder = f"(the current working directory /home/someone/{place.folder})"
        head = (
            f"{text('cline', 4000)}\n{folder}\n{text('cline tools', 6000)}\n"
            f"{folder}\n{text('cline rules', 2500)}"
        )
        messages: list[Message] = [{"role": "system", "content": head}]
        for j in range(6):
            details = f"<environment_details>\n{text((place, j), 500)}\n</environment_details>"
            asked = (
                text((i, j, "task"), 300)
                if j == 0
                else f"[read_file] Result:\n{text((i, j), 1500)}"
            )
            messages.append({"role": "user", "content": f"{asked}\n{details}"})
            messages.append(server.chat(messages, Reply(said=150, thought=100)))


def qwen_code(server: Answers) -> None:
    """Send a long head without places in it; the folder and the day are a first exchange."""
    listed = tools("qwen", 15, 500)
    for i, place in enumerate(places()):
        messages = [{"role": "system", "content": text("qwen", 8000)}]
        tree = (
            f"Today's date is {place.day}.\nFolder: "
            f"{place.folder}\n{text(('tree', place.folder), 1200)}"
        )
        messages += [
            {"role": "user", "content": tree},
            {"role": "assistant", "content": "Got it. Thanks!"},
        ]
        for j in range(2):
            messages.append(user((i, j), 120))
            loop(server, messages, (i, j), 4, listed, keeps=False)


def aider(server: Answers) -> None:
    """Send files and reminders after the history, so that new messages go into the middle."""
    for i, place in enumerate(places()):
        head = [
            system("aider", 2500),
            *(user(("example", k), 200) if k % 2 == 0 else said(k, 300) for k in range(4)),
        ]
        map_ = {
            "role": "user",
            "content": f"Here are summaries of files:\n{text(('map', place.folder), 2500)}",
        }
        files = [
            {"role": "user", "content": f"I added these files:\n{text(('files', i), 2000)}"},
            said("ok", 30),
        ]
        history: list[Message] = []
        for j in range(4):
            asked = {
                "role": "user",
                "content": f"{text((i, j), 200)}\n{text('aider reminder', 700)}",
            }
            answer = server.chat(
                [*head, map_, said("I see", 30), *history, *files, asked], Reply(said=400)
            )
            history += [user((i, j), 200), {"role": "assistant", "content": answer["content"]}]
            files[0] = {
                "role": "user",
                "content": (
                    "I added these "
                    f"files:\n{text(('files', i, j), 300)}\n{text(('files', i), 1700)}"
                ),
            }


def continue_(server: Answers) -> None:
    """Send chats in an editor, and completions whose prompts have the text before and after a
    cursor that moves.
    """
    listed = tools("continue", 8, 400)
    for i, place in enumerate(places()):
        messages = [system("continue", 1300)]
        for j in range(2):
            code = f"```{place.folder}/main.py\n{text(('code', i), 900)}\n```\n{text((i, j), 100)}"
            messages.append({"role": "user", "content": code})
            loop(server, messages, (i, j), 2, listed, keeps=False)
        before = text(("before", place.folder), 1600)
        after = text(("after", place.folder), 700)
        for j in range(6):
            typed = text(("typed", i), 60 + 25 * j)
            server.complete(
                f"<|fim_prefix|>{before}\n{typed}<|fim_suffix|>{after}<|fim_middle|>", Reply(30)
            )


def mini_swe(server: Answers) -> None:
    """Send a short head, the task with the rules in one long message, then command and output, all
    as plain text.
    """
    for i, place in enumerate(places()):
        task = (
            "Please solve this "
            f"issue:\n{text((i, 'issue'), 900)}\n{text('mini rules', 2500)}\n{place.environment}"
        )
        messages = [system("mini", 600), {"role": "user", "content": task}]
        rng = random.Random(i)
        for j in range(8):
            messages.append(server.chat(messages, Reply(said=150, thought=60)))
            messages.append(
                {
                    "role": "user",
                    "content": f"<output>\n{text((i, j), rng.randrange(200, 2500))}\n</output>",
                }
            )


def open_webui(server: Answers) -> None:
    """Send a chat; after each reply follow-ups, a title and tags are requested, with the
    conversation so far inside.
    """
    for i in range(5):
        messages = [system("webui", 400), user((i, 0), 300)]
        for j in range(4):
            messages.append(server.chat(messages, Reply(said=300)))
            lines = (
                f"{each['role'].upper()}: {each['content']}"
                for each in messages[-6:]
                if each["role"] != "system"
            )
            told = "\n".join(lines)
            for task, n in (("follow-ups", 700), ("title", 900), ("tags", 600))[
                : 3 if j == 0 else 1
            ]:
                content = (
                    f"### Task:\n{text(task, n)}\n### Chat "
                    f"History:\n<chat_history>\n{told}\n</chat_history>"
                )
                server.chat([{"role": "user", "content": content}], Reply(said=40))
            messages.append(user((i, j + 1), 200))


def short_requests(server: Answers) -> None:
    """Send requests for titles, tags and follow-ups of 250 tokens each, on three short
    instructions.
    """
    for i in range(12):
        for task, n in (("title", 170), ("tags", 150), ("follow-ups", 190)):
            content = (
                f"### Task:\n{text(('short', task), n)}\n### Chat:\n{text((i, 'exchange'), 80)}"
            )
            server.chat([{"role": "user", "content": content}], Reply(said=20))


def sillytavern(server: Answers) -> None:
    """Send raw prompts: a card, lore that appears and disappears in the middle, the last lines of
    the chat; swipes and new turns.
    """
    card = text("card", 2600)
    story = text("story", 1500)
    lines = [f"{'Anna' if k % 2 else 'Bert'}: {text(('line', k), 160)}" for k in range(16)]
    for i in range(10):
        lore = "\n".join(text(("lore", k), 350) for k in range(6) if (i // 2 + k) % 3)
        begin = max(0, len(lines) - 24)
        prompt = f"{card}\n{lore}\n{story}\n" + "\n".join(lines[begin:]) + "\n### Response:\nBert:"
        reply = server.complete(prompt, Reply(said=120))
        if i % 3 == 2:
            reply = server.complete(prompt, Reply(said=120))
        lines += [f"Bert:{reply}", f"Anna: {text(('answer', i), 150)}"]


AGENTS = named(
    *(claude_code, codex, opencode, cline, qwen_code, aider),
    *(continue_, mini_swe, open_webui, short_requests, sillytavern),
)
