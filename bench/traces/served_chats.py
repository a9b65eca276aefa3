"""Replays chats on a server, and counts for each the tokens that an earlier one had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.simulated import Known
from bench.traces.chat_server import Answer, ChatServer
from bench.traces.chats import Message, SessionChats, TextScale
from bench.traces.schedule import Event, Step, Turn
from pyctl.cache.request_kind import RequestKind
from pyctl.prompt import as_tokens

__all__ = ["ChatReplay", "ServedChat"]


@dataclass(frozen=True)
class ServedChat:
    """A chat that was answered.

    Attributes:
        turn: The recorded request, and its kind.
        floor: Tokens of the prompt that no earlier prompt or reply had; at least one is always
            evaluated.
        answer: The reply, and the server's account.
        n_earlier_reply: Tokens of the reply that its history ends with; 0 without one.
        happened: The event between this request and its parent; empty without one.
    """

    turn: Turn
    floor: int
    answer: Answer
    n_earlier_reply: int = 0
    happened: str = ""

    @property
    def n_above(self) -> int:
        """Tokens evaluated above the floor."""
        return self.answer.n_evaluated - self.floor


@dataclass(frozen=True)
class _Answered:
    """A request that later ones can continue: the tokens of its reply, and the events before it."""

    n_reply: int
    n_events: int


class _Model:
    """A model of the server: its text, and all that it was asked and answered."""

    def __init__(self, server: ChatServer, scale: float) -> None:
        self.server = server
        self.text: TextScale = server.measure_text(scale)
        self._known = Known()

    def floor(self, messages: Sequence[Message], answer: Answer) -> int:
        """Return the floor of a chat, and keep the chat and its reply for those to come.

        Tokens are counted in the server's units, and scaled to the prompt's tokens: a server can
        keep the tokens of a reply that its text would not give.
        """
        units = self.server.prompt_units(messages)
        n_shared = self._known.shared(units)
        reply = self.server.reply_units(answer.message)
        self._known.add(as_tokens(np.concatenate([units, reply])))
        return max(answer.n_prompt - round(n_shared * answer.n_prompt / units.size), 1)


class ChatReplay:
    """Sends the chats of a schedule to a server, one after the other."""

    def __init__(
        self,
        server: ChatServer,
        scale: float,
        *,
        other_model: ChatServer | None = None,
        restart: Callable[[], None] | None = None,
    ) -> None:
        """Prepare a replay; measures the text of each model.

        Args:
            server: The model that answers.
            scale: Tokens of the server for each recorded token.
            other_model: The model that answers turns of the other model.
            restart: Ends the server and starts it again.
        """
        self._restart = restart
        self._model = _Model(server, scale)
        self._other_model = None if other_model is None else _Model(other_model, scale)
        self._chats: dict[int, SessionChats] = {}
        self._events: list[str] = []
        self._answered: dict[tuple[int, int], _Answered] = {}

    def run(self, steps: Sequence[Step]) -> Iterator[ServedChat]:
        """Yield each chat of ``steps`` as it is answered. Raises httpx.HTTPError, and ValueError
        for an answer without counts of tokens or a step that the replay is not prepared for.
        """
        for step in steps:
            if isinstance(step, Event):
                self._run_event(step)
            elif step.is_sent:
                yield self._serve(step)
            else:
                self._leave_out(step)

    def _run_event(self, event: Event) -> None:
        if self._restart is None:
            raise ValueError(f"this server can have no {event.value}")
        self._restart()
        self._events.append(event.value)

    def _serve(self, turn: Turn) -> ServedChat:
        """Return the answered chat of ``turn``."""
        request = turn.request
        model = self._model_of(turn)
        chats = self._chats_of(turn)
        messages = chats.build(request)
        answer = model.server.chat(messages, model.text.tokens(request.n_reply))
        chats.record_reply(request, answer.message)
        floor = model.floor(messages, answer)
        parent = self._parent(turn)
        self._answered[turn.session.number, request.row] = _Answered(
            answer.n_reply, len(self._events)
        )
        n_earlier_reply = parent.n_reply if request.kind is RequestKind.APPEND else 0
        happened = " and ".join(dict.fromkeys(self._events[parent.n_events :]))
        return ServedChat(turn, floor, answer, n_earlier_reply, happened)

    def _leave_out(self, turn: Turn) -> None:
        """Build the chat of ``turn`` for those that continue it; what it continues was answered."""
        self._chats_of(turn).build(turn.request)
        parent = self._parent(turn)
        self._answered[turn.session.number, turn.request.row] = _Answered(0, parent.n_events)

    def _chats_of(self, turn: Turn) -> SessionChats:
        number = turn.session.number
        if number not in self._chats:
            self._chats[number] = SessionChats(turn.session, self._model_of(turn).text)
        return self._chats[number]

    def _parent(self, turn: Turn) -> _Answered:
        """Return the request that ``turn`` continues; one without a reply if it continues none."""
        parent = turn.request.parent
        if parent is None:
            return _Answered(0, len(self._events))
        return self._answered[turn.session.number, parent]

    def _model_of(self, turn: Turn) -> _Model:
        if not turn.is_other_model:
            return self._model
        if self._other_model is None:
            raise ValueError("there is no other model to switch to")
        if self._events[-1:] != ["switch"]:
            self._events.append("switch")
        return self._other_model
