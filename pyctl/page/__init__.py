"""The web page: its files as they go to a browser, and the policy that it holds them to."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from functools import cache
from pathlib import Path

import msgspec

__all__ = ["Asset", "asset", "names", "policy"]

_DIRECTORY = Path(__file__).parent / "static"


class Asset(msgspec.Struct, frozen=True):
    """A file as it is and compressed; ``tag`` changes with it."""

    media_type: str
    body: bytes
    compressed: bytes
    tag: str


@cache
def asset(name: str = "index.html") -> Asset | None:
    """Return the file ``name``, None if there is none. The page itself holds its style: the page
    needs only one answer.
    """
    if name not in names():
        return None
    kind = "text/javascript" if name.endswith(".js") else "text/html"
    source = (_DIRECTORY / name).read_text("utf-8")
    body = _slim(source).replace("/*css*/", _style()).encode()
    digest = hashlib.blake2b(body, digest_size=12).hexdigest()
    return Asset(
        media_type=f"{kind}; charset=utf-8",
        body=body,
        compressed=gzip.compress(body, 9, mtime=0),
        tag=f'"{digest}"',
    )


@cache
def names() -> frozenset[str]:
    """Return the names that `asset` accepts."""
    return frozenset(path.name for path in _DIRECTORY.iterdir() if path.suffix != ".css")


def _style() -> str:
    return _slim((_DIRECTORY / "page.css").read_text("utf-8"))


def _slim(text: str) -> str:
    """Return ``text`` without comments and needless white space. No string of these files spans
    lines, or holds " // ".
    """
    bare = re.sub(r"(?m)(?<!\S)(//.*|/\*[^*]*\*/)$", "", text)
    return re.sub(r"(?<=[{},;(])\s*\n\s*|\s*(\n)\s*", r"\1", bare)


@cache
def policy() -> str:
    """Return the content security policy: only files of this server run, and no other server is
    contacted.
    """
    digest = hashlib.sha256(_style().encode()).digest()
    style_source = f"'sha256-{base64.b64encode(digest).decode()}'"
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            f"style-src 'self' {style_source}",
            "connect-src 'self'",
            "img-src 'self' data: blob:",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )
