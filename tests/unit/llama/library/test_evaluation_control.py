"""The control of evaluations: errors for the results of llama_decode, and when preemption works."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from pyctl.errors import EngineError, OutOfCellsError, PreemptedError, UnavailableError
from pyctl.llama.library import evaluation_control
from pyctl.llama.library.device_loss import Loss
from pyctl.llama.library.evaluation_control import ABORTED, MIN_LOOKS, EvaluationControl
from pyctl.llama.library.library_log import ERROR, log_callback

OUT_OF_CELLS = 1
FAILED = -3


class FakePulse:
    """A pulse whose checks the test counts."""

    def __init__(self) -> None:
        self.count = 0
        self.is_stopped = False
        self.is_watching = False
        self.is_asked = False
        self.is_allowed = False

    def stop(self) -> None:
        self.is_stopped = True

    def ask(self, for_it: bool = True) -> None:
        self.is_asked = for_it

    def allow(self, is_so: bool) -> None:
        self.is_allowed = is_so


@pytest.fixture
def control() -> EvaluationControl:
    made = EvaluationControl()
    made.pulse = FakePulse()  # type: ignore[assignment]
    return made


def evaluation(
    control: EvaluationControl, code: int = 0, message: bytes = b"", n_checks: int = 0
) -> Callable[[], int]:
    """Return an evaluation with ``n_checks`` that logs ``message`` as an error and returns
    ``code``.
    """

    def run() -> int:
        if message:
            log_callback(ERROR, message, None)
        control.pulse.count += n_checks  # type: ignore[misc]
        return code

    return run


def test_a_success_raises_nothing(control: EvaluationControl) -> None:
    control.run(evaluation(control))


def test_too_few_cells(control: EvaluationControl) -> None:
    with pytest.raises(OutOfCellsError):
        control.run(evaluation(control, OUT_OF_CELLS))


def test_a_failure_has_the_reason_of_the_log(control: EvaluationControl) -> None:
    with pytest.raises(EngineError, match="evaluation failed: no memory"):
        control.run(evaluation(control, FAILED, b"decode: no memory\n"))


def test_a_failure_without_a_message_has_the_code(control: EvaluationControl) -> None:
    with pytest.raises(EngineError, match="llama_decode returned -3"):
        control.run(evaluation(control, FAILED))


def test_an_older_error_is_no_reason(control: EvaluationControl) -> None:
    log_callback(ERROR, b"load: another model\n", None)
    with pytest.raises(EngineError, match="llama_decode returned -3"):
        control.run(evaluation(control, FAILED))


def test_an_interrupt_makes_evaluations_unavailable(control: EvaluationControl) -> None:
    control.interrupt()
    with pytest.raises(UnavailableError):
        control.run(evaluation(control, ABORTED))


def test_an_abort_without_an_interrupt_is_a_preemption(control: EvaluationControl) -> None:
    control.allow_preemption(True)
    control.preempt()
    with pytest.raises(PreemptedError):
        control.run(evaluation(control, ABORTED))


@pytest.mark.parametrize(
    ("code", "levels"), [(0, [logging.DEBUG]), (FAILED, [logging.WARNING]), (ABORTED, [])]
)
def test_messages_of_an_evaluation_that_may_be_preempted(
    control: EvaluationControl, caplog: pytest.LogCaptureFixture, code: int, levels: list[int]
) -> None:
    caplog.set_level(logging.DEBUG, "llama.cpp")
    control.allow_preemption(True)
    run = evaluation(control, code, b"the graph failed\n")
    if code == 0:
        control.run(run)
    else:
        with pytest.raises((EngineError, PreemptedError)):
            control.run(run)
    assert [record.levelno for record in caplog.records] == levels


@pytest.mark.parametrize(("n_checks", "can_preempt"), [(MIN_LOOKS - 1, False), (MIN_LOOKS, True)])
def test_preemption_requires_enough_checks(
    control: EvaluationControl, n_checks: int, can_preempt: bool
) -> None:
    control.run(evaluation(control, n_checks=n_checks))
    assert control.can_preempt == can_preempt


def test_the_heartbeat_of_a_lost_device_is_an_error(
    control: EvaluationControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Loss()
    monkeypatch.setattr(evaluation_control, "loss", own)
    control.run(evaluation(control, n_checks=3))
    assert control.heartbeat == 3
    assert own.is_watched
    own.text = "the worker a:1 is lost"
    assert control.lost == own.text
    with pytest.raises(EngineError, match="the worker a:1 is lost"):
        _ = control.heartbeat
