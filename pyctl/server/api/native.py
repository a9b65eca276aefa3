"""Replies in llama-server's own form."""

from __future__ import annotations

from typing import Any

from pyctl.engine.request import Done, Piece, Progress
from pyctl.server.generate.payload import settings_json
from pyctl.server.generate.prepare import PreparedReply
from pyctl.server.generate.reply import Reply
from pyctl.server.http import encode, frame
from pyctl.server.service import Service

__all__ = ["NativeReply"]


class NativeReply(Reply):
    """What /completion answers."""

    def __init__(self, service: Service, prepared: PreparedReply) -> None:
        super().__init__(service, prepared)
        self._has_new_line = False

    def progress_frames(self, progress: Progress) -> bytes:
        return self._chunk(Piece("", ()), self.extras(progress))

    def piece_frames(self, piece: Piece) -> bytes:
        self._has_new_line = self._has_new_line or "\n" in piece.text
        return self._chunk(piece, self.extras())

    def ended(self, done: Done) -> bytes:
        return frame(encode(self._chosen(self._final(done, "", [], self._has_new_line))))

    def whole(self, done: Done) -> dict[str, Any]:
        text = self.text()
        tokens = self.tokens if self.options.return_tokens else []
        body = self._final(done, text, tokens, "\n" in text)
        if self.request.n_probs:
            body["completion_probabilities"] = self.logprobs(self.kept_probs(done))["content"]
        return self._chosen(body)

    def _chunk(self, piece: Piece, extras: bytes) -> bytes:
        body: dict[str, Any] = {
            "index": self.index,
            "content": piece.text,
            "tokens": piece.tokens,
            "stop": False,
            "id_slot": self.progress.seq if self.progress is not None else 0,
            "tokens_predicted": self.n_predicted,
            "tokens_evaluated": len(self.request.prompt),
        }
        if piece.probs:
            body["completion_probabilities"] = self.logprobs(list(piece.probs))["content"]
        return frame(encode(body)[:-1] + extras + b"}")

    def _final(self, done: Done, content: str, tokens: list[int], has_new_line: bool) -> dict[str, Any]:
        n_prompt, n_predicted = done.stats.n_prompt, done.timings.n_predicted
        return {
            "index": self.index,
            "content": content,
            "tokens": tokens,
            "id_slot": done.seq,
            "stop": True,
            "model": self.service.model,
            "tokens_predicted": n_predicted,
            "tokens_evaluated": n_prompt,
            "generation_settings": settings_json(
                *(self.request, self.options, self.service.info.draft_types), self._generation_prompt()
            ),
            "prompt": self.prepared.prompt_text,
            "has_new_line": has_new_line,
            "truncated": n_prompt + n_predicted >= self.service.info.n_ctx,
            "stop_type": done.stop_type if n_prompt else "none",
            "stopping_word": done.stopping_word,
            "tokens_cached": n_prompt + max(n_predicted - 1, 0),
            "timings": self.timings(done),
        }

    def _generation_prompt(self) -> str | None:
        """What the prompt of a chat holds of the reply: all that follows its last boundary."""
        prompt = self.request.prompt
        if self.prepared.chat is None:
            return None
        return self.service.text_of(prompt.tokens[prompt.boundaries[-1] :].tolist()) if prompt.boundaries else ""

    def _chosen(self, body: dict[str, Any]) -> dict[str, Any]:
        return _pick(body, self.options.response_fields) if self.options.response_fields else body


def _pick(body: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """The members at ``paths`` (``a/b`` is member b of a), each under its path; those that are missing are left out."""
    picked: dict[str, Any] = {}
    for path in paths:
        value: Any = body
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            picked[path] = value
    return picked
