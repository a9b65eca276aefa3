"""Every error that pyctl raises on purpose.

* PyctlError
  + ConfigError            flags or files the program cannot start with
    - ModelError           a GGUF that cannot be loaded, or does not fit
    - LibraryMismatchError llama.cpp, its headers and the extension are not of one release
  + RequestError           a request that cannot be served as it stands (HTTP 400)
    - ContextSizeError     a prompt that is longer than the context
    - AuthenticationError  a missing or wrong API key (HTTP 401)
    - ForbiddenError       what pages of other origins may not do (HTTP 403)
    - NotFoundError        an unknown path or model (HTTP 404)
    - TooLargeError        a body beyond the limit (HTTP 413)
    - NotSupportedError    something this model or build lacks (HTTP 501)
  + UnavailableError       loading or shutting down (HTTP 503)
    - BusyError            too many requests wait already (HTTP 503 with Retry-After)
  + EngineError            llama.cpp failed while serving (HTTP 500)
    - StateError           bytes that do not fit the model's memory; a cache miss, never a failed request
    - NotWrittenError      a snapshot that a store does not get; the others wait as before
    - OutOfCellsError      the context has no room left; says nothing about what was to be put there
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "BusyError",
    "ConfigError",
    "ContextSizeError",
    "EngineError",
    "ForbiddenError",
    "LibraryMismatchError",
    "ModelError",
    "NotFoundError",
    "NotSupportedError",
    "NotWrittenError",
    "OutOfCellsError",
    "PyctlError",
    "RequestError",
    "StateError",
    "TooLargeError",
    "UnavailableError",
]


class PyctlError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(PyctlError):
    """The program cannot start as it was asked to; the text is one line for the user."""


class ModelError(ConfigError):
    """A model file is missing, damaged, unsupported, or does not fit into memory."""


class LibraryMismatchError(ConfigError):
    """The loaded llama.cpp library and the compiled extension are not of the same release."""


class RequestError(PyctlError):
    """The client sent something that cannot be served."""


class ContextSizeError(RequestError):
    """The prompt has more tokens than one request may have, alone.

    ``n_prompt_tokens`` and ``n_ctx`` are token counts. The first counts the beginning alone where that was enough.
    """

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"request ({n_prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""


class ForbiddenError(RequestError):
    """The request is forbidden, with or without a key."""


class NotFoundError(RequestError):
    """No such path, model or object."""


class TooLargeError(RequestError):
    """The body has more bytes than the server takes."""


class NotSupportedError(RequestError):
    """The model, the build or this version lacks what was asked for."""


class UnavailableError(PyctlError):
    """The server is loading its model or shutting down."""


class BusyError(UnavailableError):
    """As many requests wait as may wait; another try in ``retry_seconds`` may find room."""

    retry_seconds = 5

    def __init__(self, n_waiting: int) -> None:
        super().__init__(f"{n_waiting} requests are waiting already, try again later")


class EngineError(PyctlError):
    """llama.cpp failed while it served a request."""


class PreemptedError(EngineError):
    """An evaluation ended early for a request that waits; its caller knows what the sequence held before."""


class StateError(EngineError):
    """Saved rows or a saved state do not fit the live memory; the sequence stays usable."""


class NotWrittenError(EngineError):
    """A snapshot is not written: its rows were given up, or the store has no room for it, or no time."""


class OutOfCellsError(EngineError):
    """The context has no cells left for more tokens; the sequence holds what it held.

    The text is llama-server's, which clients look for.
    """

    def __init__(self) -> None:
        super().__init__("Context size has been exceeded.")
