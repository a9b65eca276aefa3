"""Models that are loaded and unloaded in this process: requests that wait, loads that fail, clients
that leave.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from pyctl.errors import (
    ConfigError,
    EngineError,
    ModelError,
    PyctlError,
    RequestError,
    UnavailableError,
)
from pyctl.server.app import create_app
from pyctl.server.app_state import AppState, HttpService
from pyctl.server.load_order import LoadOrder
from pyctl.server.model_card import ModelCard
from pyctl.server.models import Lease, Models, ModelSource, cancel_lease
from pyctl.server.server_settings import ServerSettings
from tests.client import HI, Client
from tests.unit.server.fake import Bench
from tests.unit.server.parts import Caller, in_loop, supervised
from tests.waiting import until


class Loader:
    """Loads the service of a `Bench`, when ``opened``, unless ``error`` says why not."""

    def __init__(
        self, error: Exception | None = None, *, is_open: bool = True, fits: bool = True
    ) -> None:
        self.error = error
        self.room = fits
        self.n_loads = 0
        self.n_asked = 0
        self.opened = threading.Event()
        if is_open:
            self.opened.set()

    def load(self, report: Callable[[float], bool]) -> HttpService:
        self.n_loads += 1
        assert report(0.5)
        assert self.opened.wait(60)
        if self.error is not None:
            raise self.error
        return Bench().service

    def fits(self) -> bool:
        self.n_asked += 1
        return self.room

    def is_current(self) -> bool:
        return True


@pytest.fixture
def found() -> list[ModelSource]:
    """Return the models that there are; a reload looks again."""
    return []


@pytest.fixture
def run(found: list[ModelSource]) -> Iterator[Callable[..., Models]]:
    """run(1, a=Loader(), ...) -> models that are served, of which one is loaded at a time."""
    with ExitStack() as stack:

        def start(maximum: int, **loaders: Loader) -> Models:
            found[:] = [ModelSource(ModelCard(name), loader) for name, loader in loaders.items()]
            state = AppState(ServerSettings(ping_seconds=1))
            return stack.enter_context(
                supervised(Models(state, lambda: list(found), LoadOrder(maximum, 0.0)))
            )

        yield start


def lease(models: Models, name: str) -> Lease:
    return models.acquire(models.get(name)).result(60)


def state(models: Models, name: str) -> str:
    return models.get(name).status


def test_failed_load_fails_its_requests_and_reloads_evicted(run: Callable[..., Models]) -> None:
    bad = Loader(ModelError("it is broken"))
    models = run(1, good=Loader(), bad=bad)
    lease(models, "good").close()
    for _ in range(3):
        with pytest.raises(ModelError, match="it is broken"):
            lease(models, "bad")
    assert bad.n_loads == 1, "for some seconds it is not tried again"
    until(lambda: state(models, "good") == "loaded")
    assert state(models, "bad") == "unloaded"
    bad.error = None
    models.load(models.get("bad"))
    until(lambda: state(models, "bad") == "loaded")


def test_no_client_gets_the_address_of_a_download(
    run: Callable[..., Models], caplog: pytest.LogCaptureFixture
) -> None:
    """Some hosts have the token in the path. The log has the address."""
    address = "https://host.example/s3cret/x.gguf"
    models = run(1, bad=Loader(ConfigError(f"cannot fetch {address}: refused")))
    client = Client.to_app(create_app(models))
    answers = [
        client.post("/completion", {"model": "bad", "prompt": "a"}),
        client.get("/models"),
        client.get("/v1/models/bad"),
        client.get("/props?model=bad&autoload=1"),
    ]
    shown = "cannot fetch (an address, in the server's log) refused"
    assert [shown in each.text for each in answers] == [True] * 4
    assert not any("s3cret" in each.text for each in answers)
    assert address in caplog.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_an_image_of_another_site_reloads_no_presets(
    headers: dict[str, str], status: int, run: Callable[..., Models], found: list[ModelSource]
) -> None:
    """A browser sends no Origin for it."""
    models = run(1, a=Loader())
    found.append(ModelSource(ModelCard("new"), Loader()))
    answer = Client.to_app(create_app(models)).get(
        "/models?reload=1", headers={"Host": "localhost:8080", **headers}
    )
    assert answer.status_code == status
    assert (models.find("new") is not None) == (status == 200)


@pytest.mark.timeout(60)
def test_the_head_of_a_stream_is_no_stream(run: Callable[..., Models]) -> None:
    answer = Client.to_app(create_app(run(1, a=Loader()))).request("HEAD", "/models/sse")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("call", ["admin.n_kept", "worker.load"])
def test_an_end_while_a_model_is_loaded_again_is_no_error(
    run: Callable[..., Models], caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """The server may end at any call while a model is loaded: the request that waits fails as
    unavailable, no thread stays, and the log has no error.
    """
    models = run(1, a=Loader(), b=Loader())
    for name in ("a", "b"):
        lease(models, name).close()
    owner, _, method = call.partition(".")

    def ends() -> Future[int]:
        models.closing.set()
        cancelled: Future[int] = Future()
        cancelled.cancel()
        return cancelled

    setattr(getattr(models.get("a").service, owner), method, ends)
    asked = models.acquire(models.get("a"))
    until(models.closing.is_set)
    models.close()
    assert isinstance(asked.exception(60), UnavailableError)
    until(lambda: not any(thread.name == "pyctl-models" for thread in threading.enumerate()))
    assert [
        record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")
    ] == []


def test_what_serves_does_not_leave(run: Callable[..., Models]) -> None:
    large = Loader(fits=False)
    models = run(0, a=Loader(), b=large)
    first = lease(models, "a")
    second = models.acquire(models.get("b"))
    until(lambda: large.n_asked)
    assert not second.done()
    first.close()
    assert second.result(60).service is models.get("b").service
    assert state(models, "a") == "unloaded"
    assert state(models, "b") == "loaded"


def test_leaving_client_gives_up_its_place_and_late_leases(run: Callable[..., Models]) -> None:
    slow = Loader(is_open=False)
    models = run(1, slow=slow)
    asked = [models.acquire(models.get("slow")) for _ in range(3)]
    until(lambda: state(models, "slow") == "loading")
    cancel_lease(asked[0])
    slow.opened.set()
    kept = asked[1].result(60)
    assert asked[0].cancelled()
    cancel_lease(asked[2])
    assert models.order.n_running("slow") == 1
    kept.close()
    assert models.order.n_running("slow") == 0


def test_an_engine_that_fails_ends_the_process(run: Callable[..., Models]) -> None:
    models = run(0, a=Loader(), b=Loader())
    found: list[PyctlError | None] = []
    service = lease(models, "a").service
    service.worker.give_up(EngineError("the device is lost"))
    until(lambda: models.trouble is not None)
    found.append(models.trouble)
    assert str(found[0]) == "the device is lost"
    with pytest.raises(UnavailableError):
        lease(models, "b")
    assert Client.to_app(create_app(models)).get("/health").status_code == 503


async def answer(models: Models, loader: Loader, **fields: Any) -> bytes:
    """Return the stream that the application sends; the model is loaded after its first bytes."""
    caller = Caller(
        create_app(models), "/v1/chat/completions", {"messages": HI, "stream": True, **fields}
    )
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: bool(caller.bodies))
    loader.opened.set()
    await call
    assert caller.sent[0]["status"] == 200
    return b"".join(caller.bodies)


@in_loop
async def test_a_stream_gets_comments_while_the_model_is_loaded(run: Callable[..., Models]) -> None:
    slow = Loader(is_open=False)
    broken = Loader(ModelError("it is broken"), is_open=False)
    models = run(0, slow=slow, broken=broken)
    sent = await answer(models, slow, model="slow", max_tokens=2)
    assert sent.startswith(b":\n\n")
    assert sent.endswith(b"data: [DONE]\n\n")
    sent = await answer(models, broken, model="broken")
    assert json.loads(sent.rpartition(b"data: ")[2])["error"]["message"] == "it is broken"


@pytest.mark.parametrize(
    ("headers", "api_keys", "is_shown"),
    [
        ({}, (), True),
        ({"origin": "http://server"}, (), True),
        ({"origin": "http://evil.example"}, (), False),
        ({"host": "evil.example"}, (), False),
        ({"host": "evil.example", "authorization": "Bearer k"}, ("k",), True),
        ({"origin": "http://evil.example", "authorization": "Bearer k"}, ("k",), False),
    ],
)
def test_own_pages_and_programs_alone_see_the_flags_of_models(
    headers: dict[str, str], api_keys: tuple[str, ...], is_shown: bool
) -> None:
    card = ModelCard("a", args=("serve", "-c", "1"), preset="c = 1\n")
    models = Models(
        AppState(ServerSettings(api_keys=api_keys)), lambda: [ModelSource(card, Loader())]
    )
    client = Client.to_app(create_app(models))
    (listed,) = client.get("/v1/models", headers=headers).json()["data"]
    for status in (listed["status"], client.get("/v1/models/a", headers=headers).json()["status"]):
        assert status.pop("value") == "unloaded"
        assert status == ({"args": ["serve", "-c", "1"], "preset": "c = 1\n"} if is_shown else {})


@pytest.mark.parametrize("body", [{"model": "b"}, {"name": "b"}, {"model": "", "name": "b:latest"}])
def test_a_model_is_shown_by_either_of_its_names_in_ollama(
    run: Callable[..., Models], body: dict[str, str]
) -> None:
    models = run(0, a=Loader(), b=Loader())
    client = Client.to_app(create_app(models))
    assert client.post("/api/show", body).status_code == 200
    assert state(models, "a") == "unloaded"
    assert state(models, "b") == "loaded"
    named = client.post("/api/chat", {"name": "b", "messages": HI, "stream": False})
    assert named.status_code == 400
    assert named.json()["error"] == "model name is missing from the request"


@pytest.mark.parametrize(
    "body", [b'\xef\xbb\xbf{"model": "b", "content": "x"}', rb'{"model": "b", "content": "\ud83d"}']
)
def test_a_model_is_found_in_any_body_that_is_read(run: Callable[..., Models], body: bytes) -> None:
    models = run(0, a=Loader(), b=Loader())
    answer = Client.to_app(create_app(models)).post("/tokenize", content=body)
    assert answer.status_code == 200, answer.text
    assert state(models, "a") == "unloaded"
    assert state(models, "b") == "loaded"


def test_a_reload_unloads_what_changed_and_leaves_the_rest(
    run: Callable[..., Models], found: list[ModelSource]
) -> None:
    """A reload waits for the replies of changed models, keeps the others loaded, and serves later
    requests with the new settings. A wrong file changes nothing.
    """
    models = run(0, same=Loader(), other=Loader(), gone=Loader())
    events = list[Any]()
    stays = lease(models, "same")
    served = {name: lease(models, name) for name in ("other", "gone")}
    stale = models.get("gone")
    models.listen(lambda event: events.append(event and event["event"]))
    cards = ModelCard("same"), ModelCard("other", preset="c = 1"), ModelCard("new")
    found[:] = [ModelSource(card, Loader()) for card in cards]
    done = models.reload()
    until(lambda: all(models.get(name).unload_at is not None for name in served))
    late = [models.acquire(models.get(name)) for name in ("other", "gone")]
    assert not done.done(), "replies end first"
    for each in served.values():
        each.close()
    done.result(60)
    assert [model.name for model in models] == ["same", "other", "new"]
    assert late[0].result(60).service is not served["other"].service, (
        "it waits for the model with its new settings"
    )
    with pytest.raises(RequestError, match="model 'gone' not found"):
        late[1].result(60)
    with pytest.raises(RequestError, match="model 'gone' not found"):
        models.acquire(stale).result(60)
    assert lease(models, "same").service is stays.service
    assert "models_reload" in events
    found[:] = [ModelSource(ModelCard(name, ("twice",)), Loader()) for name in "ab"]
    with pytest.raises(ConfigError, match="two models are called 'twice': a and b"):
        models.reload()
    assert [model.name for model in models] == ["same", "other", "new"], (
        "a file that is wrong changes nothing"
    )


def test_a_reload_waits_for_no_replies_where_there_are_none(
    run: Callable[..., Models], found: list[ModelSource]
) -> None:
    models = run(0, it=Loader())
    lease(models, "it").close()
    served = models.get("it")
    served.source = replace(served.source, stop_seconds=1000.0)
    found[:] = [ModelSource(ModelCard("it", preset="c = 1"), Loader())]
    models.reload().result(60)
    assert models.get("it") is not served


def test_events_of_models(run: Callable[..., Models]) -> None:
    """A listener gets the loading, progress, loaded and unloaded events of each model in order,
    none twice.
    """
    models = run(1, a=Loader(), b=Loader())
    events = list[Any]()
    end = models.listen(events.append)
    lease(models, "a").close()
    lease(models, "b").close()
    until(lambda: len(events) == 7)
    end()
    progress = {"stages": ["text_model"], "current": "text_model", "value": 0.5}
    told = [
        (event["model"], event["data"]["status"], event["data"].get("progress")) for event in events
    ]
    of_a = [
        ("a", "loading", None),
        ("a", "loading", progress),
        ("a", "loaded", None),
        ("a", "unloaded", None),
    ]
    assert told == [*of_a, *(("b", *rest) for _, *rest in of_a[:3])]


def test_a_model_is_found_in_a_compressed_body(run: Callable[..., Models]) -> None:
    models = run(0, a=Loader(), b=Loader())
    body = gzip.compress(b'{"model": "b", "content": "x"}')
    answer = Client.to_app(create_app(models)).post(
        "/tokenize", content=body, headers={"content-encoding": "gzip"}
    )
    assert answer.status_code == 200, answer.text
    assert state(models, "a") == "unloaded"
    assert state(models, "b") == "loaded"
