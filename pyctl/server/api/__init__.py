"""The APIs, each in one file or two: the fields of its requests, and the form of its replies."""

from __future__ import annotations
