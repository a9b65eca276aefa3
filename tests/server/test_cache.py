"""The endpoints of the prefix cache."""

from __future__ import annotations

from pyctl.server.service import Settings
from tests.server.fake import Bench, FakeCache, play


def test_the_tree_of_prefixes() -> None:
    body = Bench(play(), settings=Settings(cache=FakeCache())).client.get("/cache").json()
    assert body["slots"] == {"capacity": 4, "in_use": 2, "evicted": 1}
    assert body["bytes"] == {"resident": 3000, "budget": -1}
    assert body["totals"]["requests"] == 7
    (head,) = body["prefixes"]
    assert (head["id"], head["n"], head["tail"]) == ("100-aa", 100, "hello")
    assert [child["id"] for child in head["children"]] == ["150-bb"]


def test_pin_and_unpin() -> None:
    client = Bench(play(), settings=Settings(cache=FakeCache())).client
    assert client.post("/cache/pin", json={"id": "100-aa"}).json() == {"id": "100-aa", "pinned": True}
    assert client.get("/cache").json()["prefixes"][0]["pinned"] is True
    assert client.request("DELETE", "/cache").json() == {"dropped": 1}
    assert client.post("/cache/pin", json={"id": "100-aa", "pinned": False}).json()["pinned"] is False


def test_what_cannot_be_pinned() -> None:
    client = Bench(play(), settings=Settings(cache=FakeCache())).client
    for body, status in (({}, 400), ({"id": 5}, 400), ({"id": "nothing"}, 404), ({"id": "100-aa", "pinned": "x"}, 400)):
        response = client.post("/cache/pin", json=body)
        assert response.status_code == status
        assert response.json()["error"]["code"] == status


def test_without_a_cache_it_is_not_supported() -> None:
    client = Bench(play()).client
    assert client.get("/cache").status_code == 501
    assert client.request("DELETE", "/cache").json()["error"]["type"] == "not_supported_error"
    assert client.request("PUT", "/cache").status_code == 404
