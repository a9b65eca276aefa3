"""The endpoints of the prefix cache."""

from __future__ import annotations

import gc
import itertools
import re
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.saved_time import SavedTime
from pyctl.cache.snapshot import Block
from pyctl.chat.cached_tokenizer import readable
from pyctl.engine.request import Timings
from pyctl.engine.request_history import MAX_REQUESTS, ServedRequest
from pyctl.requests.reply_settings import ReplySettings
from pyctl.server.server_settings import Cors, ServerSettings
from tests.client import Client
from tests.unit.chat.toy import chatml_tokenizer
from tests.unit.engine.drive import tier_on, watch
from tests.unit.server.fake import Bench

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
    """Return a server that holds a prefix and one that continues it."""
    return filled(show_prompts=True)


def test_the_tree_of_prefixes(bench: Bench) -> None:
    """`GET /cache` has the counts and bytes of the engine's own view, and snapshots as a tree, each
    below the one it continues.
    """
    body = bench.client.get("/cache").json()
    view = bench.service.admin.view().result()
    counts = {
        "capacity": 4,
        "in_use": len(view.snapshots),
        "evicted": view.n_evicted,
        "refused": 0,
        "prompt_ends": 2,
    }
    assert body["slots"] == counts
    device_bytes = sum(snapshot.device_bytes for snapshot in view.snapshots)
    assert body["bytes"] == {"resident": view.n_bytes, "budget": -1, "device": device_bytes}
    assert body["totals"]["requests"] == 2
    (head,) = body["prefixes"]
    (first, second) = view.snapshots[:2]
    assert head["id"] == first.id
    assert head["n"] == first.n
    assert head["tail"] == "x" * len(first.tail)
    assert [child["id"] for child in head["children"]] == [second.id]


def test_the_time_saved_is_that_of_all_clients() -> None:
    """The server counts the time saved for all clients without a browser open: by the day, and for
    Prometheus since its start.
    """
    bench = Bench(settings=ServerSettings(show_metrics=True))
    saved = bench.service.shared.saved
    bench.engine.prefix_cache.saved_time = SavedTime(known=1e-3, report=partial(saved.add, "f"))
    nothing = {"seconds": 0.0, "tokens": 0, "requests": 0}
    assert bench.client.get("/cache").json()["saved"] == {"today": nothing, "total": nothing}
    for tail in ("", "y" * 20, "z" * 30):
        bench.post("/completion", {"prompt": HEAD + tail, "n_predict": 2, "ignore_eos": True})
    body = bench.client.get("/cache").json()
    n_cached = sum(body["totals"]["cached"].values())
    today = body["saved"]["today"]
    assert today["tokens"] == n_cached
    assert today["requests"] == 2
    assert today == body["saved"]["total"]
    assert today["seconds"] == pytest.approx(n_cached * 1e3, rel=1e-3)  # less the restores
    assert body["totals"]["saved_seconds"] == pytest.approx(today["seconds"])
    shown = re.findall(
        r"^pyctl_cache_saved_seconds_total (.+)$", bench.client.get("/metrics").text, re.MULTILINE
    )
    assert [float(value) for value in shown] == [pytest.approx(today["seconds"])]


def test_what_contradicts_itself_is_told(bench: Bench) -> None:
    assert bench.client.get("/cache/check").json() == {"faults": []}
    bench.engine.prefix_cache.cache.budget.limit = 1
    (fault,) = bench.client.get("/cache/check").json()["faults"]
    assert fault.endswith("bytes, at most 1 are allowed")


def test_pin_and_unpin(bench: Bench) -> None:
    client = bench.client
    name = client.get("/cache").json()["prefixes"][0]["id"]
    n_snapshots = client.get("/cache").json()["slots"]["in_use"]
    assert client.post("/cache/pin", {"id": name}).json() == {"id": name, "pinned": True}
    assert client.get("/cache").json()["prefixes"][0]["pinned"] is True
    assert client.request("DELETE", "/cache").json() == {"dropped": n_snapshots - 1}
    assert client.post("/cache/pin", {"id": name, "pinned": False}).json()["pinned"] is False
    assert client.request("DELETE", "/cache").json() == {"dropped": 1}


def test_what_cannot_be_pinned(bench: Bench) -> None:
    client = bench.client
    name = client.get("/cache").json()["prefixes"][0]["id"]
    for body, status in (
        ({}, 400),
        ({"id": 5}, 400),
        ({"id": "nothing"}, 404),
        ({"id": name, "pinned": "x"}, 400),
    ):
        response = client.post("/cache/pin", body)
        assert response.status_code == status
        assert response.json()["error"]["code"] == status
    assert client.request("PUT", "/cache").status_code == 404


def test_what_ram_could_not_hold_is_not_pinned(bench: Bench) -> None:
    """Its rows may lie on the device, which others need some time."""
    name = bench.client.get("/cache").json()["prefixes"][0]["id"]
    bench.engine.prefix_cache.cache.budget.limit = 1
    response = bench.client.post("/cache/pin", {"id": name})
    assert response.status_code == 400
    assert "does not fit" in response.json()["error"]["message"]
    assert bench.client.get("/cache").json()["prefixes"][0]["pinned"] is False


def test_a_request_that_does_not_run_is_not_stopped(bench: Bench) -> None:
    assert [seq["task"] for seq in bench.client.get("/cache").json()["sequences"]] == [-1]
    response = bench.client.request("DELETE", "/cache/requests/7")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "request 7 does not run"
    assert bench.client.request("DELETE", "/cache/requests/x").status_code == 404


HERE = "127.0.0.1"
ELSEWHERE = "192.168.1.20"


@pytest.mark.parametrize(
    ("settings", "client", "host", "headers", "shown"),
    [
        ({}, HERE, "localhost:8080", {}, True),
        ({}, "::1", "[::1]:8080", {}, True),
        ({}, ELSEWHERE, "192.168.1.7:8080", {}, False),
        ({}, ELSEWHERE, "localhost:8080", {}, False),
        # A proxy on this machine forwards a request of another host.
        ({}, HERE, "localhost:8080", {"X-Forwarded-For": ELSEWHERE}, False),
        ({}, HERE, "localhost:8080", {"Forwarded": f"for={ELSEWHERE}"}, False),
        ({}, HERE, "llm.lan", {}, False),
        ({}, HERE, "[bad", {}, False),
        # A page whose name its owner has pointed at this machine.
        ({}, HERE, "rebound.example.com:8080", {}, False),
        ({"api_keys": ("k",)}, ELSEWHERE, "llm.example.com", {}, True),
        ({"show_prompts": True}, ELSEWHERE, "localhost:8080", {}, True),
        ({"show_prompts": True}, ELSEWHERE, "192.168.1.7:8080", {}, True),
        ({"show_prompts": True}, ELSEWHERE, "rebound.example.com:8080", {}, False),
    ],
)
def test_prompt_texts_are_shown_only_locally_or_with_key_or_flag(
    settings: dict[str, object], client: str, host: str, headers: dict[str, str], shown: bool
) -> None:
    """Texts of prompts, and the ids and positions in timings that could reveal one, are shown to a
    local client, with a key or by a flag only. The rest of the tree is open.
    """
    bench = filled(**settings)
    asking = Client.to_app(bench.app, client)
    response = asking.get("/cache", headers={"X-Api-Key": "k", "Host": host, **headers})
    (head,) = response.json()["prefixes"]
    assert ("tail" in head) == shown
    assert ("head" in head) == shown
    assert ("xxxx" in response.text) == shown
    assert ("tail" in response.json()["sequences"][0]) is shown
    assert head["children"]
    # The prompt that this one parted from may be another client's, and so may the rest of a
    # snapshot: its id is a digest of all its tokens, and the position steps by single ones.
    body = {"prompt": HEAD[:100] + "z" * 300, "n_predict": 1, "return_cache": True}
    answer = asking.post(
        "/completion", json=body, headers={"X-Api-Key": "k", "Host": host, **headers}
    )
    cache = answer.json()["timings"]["cache"]
    assert cache.keys() == ({"source", "restored", "saved", "miss"} if shown else {"source"})
    assert not shown or (cache["miss"]["position"] == 100 and "was" in cache["miss"])


@pytest.mark.parametrize(
    ("headers", "cors", "shown"),
    [
        ({}, Cors(), True),
        ({"Origin": "http://localhost:8080"}, Cors(), True),
        ({"Origin": "http://evil.example"}, Cors(), False),
        ({"Origin": "null"}, Cors(), False),
        ({"Origin": "https://ui.example"}, Cors("https://ui.example"), True),
    ],
)
@pytest.mark.parametrize("show_prompts", [False, True])
def test_pages_of_other_origins_see_no_words_of_others_in_a_reply(
    headers: dict[str, str], cors: Cors, shown: bool, show_prompts: bool
) -> None:
    bench = filled(cors=cors, show_prompts=show_prompts)
    body = {"prompt": HEAD[:100] + "z" * 300, "n_predict": 1, "return_cache": True}
    answer = bench.post("/completion", body, headers={"Host": "localhost:8080", **headers})
    assert answer.status_code == 200
    assert ("miss" in answer.json()["timings"]["cache"]) is shown


def test_a_reply_names_the_snapshots_it_resumed_from_and_took(bench: Bench) -> None:
    """A reply to `return_cache` names the snapshot it resumed from and the new ones, by the ids of
    `/cache`. Other replies have no such field.
    """
    before = {each["id"] for each in nodes(bench)}
    body = {
        "prompt": HEAD + "y" * 200 + "z" * 200,
        "n_predict": 2,
        "ignore_eos": True,
        "return_cache": True,
    }
    cache = bench.post("/completion", body).json()["timings"]["cache"]
    after = {each["id"]: each for each in nodes(bench)}
    assert cache["source"] in ("ram", "live")
    assert cache["saved"]
    assert set(cache["saved"]) <= after.keys() - before
    again = bench.post("/completion", {**body, "prompt": HEAD + "w" * 200}).json()["timings"][
        "cache"
    ]
    assert again["restored"] in before
    del body["return_cache"]
    assert "cache" not in bench.post("/completion", body).json()["timings"]
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"messages": messages, "return_cache": True, "stream": True, "max_tokens": 1}
    last = bench.stream("/v1/chat/completions", chat)[-2]
    assert last["timings"]["cache"]["source"] in ("none", "live", "ram")


def nodes(bench: Bench) -> list[dict[str, Any]]:
    """Return all prefixes of GET /cache."""
    found = []
    rest = bench.client.get("/cache").json()["prefixes"]
    while rest:
        found.append(rest.pop())
        rest += found[-1]["children"]
    return found


def test_each_prefix_tells_how_its_part_begins_and_where_it_is(bench: Bench) -> None:
    view = bench.service.admin.view().result()
    (head,) = bench.client.get("/cache").json()["prefixes"]
    first, child = view.snapshots[:2]
    assert head["head"] == "x" * len(first.head)
    assert head["children"][0]["head"] == bench.service.readable(child.head)
    for snapshot in view.snapshots:
        assert ("device" in snapshot.tiers) == (snapshot.device_bytes > 0)
        assert ("ram" in snapshot.tiers) == (snapshot.row_bytes > 0 or snapshot.state_bytes > 0)
        assert snapshot.tiers
    assert [(seq["id"], seq["busy"]) for seq in bench.client.get("/cache").json()["sequences"]] == [
        (0, False)
    ]
    (live,) = view.live
    assert live.at in {snapshot.id for snapshot in view.snapshots}
    assert live.n >= int(live.at.partition("-")[0])


def test_where_branches_part_without_a_snapshot_is_told() -> None:
    """Siblings tell which rows they share, and those that share most stand side by side."""
    bench = Bench(n_slots=64)
    for tail in ("z" * 300, *("y" * 200 + letter * 100 for letter in "vwu"), "v" * 40):
        bench.post("/completion", {"prompt": HEAD + tail, "n_predict": 2, "ignore_eos": True})
    held = bench.worker.call(
        lambda: {s.prefix.name: s for s in bench.engine.prefix_cache.cache.snapshots()}
    ).result()
    for name in held:
        if int(name.partition("-")[0]) <= 400:
            assert bench.client.request("DELETE", f"/cache/{name}").status_code == 200
    siblings = bench.client.get("/cache").json()["prefixes"]
    for before, node in itertools.pairwise(siblings):
        a = held[before["id"]].chain
        b = held[node["id"]].chain
        assert node["shared"] == max(
            (min(a[segment], b[segment]) for segment in a if segment in b), default=0
        )
    shared = [node["shared"] for node in siblings]
    assert shared[0] == 0
    assert min(shared[1:]) >= 192
    assert max(shared) >= 256
    for parent in nodes(bench):
        assert all(child["shared"] >= parent["n"] for child in parent["children"])


def test_a_view_keeps_nothing_alive_and_follows_changes(bench: Bench) -> None:
    """Results of one view serve the next, unless a parent has come or gone; they keep no state
    alive.
    """
    snapshots = bench.worker.call(
        lambda: [weakref.ref(s) for s in bench.engine.prefix_cache.cache.snapshots()]
    ).result()
    before = nodes(bench)
    assert nodes(bench)[0]["head"] == before[0]["head"]
    (root,) = bench.client.get("/cache").json()["prefixes"]
    bench.client.request("DELETE", f"/cache/{root['id']}")
    (child,) = bench.client.get("/cache").json()["prefixes"]
    assert child["id"] == root["children"][0]["id"]
    assert child["head"] == root["head"]
    assert child["row_bytes"] + child["device_bytes"] >= root["children"][0]["row_bytes"]
    bench.client.request("DELETE", "/cache")
    bench.worker.call(gc.collect).result()
    assert [reference() for reference in snapshots] == [None] * len(snapshots)


def test_checks_of_snapshots_are_counted(bench: Bench) -> None:
    body = bench.client.get("/cache").json()
    assert body["canary"] == {
        "interval": 3600,
        "verified": {},
        "differing": {},
        "skipped": {},
        "interrupted": 0,
        "seconds": 0.0,
        "reports": [],
    }
    bench.engine.canary.counts.verified["ram"] += 1
    bench.engine.canary.counts.reports.append({"snapshot": "3-aa", "place": "ram"})
    after = bench.client.get(f"/cache?since={body['revision']}").json()
    assert after["canary"]["verified"] == {"ram": 1}, "the page shows it at its next look"
    assert after["canary"]["reports"] == [{"snapshot": "3-aa", "place": "ram"}]


def test_replies_of_the_last_hour_tell_what_they_took(bench: Bench) -> None:
    replies = bench.client.get("/cache").json()["replies"]
    assert [reply["predicted_n"] for reply in replies] == [2, 2]
    totals = bench.client.get("/cache").json()["totals"]
    assert sum(reply["prompt_n"] for reply in replies) == totals["evaluated"]
    assert sum(reply["cache_n"] + reply["prompt_n"] for reply in replies) == totals["prompt"]
    assert replies[0]["age"] >= replies[1]["age"] >= 0
    assert all(reply["prompt_ms"] > 0 < reply["predicted_ms"] for reply in replies)
    now = bench.engine.clock()
    for n in range(MAX_REQUESTS):
        timings = Timings(0, n, 1.0, 1, 1.0, 1.0)
        ended = now - 3600.0 if n < 3 else now
        served = ServedRequest(ended, timings, "none", None, None)
        bench.engine.history.requests.append(served)
    replies = bench.client.get("/cache").json()["replies"]
    assert [reply["prompt_n"] for reply in replies] == list(range(3, MAX_REQUESTS))


def test_nothing_is_sent_again_until_something_has_changed(bench: Bench) -> None:
    """A client that sends the revision it has gets nothing but that number until a pin, a request
    or a removal changes the cache. The page polls this route.
    """
    client = bench.client

    def revision() -> int:
        return int(client.get("/cache").json()["revision"])

    known = revision()
    assert client.get("/cache", params={"since": known}).json() == {"revision": known}
    assert "prefixes" in client.get("/cache", params={"since": "other"}).json()
    name = client.get("/cache").json()["prefixes"][0]["id"]
    for change in (
        lambda: client.post("/cache/pin", {"id": name}),
        lambda: client.post("/cache/pin", {"id": name, "pinned": False}),
        lambda: bench.post("/completion", {"prompt": "abc", "n_predict": 1}),
        lambda: client.request("DELETE", f"/cache/{name}"),
        lambda: client.request("DELETE", "/cache"),
    ):
        assert change().status_code == 200
        body = client.get("/cache", params={"since": known}).json()
        assert body["revision"] > known
        assert "prefixes" in body
        known = body["revision"]
        assert client.get("/cache", params={"since": known}).json() == {"revision": known}


def test_one_prefix_can_be_dropped(bench: Bench) -> None:
    client = bench.client
    (head,) = client.get("/cache").json()["prefixes"]
    name = head["id"]
    others = {each["id"] for each in nodes(bench)} - {head["id"]}
    client.post("/cache/pin", {"id": name})
    refused = client.request("DELETE", f"/cache/{name}")
    assert refused.status_code == 400
    assert "pinned" in refused.text
    client.post("/cache/pin", {"id": name, "pinned": False})
    assert client.request("DELETE", f"/cache/{name}").json() == {"dropped": 1}
    assert {each["id"] for each in nodes(bench)} == others
    assert client.request("DELETE", f"/cache/{name}").status_code == 404


def test_what_the_disk_has_is_listed_and_dropped_with_the_rest(tmp_path: Path) -> None:
    """Snapshots on disk are listed with their tier, a removal takes files and RAM together, and a
    pin on disk forbids both. Labels are texts of prompts, and so hidden from foreign hosts.
    """
    tokenizer = chatml_tokenizer()
    tier = tier_on(tmp_path, text_of=partial(readable, tokenizer))
    bench = Bench(
        settings=ServerSettings(show_prompts=True),
        replies=ReplySettings(disk_policy="full"),
        disk=tier,
    )
    assert (
        bench.post("/completion", {"prompt": HEAD + "y" * 400, "n_predict": 1}).status_code == 200
    )
    assert tier.flush(60)
    both = [each for each in nodes(bench) if "disk" in each["tiers"]]
    assert both
    assert all(each["tiers"][-2:] == ["ram", "disk"] for each in both)
    assert bench.client.get("/cache").json()["stored"] == []  # they are in the tree
    known = bench.client.get("/cache").json()["revision"]
    assert bench.client.request("DELETE", "/cache").status_code == 200
    body = bench.client.get("/cache", params={"since": known}).json()
    assert body["prefixes"] == []
    stored = {each["id"]: each for each in body["stored"]}
    assert stored.keys() == {each["id"] for each in both}
    deepest = max(stored.values(), key=lambda each: each["n"])
    assert deepest["label"].endswith("yyyy")
    assert deepest["bytes"] > 0
    rebound = bench.client.get("/cache", headers={"Host": "rebound.example.com"}).json()
    assert all("label" not in each for each in rebound["stored"])
    # Pinned by `pyctl cache`.
    assert tier.directory.pin(deepest["id"], True)
    assert bench.client.request("DELETE", f"/cache/{deepest['id']}").status_code == 400
    tier.directory.pin(deepest["id"], False)
    # In memory again, and pinned on disk: nothing of it goes.
    assert (
        bench.post("/completion", {"prompt": HEAD + "y" * 400, "n_predict": 1}).status_code == 200
    )
    in_memory = {each["id"] for each in nodes(bench)}
    assert deepest["id"] in in_memory
    assert tier.directory.pin(deepest["id"], True)
    assert bench.client.request("DELETE", f"/cache/{deepest['id']}").status_code == 400
    assert {each["id"] for each in nodes(bench)} == in_memory
    tier.directory.pin(deepest["id"], False)
    assert bench.client.request("DELETE", f"/cache/{deepest['id']}").json() == {"dropped": 1}
    body = bench.client.get("/cache", params={"since": body["revision"]}).json()
    assert deepest["id"] not in {each["id"] for each in body["stored"]}
    assert bench.client.request("DELETE", f"/cache/{deepest['id']}").status_code == 404


def test_a_pin_counts_for_the_model_it_was_set_for(tmp_path: Path) -> None:
    """Two models that tokenise alike have snapshots of one name."""
    benches = []
    for fingerprint in ("one", "two"):
        tier = tier_on(tmp_path, fingerprint)
        bench = Bench(replies=ReplySettings(disk_policy="full"), disk=tier)
        assert (
            bench.post("/completion", {"prompt": HEAD + "y" * 400, "n_predict": 1}).status_code
            == 200
        )
        assert tier.flush(60)
        benches.append(bench)
    directory = benches[0].engine.prefix_cache.disk.directory
    ours, theirs = (
        {each.name for each in directory.entries() if each.fingerprint == f} for f in ("one", "two")
    )
    name = max(ours & theirs, key=lambda each: int(each.partition("-")[0]))
    assert directory.pin(f"one/{name}", True)
    assert benches[0].client.request("DELETE", f"/cache/{name}").status_code == 400
    assert benches[1].client.request("DELETE", f"/cache/{name}").status_code == 200
    assert [each.fingerprint for each in directory.entries() if each.name == name] == ["one"]


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
    """A web page of another origin can generate, as with llama-server, but neither read the cache
    nor change it, unless its origin is listed. A key does not replace that.
    """
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
        ("DELETE", "/cache/x", None),
        ("DELETE", "/cache", None),
    ):
        status = client.request(method, path, json=body, headers=headers).status_code
        assert (status != 403) is allowed, (method, path, status)
    # Generating is as open as in llama-server.
    assert (
        client.post(
            "/completion", json={"prompt": "x", "n_predict": 1}, headers=headers
        ).status_code
        == 200
    )
    assert client.get("/props", headers=headers).status_code == 200


def test_what_is_dropped_while_it_is_written_does_not_come_back(
    tmp_path: Path,
) -> None:
    """A removal counts for snapshots that are being written or wait for it: afterwards they are
    neither in RAM nor on disk.
    """
    begun = threading.Event()
    gate = threading.Event()

    def slowly(rows: Block) -> None:
        begun.set()
        assert gate.wait(60)

    tier = tier_on(tmp_path, cold_max=100)
    bench = Bench(replies=ReplySettings(disk_policy="full"), disk=tier)
    watch(bench.engine, slowly)
    try:
        for letter in "yz":
            assert (
                bench.post(
                    "/completion", {"prompt": HEAD + letter * 400, "n_predict": 1}
                ).status_code
                == 200
            )
            assert begun.wait(60)  # the first is being written, the others wait
        found = [each["id"] for each in nodes(bench) if each["n"] >= 100]
        assert len(found) > 2
        for name in found:
            assert bench.client.request("DELETE", f"/cache/{name}").json() == {"dropped": 1}
    finally:
        gate.set()
    assert tier.flush(60)
    assert all(each["n"] < 100 for each in nodes(bench))
    assert bench.client.get("/cache").json()["stored"] == []
    assert not tier.folder.lengths
    assert list(tmp_path.rglob("*.state")) == []


def test_the_timeline_has_kinds_and_the_reason_for_repeated_work() -> None:
    """A chat whose second message was edited is a rewrite that names this message."""
    bench = Bench(settings=ServerSettings(show_prompts=True))
    words = "x" * 200
    first = [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
    for text in ("a", "b"):
        edited = {"role": "user", "content": text * 300}
        body = {"messages": [*first, edited], "max_tokens": 1}
        assert bench.post("/v1/chat/completions", body).status_code == 200
    body = bench.client.get("/cache").json()
    opened, rewritten = body["replies"]
    assert opened["kind"] == "first"
    assert opened["why"] is None
    assert rewritten["kind"] == "rewrite"
    assert rewritten["why"]["difference"] == "message 3 of 3"
    assert rewritten["why"]["changed"] >= 300
    assert body["kinds"]["rewrite"] == 1


def test_clients_without_the_right_to_read_see_kinds_but_no_reasons() -> None:
    bench = filled()
    asking = Client.to_app(bench.app, "192.0.2.7")
    replies = asking.get("/cache").json()["replies"]
    assert [reply["kind"] for reply in replies] == ["first", "append"]
    assert not any("why" in reply for reply in replies)
