"""The tiny models of trials, which are files of the package: at least one for each class of
memory.
"""

from __future__ import annotations

from pathlib import Path

from pyctl import model_files

__all__ = ["list_trial_models", "memory_classes", "models_with_drafts"]

MODELS = Path(str(model_files.__file__)).parent / "trial"
"""Compressed models. The name of a file is the class, and after a hyphen a difference to others of
it.
"""


def list_trial_models(memory: str = "") -> list[Path]:
    """Return the models whose class of memory is ``memory``, by default all."""
    return [path for path in sorted(MODELS.glob("*.xz")) if memory in ("", _memory_class(path))]


def models_with_drafts() -> list[Path]:
    """Return the models with a head for drafts."""
    return sorted(MODELS.glob("*-drafts.*"))


def memory_classes() -> list[str]:
    """Return the classes of memory that there are models of."""
    return sorted({_memory_class(path) for path in list_trial_models()})


def _memory_class(path: Path) -> str:
    return path.name.partition(".")[0].partition("-")[0]
