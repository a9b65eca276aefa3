"""Settings of replies: the defaults of requests."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import ConfigError
from pyctl.requests.reply_settings import REASONING_FORMATS, ReplySettings
from pyctl.settings.setting import class_flags
from tests.client import HI
from tests.unit.cli.given import serve
from tests.unit.server.fake import Bench, play


def test_the_two_names_of_one_format_of_reasoning_mean_the_same() -> None:
    assert REASONING_FORMATS["deepseek-legacy"] == REASONING_FORMATS["deepseek"]
    assert {*REASONING_FORMATS.values()} == {"auto", "none", "deepseek"}


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["-n", "2k"], "n_predict", 2048),
        (["--no-cache-prompt"], "cache_prompt", False),
        (["--no-prewarm"], "warm_next", False),
        (["--no-warm-next"], "warm_next", False),
        (["--reasoning-format", "deepseek-legacy"], "reasoning_format", "deepseek-legacy"),
        (["--reasoning-budget", "0"], "reasoning_budget", 0),
        (["--reasoning-budget-message", "Now:"], "reasoning_budget_message", "Now:"),
        (["--no-prefill-assistant"], "prefill_assistant", False),
        (["--spm-infill"], "spm_infill", True),
        (["--embd-normalize", "-1"], "embd_normalize", -1),
    ],
)
def test_a_flag_sets_a_default(argv: list[str], field: str, value: Any) -> None:
    assert getattr(serve(*argv).replies, field) == value


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["-n", "-2"], "-n: -2 is below the minimum of -1"),
        (["--reasoning-format", "loud"], "'loud' is not one of auto, none, deepseek"),
        (["--embd-normalize", "-2"], "below the minimum of -1"),
    ],
)
def test_a_value_out_of_range_is_refused(argv: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        serve(*argv)


def test_each_default_of_a_request_has_one_flag() -> None:
    names = [flag.dest for _, flag in class_flags(ReplySettings)]
    assert len(names) == len(set(names))


def test_a_request_wins_over_a_default() -> None:
    bench = Bench(play("x"), replies=ReplySettings(n_predict=5))
    bench.chat()
    bench.chat(max_tokens=7)
    assert [request.max_tokens for request in bench.worker.requests] == [5, 7]
    assert bench.client.chat(HI).text == "x"
