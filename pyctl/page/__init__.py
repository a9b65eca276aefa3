"""The page that talks and shows the cache, and what makes HTML of Markdown for it."""

from __future__ import annotations
