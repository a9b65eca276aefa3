"""What makes models, outside of the package: random ones of any shape, and the training of the built-in one."""

from __future__ import annotations
