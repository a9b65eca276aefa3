"""What all APIs share: from a body to the engine's request, and from the engine's events to a response."""

from __future__ import annotations
