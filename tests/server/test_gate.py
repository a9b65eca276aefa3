from __future__ import annotations

from pyctl.server.lifecycle import LoadingApp
from pyctl.server.server_settings import Cors
from tests.server.fake import Bench, Client, play

LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


def test_everything_waits_for_the_model() -> None:
    bench = Bench(play("x"))
    gate = LoadingApp(Cors())
    client = Client(gate)
    for method, path in (("GET", "/health"), ("POST", "/completion"), ("GET", "/nowhere"), ("DELETE", "/cache")):
        response = client.request(method, path, headers={"Origin": "http://page"})
        assert (response.status_code, response.json()) == (503, LOADING)
        assert response.headers["access-control-allow-origin"] == "http://page"
    assert client.options("/completion").status_code == 200
    gate.open(bench.app)
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/nowhere").status_code == 404
