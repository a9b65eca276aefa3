"""The control of running evaluations: their interruption, preemption and progress."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pyctl.errors import EngineError, OutOfCellsError, PreemptedError, UnavailableError
from pyctl.llama.library.device_loss import loss
from pyctl.llama.library.library_log import (
    captured_log,
    forget_log_errors,
    last_log_error,
    log,
)
from pyctl.llama.library.native import Pulse

__all__ = ["EvaluationControl"]

ABORTED = 2
"""llama_decode's result when `Pulse` stops it."""

MIN_LOOKS = 32
"""Least checks per evaluation for preemption: with fewer, a GPU runs almost all of it without one.
"""


class EvaluationControl:
    """The `Control` of evaluations with ``pulse`` attached."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self._is_allowed = False
        self._n_looks = 0  # checks of the last evaluation

    def run(self, evaluate: Callable[[], int]) -> None:
        """Run ``evaluate`` and raise the error for its llama_decode code: UnavailableError,
        PreemptedError, OutOfCellsError or EngineError.
        """
        before = self.pulse.count
        forget_log_errors()
        if not self._is_allowed:
            code = evaluate()
        else:
            with captured_log() as lines:
                code = evaluate()
            if code != ABORTED:  # an abort is not a failure
                level = logging.WARNING if code else logging.DEBUG
                for line in lines:
                    log.log(level, "%s", line)
        if code == 0:
            self._n_looks = self.pulse.count - before
        elif code == ABORTED:
            if self.pulse.is_stopped:
                raise UnavailableError("the evaluation was stopped")
            raise PreemptedError("preempted")
        elif code == 1:
            raise OutOfCellsError
        else:
            reason = last_log_error(f"llama_decode returned {code}")
            raise EngineError(f"evaluation failed: {reason}")

    def interrupt(self) -> None:
        self.pulse.stop()

    @property
    def can_preempt(self) -> bool:
        return self._n_looks >= MIN_LOOKS or self.pulse.is_watching

    def allow_preemption(self, is_so: bool) -> None:
        self._is_allowed = is_so
        self.pulse.allow(is_so)

    def preempt(self, is_wanted: bool = True) -> None:
        self.pulse.ask(is_wanted)

    @property
    def lost(self) -> str:
        """The lost device, after which its calls may not return; "" while all are there."""
        return loss.text

    @property
    def heartbeat(self) -> int:
        loss.is_watched = True
        if loss.text:
            raise EngineError(loss.text)
        return self.pulse.count
