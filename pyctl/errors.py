"""Exceptions that pyctl raises.

* PyctlError
  + ConfigError            invalid flags or files: the program cannot start
    - ModelError           a GGUF that cannot be loaded, or does not fit
    - LibraryMismatchError llama.cpp, its headers and the extension are of different releases
  + RequestError           an invalid request (HTTP 400)
    - ContextSizeError     a prompt longer than the context
    - AuthenticationError  a missing or wrong API key (HTTP 401)
    - ForbiddenError       forbidden to pages of other origins (HTTP 403)
    - NotFoundError        an unknown path or model (HTTP 404)
    - TooLargeError        a body over the limit (HTTP 413)
    - ContentCodingError   a body compressed in an unknown way (HTTP 415)
    - NotSupportedError    a feature that this model or build lacks (HTTP 501)
    - ThreadError          a conversation that cannot be kept as Anthropic's `thread` (HTTP 400)
    - ThreadMismatchError  a request that changes a fixed field of its `thread` (HTTP 400)
    - LostThreadError      a `thread` that is not here, or no longer (HTTP 404)
  + UnavailableError       shutting down (HTTP 503)
    - BusyError            the queue is full (HTTP 503 with Retry-After)
    - LoadingError         the model is not loaded yet (HTTP 503 with Retry-After)
  + EngineError            llama.cpp failed during a request (HTTP 500)
    - PreemptedError       an evaluation stopped for a waiting request; the engine repeats it later
    - StateError           bytes that do not fit the model's memory; a cache miss, no failed request
      * DamagedError       a stored file with other bytes than were written
    - NotWrittenError      a snapshot that a store did not write; other writes are unaffected
    - OutOfCellsError      the context has no free cells; the data to load may still be valid
  + ReceiptError           a receipt that cannot be read or verified
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AuthenticationError",
    "BusyError",
    "ConfigError",
    "ContentCodingError",
    "ContextSizeError",
    "DamagedError",
    "EngineError",
    "ForbiddenError",
    "LibraryMismatchError",
    "LoadingError",
    "LostThreadError",
    "ModelError",
    "NotFoundError",
    "NotSupportedError",
    "NotWrittenError",
    "OutOfCellsError",
    "PreemptedError",
    "PyctlError",
    "ReceiptError",
    "RequestError",
    "StateError",
    "ThreadError",
    "ThreadMismatchError",
    "TooLargeError",
    "UnavailableError",
]


class PyctlError(Exception):
    """The base class of pyctl's exceptions."""


class ConfigError(PyctlError):
    """The program cannot start with these settings; the text is one line for the user."""


class ModelError(ConfigError):
    """A model file is missing, damaged, unsupported, or does not fit into memory."""


class LibraryMismatchError(ConfigError):
    """The loaded llama.cpp library and the compiled extension are of different releases."""


class RequestError(PyctlError):
    """The client sent an invalid request."""


class ContextSizeError(RequestError):
    """The prompt exceeds the tokens that one request may have when it runs alone.

    ``n_prompt_tokens`` and ``n_ctx`` are token counts. Tokenization may stop at the limit, so
    ``n_prompt_tokens`` may be a lower bound.
    """

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"request ({n_prompt_tokens} tokens) exceeds the available context size "
            f"({n_ctx} tokens), try increasing it"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""


class ForbiddenError(RequestError):
    """The request is forbidden, even with a valid key."""


class NotFoundError(RequestError):
    """The path, model or object does not exist."""


class TooLargeError(RequestError):
    """The body has more bytes than the server accepts."""


class ContentCodingError(RequestError):
    """The body is compressed in a way that the server does not decode."""

    CODINGS = "gzip, deflate, zstd"
    """Content codings that it decodes."""

    def __init__(self, coding: str) -> None:
        super().__init__(
            f"bodies with content-encoding {coding[:80]!r} are not decoded, "
            f"only one of {self.CODINGS}"
        )


class NotSupportedError(RequestError):
    """The model, the build or this version lacks a requested feature."""


class ThreadError(RequestError):
    """The conversation of a request cannot be kept as it requests; Anthropic's SDK then
    sends all of it with each turn. ``unsupported`` are the fields that are in the way.
    """

    def __init__(self, text: str, unsupported: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.unsupported = unsupported


class ThreadMismatchError(RequestError):
    """The request would change ``fields`` that a conversation has from its first turn on."""

    def __init__(self, fields: Sequence[str]) -> None:
        names = " and ".join(f"'{name}'" for name in fields)
        super().__init__(
            f"{names} cannot change within a thread: leave out what the thread has, or send the "
            "whole conversation with 'thread' of type create"
        )


class LostThreadError(RequestError):
    """The conversation with the requested id is not here, or no longer; Anthropic's SDK then starts
    a new one with all of its messages.
    """

    def __init__(self) -> None:
        super().__init__(
            "no thread ends with 'thread.previous_message_id'; send the whole conversation with "
            "'thread' of type create"
        )


class UnavailableError(PyctlError):
    """The server cannot answer now; the client may retry after ``retry_seconds``, 0: not this
    server.
    """

    retry_seconds = 0


class LoadingError(UnavailableError):
    """The server is loading its model."""

    retry_seconds = 5

    def __init__(self) -> None:
        super().__init__("Loading model")  # llama-server's words


class BusyError(UnavailableError):
    """The queue is full."""

    retry_seconds = 5

    def __init__(self, n_waiting: int) -> None:
        super().__init__(f"{n_waiting} requests are waiting already, try again later")


class EngineError(PyctlError):
    """A failure of llama.cpp during a request."""


class PreemptedError(EngineError):
    """An evaluation stopped early in favour of a waiting request; the caller restores the sequence
    to before it.
    """


class StateError(EngineError):
    """A mismatch of saved rows or a saved state with the live memory; the sequence stays usable."""


class DamagedError(StateError):
    """A stored file has other bytes than were written; ``file`` is its name."""

    def __init__(self, file: str, what: str) -> None:
        super().__init__(f"{file}: {what}")
        self.file = file


class NotWrittenError(EngineError):
    """A snapshot is not written: its rows were evicted, or the store lacked room or time."""


class OutOfCellsError(EngineError):
    """The context has no free cells; the sequence is unchanged. Clients match the text, which is
    llama-server's.
    """

    def __init__(self) -> None:
        super().__init__("Context size has been exceeded.")


class ReceiptError(PyctlError):
    """A receipt cannot be read, or not be verified here; the text completes "receipt ID: ..."."""
