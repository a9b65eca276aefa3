"""Trials of native modules and of settings, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.llama.library.extension import core
from pyctl.llama.library.module_trial import reason_of_trial, run_trial
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.machine.environment import TRIAL
from pyctl.machine.libraries import MODULES

SECONDS = 120.0


@pytest.mark.parametrize("name", MODULES)
def test_modules_pass_the_trial_with_the_pinned_release(name: str) -> None:
    assert core is not None
    (module,) = Path(str(core.__file__)).parent.glob(f"{name}.*so")
    assert run_trial(module) == ""
    with pytest.raises(TimeoutError, match=r"its trial takes longer than 0\.001 seconds"):
        run_trial(module, 0.001)


def test_settings_that_work_have_no_reason_against_them(model_path: Callable[[str], Path]) -> None:
    settings = ModelSettings(path=str(model_path("tiny-hybrid-nextn")), n_threads=1)
    assert reason_of_trial((settings, DraftSettings(("draft-mtp",))), {}, SECONDS) == ""


def test_settings_that_fail_have_their_error_as_the_reason(
    model_path: Callable[[str], Path],
) -> None:
    """The last line of the trial's output is the error of the load, not a traceback."""
    settings = ModelSettings(path=str(model_path("tiny-dense")), n_threads=1)
    reason = reason_of_trial((settings, DraftSettings(("draft-mtp",))), {}, SECONDS)
    assert reason.startswith("its trial fails: ")
    assert "has no head for --spec-type draft-mtp" in reason


def test_a_trial_without_room_for_its_models_proves_nothing(tmp_path: Path) -> None:
    """A shortage raises OSError, so that the next start tries the module again."""
    assert core is not None
    missing = tmp_path / "no such directory"
    with pytest.raises(OSError, match="No such file or directory"):
        reason_of_trial((missing, ""), {TRIAL: str(core.__file__)}, SECONDS)
