"""The endpoints of the prefix cache."""

from __future__ import annotations

import pytest

from pyctl.server.server_settings import Cors, ServerSettings
from tests.server.fake import Bench

HEAD = "x" * 200


def filled(**settings: object) -> Bench:
    bench = Bench(settings=ServerSettings(**settings))  # type: ignore[arg-type]
    for tail in ("", "y" * 200):
        body = {"prompt": HEAD + tail, "n_predict": 2, "ignore_eos": True}
        response = bench.post("/completion", body, headers={"X-Api-Key": "k"})
        assert response.status_code == 200, response.text
    return bench


@pytest.fixture
def bench() -> Bench:
    """Holds a prefix and one that continues it."""
    return filled(show_prompts=True)


def test_the_tree_of_prefixes(bench: Bench) -> None:
    body = bench.client.get("/cache").json()
    view = bench.service.admin.view().result()
    counts = {"capacity": 4, "in_use": len(view.snapshots), "evicted": view.n_evicted, "refused": 0}
    assert body["slots"] == counts
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


@pytest.mark.parametrize(
    ("settings", "host", "shown"),
    [
        ({}, "localhost:8080", False),
        ({"api_keys": ("k",)}, "llm.example.com", True),
        ({"show_prompts": True}, "localhost:8080", True),
        ({"show_prompts": True}, "192.168.1.7:8080", True),
        ({"show_prompts": True}, "rebound.example.com:8080", False),
    ],
)
def test_how_prompts_end_is_shown_to_whom_a_key_or_a_flag_allows_it(
    settings: dict[str, object], host: str, shown: bool
) -> None:
    response = filled(**settings).client.get("/cache", headers={"X-Api-Key": "k", "Host": host})
    (head,) = response.json()["prefixes"]
    assert ("tail" in head, "xxxx" in response.text) == (shown, shown)
    assert head["children"]


@pytest.mark.parametrize(
    ("headers", "cors", "keys", "allowed"),
    [
        ({}, Cors(), (), True),
        ({"Origin": "http://evil.example"}, Cors(), (), False),
        ({"Origin": "null"}, Cors(), (), False),
        ({"Origin": "http://localhost:3000"}, Cors(), (), False),
        ({"Origin": "http://localhost:8080"}, Cors(), (), True),
        ({"Origin": "http://evil.example"}, Cors(), ("k",), False),
        ({"Origin": "http://localhost:3000"}, Cors("localhost"), (), True),
        ({"Origin": "https://ui.example"}, Cors("https://ui.example"), (), True),
        ({"Origin": "https://evil.example"}, Cors("https://ui.example"), (), False),
        # A page whose name its owner has pointed at this machine.
        ({"Origin": "http://evil.example:8080", "Host": "evil.example:8080"}, Cors(), (), False),
        ({"Origin": "http://evil.example:8080", "Host": "evil.example:8080"}, Cors(), ("k",), True),
        ({"Origin": "http://box:8080", "Host": "box:8080"}, Cors(), (), True),
        ({"Origin": "http://[::1]:8080", "Host": "[::1]:8080"}, Cors(), (), True),
        ({"Origin": "http://box.lan", "Host": "box.lan"}, Cors(), (), True),
        ({"Origin": "http://[bad", "Host": "[bad"}, Cors(), (), False),
    ],
)
def test_pages_of_other_origins_neither_read_nor_change_what_belongs_to_all(
    headers: dict[str, str], cors: Cors, keys: tuple[str, ...], allowed: bool
) -> None:
    client = filled(cors=cors, api_keys=keys, change_props=True, slots_debug=True).client
    headers = {"Host": "localhost:8080", "X-Api-Key": "k", **headers}
    for method, path, body in (
        ("GET", "/cache", None),
        ("HEAD", "/cache", None),
        ("GET", "/slots", None),
        ("POST", "/cache/pin", {"id": "x"}),
        ("POST", "/props", {}),
        ("POST", "/lora-adapters", []),
        ("POST", "/slots/0?action=erase", None),
        ("DELETE", "/cache", None),
    ):
        status = client.request(method, path, json=body, headers=headers).status_code
        assert (status != 403) is allowed, (method, path, status)
    # Generating is as open as in llama-server.
    assert client.post("/completion", json={"prompt": "x", "n_predict": 1}, headers=headers).status_code == 200
    assert client.get("/props", headers=headers).status_code == 200
