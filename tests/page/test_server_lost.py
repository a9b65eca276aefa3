"""The page while the server is not started, stopped, restarted, or under a path prefix."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread

import uvicorn
from starlette.types import ASGIApp

from pyctl.measure.server_process import ServerProcess
from pyctl.server.app import create_loading_app, early_paths
from pyctl.server.app_state import AppState
from pyctl.server.middleware import LoadingApp
from pyctl.server.server_settings import ServerSettings
from tests.page.browser import Tab, saying
from tests.page.conftest import SERVE, OpenTab
from tests.page.test_cache_view import nodes, shown
from tests.process.conftest import disk_cache

UNREACHABLE = "net::ERR_"
"""The beginning of the browser's own message when no server answers."""


def written(tab: Tab) -> set[str]:
    """Return the ids of what is on the disk of the server."""
    body = tab.server("cache")
    kept = {key for key, node in nodes(body).items() if "disk" in node["tiers"]}
    return kept | {entry["id"] for entry in body["stored"]}


def test_the_server_is_restarted_under_the_page(open_tab: OpenTab, tmp_path: Path) -> None:
    """A server killed in the middle of a reply leaves the text that came, with an error; once it is
    back the page repeats the request, which is restored from disk.
    """
    disk = (*disk_cache(tmp_path / "disk"), "--kv-cache-min-tokens", "0")
    server = ServerProcess((*SERVE, *disk), tmp_path / "log")
    try:
        server.start()
        tab = open_tab(server.url)
        tab.expected += [
            UNREACHABLE,
            "status of 503",
            "status of 404",
        ]  # the new server has not kept the reply
        first = tab.say(
            "My name is Ada and the code of the north door is 4711, which is painted in green and "
            "blue."
        )
        tab.until(lambda: set(first["cache"]["saved"]) <= written(tab))
        draft = "What is the code of the north door?"
        tab.page.fill("#text", draft)
        tab.begin("Count on.", {"grammar": 'root ::= ("on and " ){1500}', "max_tokens": -1})
        tab.until(lambda: "on and on and" in tab.texts()[-1])
        server.kill()  # in the middle of a reply
        tab.until_idle()
        said = tab.texts()[-1]
        assert said.startswith("on and on and")
        assert tab.messages.last.get_by_role("alert").inner_text()
        notice = tab.page.get_by_role("status").filter(visible=True)
        tab.until(lambda: notice.count() or tab.page.locator("#cache .note:not(:empty)").count())

        tab.configure(json="")
        tab.begin(draft)
        tab.messages.last.get_by_role("alert").wait_for()
        assert tab.texts()[-2] == draft
        server.start(server.port)
        tab.until(lambda: not tab.page.locator("#notice").is_visible())
        timings = tab.act(tab.replies.last.get_by_role("button", name="Try again"))
        assert timings["cache"]["source"] == "disk"
        assert "from disk" in tab.replies.last.inner_text()
        assert (
            tab.page.locator(".message .error").count() == 1
        )  # that of the reply that was cut off
        tab.until(lambda: tab.page.locator("#cache .node.path").count())
        tab.reload()
        assert tab.texts()[3] == said
    finally:
        server.stop()


def test_the_last_words_are_shown_though_nobody_renders_them(tab: Tab) -> None:
    """The text that comes between the last frame and the end of the server is shown."""
    tab.expected.append(UNREACHABLE)
    tab.page.route("**/page/markdown", lambda route: route.abort())
    tab.page.evaluate(
        """() => {
          const real = window.requestAnimationFrame;
          let n = 0;
          window.requestAnimationFrame = (run) => (run.name === "show" && n++ ? 0 : real(run));  // one frame, no more
        }"""
    )
    tab.say("The last words?", saying("These are the last words."))
    assert tab.texts()[-1] == "These are the last words."


def test_the_page_comes_while_the_model_loads(
    open_tab: OpenTab, tmp_path: Path, server: ServerProcess
) -> None:
    """The page of a server that answers 503 waits, and starts by itself."""
    tab = open_tab(server.url, ready=False)
    tab.expected.append("status of 503")
    loading = [True]
    refusal = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    tab.page.route(
        lambda url: "/page/" not in url and not url.endswith("/"),
        lambda route: route.fulfill(status=503, json=refusal) if loading[0] else route.continue_(),
    )
    tab.page.goto(tab.url)
    notice = tab.page.locator("#notice")
    tab.until(lambda: "load" in notice.inner_text().lower())
    loading[0] = False
    tab.until(lambda: not notice.is_visible())
    tab.until_ready()
    tab.say("Hello", saying("Yes."))
    assert tab.page.locator("#model").inner_text()


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Yield the address at which ``app`` answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def test_old_replies_are_rendered_while_the_model_loads(open_tab: OpenTab, tmp_path: Path) -> None:
    """The gate of a server whose model never comes answers; what is asked of the model waits."""
    settings = ServerSettings(api_prefix="/llm")
    shared = AppState(settings)
    gate = LoadingApp(create_loading_app(shared), early=early_paths(settings))
    message = {"id": "m", "parent": None, "role": "assistant", "content": "**Yes.**", "created": 1}
    tree = {
        "id": "c",
        "title": "T",
        "updated": 1,
        "messages": {"m": message},
        "leaf": "m",
        "pick": {},
        "system": "",
    }
    with closing(shared.markdown), serving(gate) as url:
        tab = open_tab(f"{url}/llm/", ready=False)
        tab.expected.append("status of 503")
        tab.page.goto(tab.url)
        notice = tab.page.locator("#notice")
        tab.until(lambda: "Loading the model" in notice.inner_text())
        save = (
            "async (t) => { sessionStorage.open = 'c'; await (await "
            "import('./page/store.js')).save(t); }"
        )
        tab.page.evaluate(save, tree)
        tab.page.reload()
        tab.replies.last.locator("strong").wait_for()
        tab.until(lambda: "Loading the model" in notice.inner_text())
        tab.close()


def test_the_page_under_a_prefix(open_tab: OpenTab, tmp_path: Path) -> None:
    with ServerProcess((*SERVE, "--api-prefix", "/llm"), tmp_path / "log", prefix="/llm") as server:
        tab = open_tab(f"{server.url}/llm/")
        tab.say("Hello", saying("**Yes.**"))
        tab.until(lambda: tab.replies.last.locator("strong").count())
        tab.until(lambda: tab.page.locator("#cache .headline").count())
        tab.close()
        assert all(request.url.startswith((tab.url, "data:")) for request in tab.requests)


def test_other_tabs_and_clients_show_up(tab: Tab) -> None:
    """The tree follows what others do to the server."""
    tab.until(lambda: tab.page.locator("#cache .gauge").count())
    before = set(shown(tab))
    body = {
        "messages": [{"role": "user", "content": "Another client says this. " * 30}],
        "max_tokens": 1,
    }
    tab.context.request.post(tab.url + "v1/chat/completions", data=body)
    tab.until(lambda: set(shown(tab)) - before)  # others may go meanwhile
    tab.until(lambda: "Another client says this" in tab.page.locator("#cache").inner_text())
