"""The model that the last request of each conversation went to."""

from __future__ import annotations

from collections import OrderedDict

from pyctl.prompt import PromptSections
from pyctl.settings.limit import limit

__all__ = ["ModelHistory"]

MAX_CONVERSATIONS = limit(
    256, "conversations whose last model is remembered", "the oldest are forgotten", "memory"
)


class ModelHistory:
    """The last models of the newest conversations, by digests. Only the event loop uses it."""

    def __init__(self) -> None:
        self._models: OrderedDict[bytes, str] = OrderedDict()

    def record(self, sections: PromptSections | None, model: str) -> str:
        """Record a request for ``model``; return the previous model of the conversation,
        empty if it is the same one.
        """
        conversation = sections.conversation if sections is not None else b""
        if not conversation:
            return ""
        before = self._models.pop(conversation, model)
        self._models[conversation] = model
        if len(self._models) > MAX_CONVERSATIONS:
            self._models.popitem(last=False)
        return before if before != model else ""
