"""The parts of replies that several APIs have in common."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.request import DraftCounts, Progress, Request, Timings
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Prompt
from pyctl.requests.reply_options import ReplyOptions
from pyctl.server.reply_json import (
    cache_json,
    probs_json,
    progress_json,
    settings_json,
    timings_json,
    without_long,
)
from tests.unit.chat.toy import chatml_tokenizer

TIMINGS = Timings(3, 10, 500.0, 5, 200.0, 0.0, DraftCounts())


def test_the_first_token_comes_with_the_prompt() -> None:
    body = timings_json(TIMINGS)
    assert body["predicted_per_token_ms"] == 50.0
    assert body["predicted_per_second"] == 20.0
    assert body["prompt_per_second"] == 20.0
    assert "draft_n" not in body


def test_drafts_are_counted_if_there_were_any() -> None:
    drafted = replace(TIMINGS, drafts=DraftCounts(n_drafted=4, n_accepted=3))
    body = timings_json(drafted)
    assert body["draft_n"] == 4
    assert body["draft_n_accepted"] == 3


def test_no_time_is_no_speed() -> None:
    body = timings_json(Timings(0, 0, 0.0, 1, 0.0, 0.0, DraftCounts()))
    assert body["prompt_per_second"] == 0.0
    assert body["predicted_per_second"] == 0.0


def test_a_client_that_must_not_read_texts_gets_no_ids() -> None:
    report = RequestStats(n_prompt=1)
    assert cache_json(report, None) == {"source": report.source}
    assert {"restored", "saved"} <= cache_json(report, lambda tokens: "text").keys()


@pytest.mark.parametrize("after_sampling", [False, True])
def test_probabilities_have_no_minus_infinity(after_sampling: bool) -> None:
    probs = [((97, -1.0), (98, -float("inf")))]
    (entry,) = probs_json(probs, chatml_tokenizer(), after_sampling)
    name, top = ("prob", "top_probs") if after_sampling else ("logprob", "top_logprobs")
    assert entry["token"] == "a"
    assert entry[name] == -1.0
    assert entry[top][0][name] == pytest.approx(-3.4028234663852886e38)


def test_progress_has_a_place_only_while_it_waits() -> None:
    progress = Progress(n_prompt=9, n_cached=2, n_processed=4, ms=1.6, source="ram")
    body = progress_json(progress, ReplyOptions())
    assert body == {"total": 9, "cache": 2, "processed": 4, "time_ms": 1}
    waiting = progress_json(replace(progress, queue_position=2), ReplyOptions())
    assert waiting["waiting"] == 2


def test_settings_show_fields_without_an_effect_as_sent() -> None:
    options = ReplyOptions.from_json({"n_keep": 7, "backend_sampling": True})
    shown = settings_json(Request(Prompt.from_ids([1]), Sampling()), options, ())
    assert shown["n_keep"] == 7
    assert shown["backend_sampling"] is True
    assert "grammar" not in without_long(shown)
