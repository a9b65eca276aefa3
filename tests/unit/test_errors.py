"""The tree of exceptions: the one that is documented, and what a client needs of each."""

from __future__ import annotations

import re

import pytest

from pyctl import errors
from pyctl.errors import (
    BusyError,
    ContentCodingError,
    ContextSizeError,
    LoadingError,
    PyctlError,
    RequestError,
    UnavailableError,
)


def documented_bases() -> dict[str, str]:
    """Return the base of each exception as the module's docstring has it, by indentation."""
    bases: dict[str, str] = {}
    above: list[tuple[int, str]] = [(-1, "Exception")]
    for line in (errors.__doc__ or "").splitlines():
        if (entry := re.match(r"( *)[*+-] (\w+)", line)) is None:
            continue
        indent = len(entry[1])
        above = [(depth, name) for depth, name in above if depth < indent]
        bases[entry[2]] = above[-1][1]
        above.append((indent, entry[2]))
    return bases


def test_the_documented_tree_is_the_tree_of_the_classes() -> None:
    """A reader chooses what to catch by the docstring, so a class that it lacks or has in another
    place would be caught wrongly.
    """
    classes = {name: getattr(errors, name) for name in errors.__all__}
    assert documented_bases() == {name: each.__base__.__name__ for name, each in classes.items()}


def test_every_exception_is_exported() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, PyctlError)
    }
    assert defined == set(errors.__all__)
    assert sorted(errors.__all__) == errors.__all__


def test_a_prompt_that_is_too_long_has_both_numbers() -> None:
    """Clients shorten a conversation by these numbers, and match llama-server's text."""
    error = ContextSizeError(5_000, 4_096)
    assert error.n_prompt_tokens == 5_000
    assert error.n_ctx == 4_096
    assert str(error) == (
        "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it"
    )


@pytest.mark.parametrize("error", [BusyError(3), LoadingError()])
def test_a_server_that_is_busy_or_loads_can_be_tried_again(error: UnavailableError) -> None:
    assert error.retry_seconds > 0
    assert UnavailableError("shutting down").retry_seconds == 0, "another server has to answer"


def test_the_name_of_a_coding_is_shown_in_part() -> None:
    """The name comes from a header, so it is quoted and has an end."""
    text = str(ContentCodingError("br\n" + "x" * 10_000))
    assert text.startswith("bodies with content-encoding 'br\\nxxx")
    assert text.endswith(f"only one of {ContentCodingError.CODINGS}")
    assert len(text) < 250


def test_an_error_of_a_request_is_no_failure_of_the_engine() -> None:
    """The status follows from the branch: a class in two branches would have two of them."""
    for name in errors.__all__:
        branches = {
            errors.ConfigError,
            RequestError,
            UnavailableError,
            errors.EngineError,
            errors.ReceiptError,  # of a command, which sends no status
        }
        n_branches = sum(issubclass(getattr(errors, name), branch) for branch in branches)
        assert n_branches == (name != "PyctlError"), name
