"""Handlers of signals for the time of a block."""

from __future__ import annotations

import signal

import pytest

from pyctl.cli.signals import ending_by_signal, handled


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_block_once(number: signal.Signals) -> None:
    """A signal ends the block with its exit code. Signals during the clean-up do not interrupt it,
    and the handlers of before are back afterwards.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    is_tidy = False

    def run() -> None:
        nonlocal is_tidy
        with ending_by_signal():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGHUP)
                is_tidy = True

    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 128 + number
    assert is_tidy
    assert {each: signal.getsignal(each) for each in before} == before


def test_what_is_ignored_stays_so() -> None:
    """An ignored signal stays ignored, as SIGHUP below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    seen = list[int]()
    try:
        with ending_by_signal(), handled({signal.SIGHUP: lambda number, _: seen.append(number)}):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == []
