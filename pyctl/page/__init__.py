"""The web page: its files as they go to a browser, and the policy that it holds them to."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["POLICY", "Asset", "asset", "index", "names"]

_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}


@dataclass(frozen=True)
class Asset:
    """A file as it is and compressed; ``tag`` changes with it."""

    media_type: str
    body: bytes
    compressed: bytes
    tag: str


@cache
def asset(name: str) -> Asset | None:
    """The file ``name`` of the page, None if there is none."""
    return _made(_slim((_DIRECTORY / name).read_text("utf-8")).encode(), ".js") if name in names() else None


@cache
def names() -> frozenset[str]:
    """The names that `asset` knows."""
    return frozenset(path.name for path in _DIRECTORY.iterdir() if path.suffix == ".js")


@cache
def index() -> Asset:
    """The page itself, with its style, so that one answer is enough to see it."""
    return _made((_DIRECTORY / "index.html").read_text("utf-8").replace("/*css*/", _style()).encode(), ".html")


def _made(body: bytes, suffix: str) -> Asset:
    tag = hashlib.blake2b(body, digest_size=12).hexdigest()
    return Asset(f"{_TYPES[suffix]}; charset=utf-8", body, gzip.compress(body, 9, mtime=0), f'"{tag}"')


def _style() -> str:
    return _slim((_DIRECTORY / "page.css").read_text("utf-8"))


def _slim(text: str) -> str:
    """``text`` without indentation and lines of comment alone; no string of these files goes over several lines."""
    return re.sub(r"(?m)^[ ]+|^[ ]*(//.*|/\*[^*]*\*/)\n", "", text)


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'sha256-"
    + base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    + "'; connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Nothing but the files of this server runs, and nothing else is asked."""
