"""The endpoints of streams that outlive their connections."""

from __future__ import annotations

import pytest

from tests.client import HI, Client
from tests.unit.server.fake import Bench, play
from tests.unit.server.parts import in_loop
from tests.unit.server.test_kept_streams import Talk


@pytest.fixture
def client() -> Client:
    return Bench(play()).client


def test_no_stream_is_kept_unless_its_client_names_a_conversation(client: Client) -> None:
    client.post("/v1/chat/completions", {"messages": HI, "stream": True})
    assert client.get("/v1/stream").status_code == 400
    assert client.get("/v1/stream?conv_id=x").status_code == 404
    assert client.request("DELETE", "/v1/stream").status_code == 400
    assert client.request("DELETE", "/v1/stream?conv_id=x").status_code == 204
    assert client.post("/v1/streams/lookup", {"conversation_ids": ["x"]}).json() == []


@in_loop
async def test_another_key_reads_and_ends_nothing() -> None:
    talk = Talk(play("a", "b", pause=None), api_keys=("k", "l"))
    await talk.begin("mine", "k")
    for key, status in (("", 401), ("l", 404)):
        assert (await talk.ask("GET", "/v1/stream?conv_id=mine", key)).status_code == status
    await talk.ask("DELETE", "/v1/stream?conv_id=mine", "l")
    await talk.begin("mine", "l")  # another stream under the same name
    found = [
        await talk.ask("POST", "/v1/streams/lookup", key, json={"conversation_ids": ["mi"]})
        for key in "kl"
    ]
    assert [each.json() for each in found] == [[], []]
    assert [handle.cancelled for handle in talk.bench.worker.handles] == [False, False]


@in_loop
async def test_an_offset_is_a_number_of_bytes_that_are_kept() -> None:
    talk = Talk(play("a"))
    await talk.begin("mine")
    for offset in ("-1", "x", "1e3", "\u0661", "9" * 19):
        refused = await talk.ask("GET", f"/v1/stream?conv_id=mine&from={offset}")
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "Invalid 'from' offset"
    whole = await talk.ask("GET", "/v1/stream?conv_id=mine&from=")
    assert whole.content == (await talk.ask("GET", "/v1/stream?conv_id=mine")).content


@in_loop
async def test_the_head_of_a_stream_has_no_body_and_does_not_wait_for_its_end() -> None:
    talk = Talk(play("a", "b", pause=None))
    await talk.begin("mine")
    head = await talk.ask("HEAD", "/v1/stream?conv_id=mine")
    assert head.status_code == 200
    assert head.headers["content-type"].startswith("text/event-stream")
    assert head.content == b""


@in_loop
async def test_a_lookup_takes_names_and_passes_over_everything_else() -> None:
    talk = Talk(play("a"))
    await talk.begin("mine")
    for names, found in ((["mine", 5, "", None], ["mine"]), ("mine", []), (None, [])):
        answer = await talk.ask("POST", "/v1/streams/lookup", json={"conversation_ids": names})
        assert [stream["conversation_id"] for stream in answer.json()] == found
    refused = await talk.ask("POST", "/v1/streams/lookup", json={"conversation_ids": ["x"] * 1025})
    assert refused.status_code == 400
    assert "at most 1024 ids" in refused.json()["error"]["message"]
