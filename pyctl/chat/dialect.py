"""The way in which one template writes conversations and calls."""

from __future__ import annotations

from collections.abc import Mapping

from pyctl.chat.boundaries import MessageStarts
from pyctl.chat.call_formats import CallConstraintCache, find_call_format
from pyctl.chat.json_object import JsonObject
from pyctl.chat.rendering import Renderer
from pyctl.chat.replay import Replay
from pyctl.chat.replay_marks import ReplyPlaceholders
from pyctl.chat.template import Template
from pyctl.chat.tokenizer import Tokenizer

__all__ = ["Dialect"]


class Dialect:
    """The way in which one template of a model writes conversations and calls.

    ``specials`` are the tokenizer's special tokens, id by text, and ``controls`` the ones that have
    no text in a reply. ``starts`` are the token ids that start a message, and ``control_texts`` the
    control tokens that the reader of replies has to see.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        specials: Mapping[str, int],
        controls: Mapping[str, int],
        kwargs: JsonObject,
        replay: Replay,
    ) -> None:
        """Find the format of calls, the tags of reasoning and the starts of messages, in this
        order: the starts are found with the tags of the format.
        """
        self.template = template
        self.capabilities = template.capabilities
        self.controls = controls
        self.call_format = find_call_format(template)
        self.tags = self.call_format.tags(template.source)
        tags = (self.tags.open, self.tags.close)
        self.message_starts = MessageStarts(
            template=template,
            tokenizer=tokenizer,
            specials=specials,
            inside=() if self.tags.next_message else tags,
        )
        self.starts = self.message_starts.ids
        marks = (*self.call_format.control_tokens, *tags)
        self.control_texts = {controls[mark]: mark.encode() for mark in marks if mark in controls}
        self.bound_calls = CallConstraintCache(self.call_format, self.tags, controls)
        starts = [text for text, token in specials.items() if token in self.starts]
        around = self.call_format.around_content
        remembered = ReplyPlaceholders(
            replay=replay,
            starts=starts,
            tags=tags,
            around=around,
            call_end=self.message_starts.call_end,
        )
        self.renderer = Renderer(
            template=template,
            tags=self.tags,
            start_texts=starts,
            variables=kwargs,
            placeholders=remembered,
            strip_bos=tokenizer.add_bos,
        )
        self.marks = self.renderer.placeholders
