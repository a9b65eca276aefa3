"""The targets of requests."""

from __future__ import annotations

from starlette.types import Scope

__all__ = ["in_origin_form"]

_SCHEMES = ("http://", "https://")


def in_origin_form(scope: Scope) -> Scope:
    """Return the scope of ``GET /path`` with HOST as its Host header for that of ``GET
    http://HOST/path``, as clients of a proxy write it; other scopes unchanged.

    RFC 9112, section 3.2.2: a server must accept this form, and ignore another Host header.
    """
    if scope["type"] != "http" or not scope["path"].lower().startswith(_SCHEMES):
        return scope
    host, _, path = scope["raw_path"].partition(b"//")[2].partition(b"/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        **scope,
        "path": "/" + scope["path"].partition("//")[2].partition("/")[2],
        "raw_path": b"/" + path,
        "headers": [(b"host", host), *headers],
    }
