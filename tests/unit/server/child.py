"""A server process without a model, for tests of signals: prints its address, serves, prints how it
ended.

Arguments: addresses, port, grace, how it loads, connections at most, constants of `guard` as
NAME=VALUE.
"""

from __future__ import annotations

import sys
import threading
import time

from pyctl.engine.request import Request
from pyctl.errors import ConfigError
from pyctl.server import guard, run
from pyctl.server.app import create_loading_app
from pyctl.server.app_state import AppState
from pyctl.server.listen import bind
from pyctl.server.middleware import LoadingApp
from pyctl.server.run import serve
from pyctl.server.server_settings import ListenSettings, ServerSettings
from tests.unit.server.fake import Bench, Pause, Script, play


def endless(request: Request) -> Script:
    yield from list(play("a")(request))[:-1]
    yield Pause(None)


def main() -> None:
    """Serve on the address of the arguments, print the bound names, and load at once, slowly, or
    with an error.
    """
    bench = Bench(endless)
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        bench.worker.close()

    def begin() -> None:
        if loading == "at once":
            gate.open(bench.app)
        names = [sock.getsockname() for sock in sockets]
        print(
            ", ".join(
                f"unix://{n}" if isinstance(n, str) else f"http://{n[0]}:{n[1]}" for n in names
            ),
            flush=True,
        )
        while loading == "slowly" and not stopped.is_set():
            time.sleep(0.01)
        if loading == "failing":
            raise ConfigError("the model is broken")

    host = sys.argv[1]
    port = int(sys.argv[2])
    grace = float(sys.argv[3])
    loading = sys.argv[4]
    for constant in sys.argv[6:]:
        name, _, value = constant.partition("=")
        setattr(guard, name, float(value))
    run.DRAIN_SECONDS = 20.0  # the machine may be busy
    gate = LoadingApp(create_loading_app(AppState(ServerSettings())))
    try:
        with bind(host.split(","), port) as sockets:
            listen = ListenSettings(max_connections=int(sys.argv[5]))
            serve(gate, sockets, listen, grace_seconds=grace, on_ready=begin, on_stop=stop)
    except ConfigError as error:
        print(error, flush=True)
        raise SystemExit(2) from None
    print("ended in good order", flush=True)


if __name__ == "__main__":
    main()
