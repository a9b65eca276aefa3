"""The endpoints of the prefix cache."""

from __future__ import annotations

import pytest

from tests.server.fake import Bench

HEAD = "x" * 200


@pytest.fixture
def bench() -> Bench:
    """Holds a prefix and one that continues it."""
    bench = Bench()
    for tail in ("", "y" * 200):
        response = bench.post("/completion", {"prompt": HEAD + tail, "n_predict": 2, "ignore_eos": True})
        assert response.status_code == 200, response.text
    return bench


def test_the_tree_of_prefixes(bench: Bench) -> None:
    body = bench.client.get("/cache").json()
    view = bench.service.admin.view().result()
    assert body["slots"] == {"capacity": 4, "in_use": len(view.snapshots), "evicted": view.n_evicted}
    assert body["bytes"] == {"resident": view.n_bytes, "budget": -1}
    assert body["totals"]["requests"] == 2
    (head,) = body["prefixes"]
    (first, second) = view.snapshots[:2]
    assert (head["id"], head["n"], head["tail"]) == (first.id, first.n, "x" * len(first.tail))
    assert [child["id"] for child in head["children"]] == [second.id]


def test_pin_and_unpin(bench: Bench) -> None:
    client = bench.client
    name = client.get("/cache").json()["prefixes"][0]["id"]
    n_snapshots = client.get("/cache").json()["slots"]["in_use"]
    assert client.post("/cache/pin", json={"id": name}).json() == {"id": name, "pinned": True}
    assert client.get("/cache").json()["prefixes"][0]["pinned"] is True
    assert client.request("DELETE", "/cache").json() == {"dropped": n_snapshots - 1}
    assert client.post("/cache/pin", json={"id": name, "pinned": False}).json()["pinned"] is False
    assert client.request("DELETE", "/cache").json() == {"dropped": 1}


def test_what_cannot_be_pinned(bench: Bench) -> None:
    client = bench.client
    name = client.get("/cache").json()["prefixes"][0]["id"]
    for body, status in (({}, 400), ({"id": 5}, 400), ({"id": "nothing"}, 404), ({"id": name, "pinned": "x"}, 400)):
        response = client.post("/cache/pin", json=body)
        assert response.status_code == status
        assert response.json()["error"]["code"] == status
    assert client.request("PUT", "/cache").status_code == 404
