"""The engine's requests for the replies that a body requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyctl.cache.retention import MAX_SECONDS, NO_RETENTION, Retention
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import ContextSizeError, RequestError
from pyctl.requests.body import ChatBody, CompletionBody
from pyctl.requests.prepare import prepare, prepare_prewarm
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.requests.reply_settings import ReplySettings
from pyctl.requests.request_pool import PostReplyQueue
from tests.client import HI
from tests.unit.server.fake import N_CTX, Bench, play


def replies(settings: ReplySettings | None = None, **fields: Any) -> list[PreparedReply]:
    service = Bench(play("x"), replies=settings).service
    return prepare(service, CompletionBody.from_json({"prompt": "a", **fields}))


def test_each_prompt_gets_its_replies_in_order() -> None:
    prepared = replies(prompt=["a", "b"], n=2)
    assert [reply.index for reply in prepared] == [0, 1, 2, 3]
    assert [reply.prompt_text for reply in prepared] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(7, [7, 8, 9]), (RANDOM_SEED - 1, [RANDOM_SEED - 1, RANDOM_SEED, 0]), (-1, [RANDOM_SEED] * 3)],
)
def test_a_given_seed_counts_up(seed: int, seeds: list[int]) -> None:
    assert [reply.request.sampling.seed for reply in replies(seed=seed, n=3)] == seeds


def test_only_the_first_reply_gets_the_requested_sequence() -> None:
    assert [reply.request.seq for reply in replies(id_slot=0, n=2)] == [0, -1]


@pytest.mark.parametrize(
    ("fields", "max_tokens", "caches"),
    [({}, 5, False), ({"n_predict": 2, "cache_prompt": True}, 2, True)],
)
def test_the_server_has_defaults(fields: dict[str, Any], max_tokens: int, caches: bool) -> None:
    settings = replace(ReplySettings(), n_predict=5, cache_prompt=False)
    (reply,) = replies(settings, **fields)
    assert reply.request.max_tokens == max_tokens
    assert reply.request.cache_prompt is caches


def test_empty_stop_strings_end_no_reply() -> None:
    (reply,) = replies(stop=["", "b"])
    assert reply.request.stop == ("b",)


def test_a_prewarm_generates_nothing_and_fits_into_the_context() -> None:
    service = Bench(play("x")).service
    request = prepare_prewarm(service, ChatBody.from_json({"messages": HI}))
    assert request.max_tokens == 0
    assert request.background
    too_long = [{"role": "user", "content": "x" * N_CTX}]
    with pytest.raises(ContextSizeError):
        prepare_prewarm(service, ChatBody.from_json({"messages": too_long}))


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [({}, "root ::= [s]"), ({"grammar": "root ::= [r]"}, "root ::= [r]")],
)
def test_a_request_overrides_the_grammar_of_the_server(
    fields: dict[str, Any], grammar: str
) -> None:
    settings = ReplySettings(sampling=Sampling(grammar="root ::= [s]"))
    service = Bench(play("x"), replies=settings).service
    (reply,) = prepare(service, ChatBody.from_json({"messages": HI, **fields}))
    assert reply.chat is not None
    assert reply.request.sampling.grammar == grammar


def test_a_request_announces_its_next_use() -> None:
    announced = {"prompt_seconds": 300, "head_seconds": 3600, "evict_on_complete": True}
    (reply,) = replies(cache_retention=announced)
    assert reply.request.retention == Retention(300, 3600, evict_on_complete=True)
    assert replies()[0].request.retention == NO_RETENTION


@pytest.mark.parametrize(
    "announced",
    [{"prompt_seconds": -1}, {"head_seconds": MAX_SECONDS + 1}, {"evict_on_complete": 1}, "5m", []],
)
def test_an_announcement_that_makes_no_sense_is_refused(announced: Any) -> None:
    with pytest.raises(RequestError):
        replies(cache_retention=announced)


@pytest.mark.parametrize(
    ("fields", "n_prepared"),
    [({}, 1), ({"max_tokens": 0}, 0), ({"cache_retention": {"evict_on_complete": True}}, 0)],
)
def test_a_next_turn_is_prepared_only_after_a_reply_that_stays(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], n_prepared: int
) -> None:
    added: list[Any] = []
    monkeypatch.setattr(PostReplyQueue, "add", lambda queue, function: added.append(function))
    service = Bench(play("x"), replies=ReplySettings(warm_next=True)).service
    service = replace(service, settings=ReplySettings(warm_next=True))
    (reply,) = prepare(service, ChatBody.from_json({"messages": HI, **fields}))
    reply.splitter.feed("x")
    reply.splitter.finish()
    assert len(added) == n_prepared
