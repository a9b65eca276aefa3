"""A server process on a fake worker, for tests of signals: prints its address, serves, prints how it ended."""

from __future__ import annotations

import asyncio
import sys
import time

from pyctl.engine.request import Event, Failed, Request
from pyctl.errors import ConfigError, UnavailableError
from pyctl.server.lifecycle import LoadingApp, bind, serve
from pyctl.server.server_settings import Cors
from tests.server.fake import Bench, FakeHandle, Pause, Script, play


class StoppableHandle(FakeHandle):
    """Ends with an error once ``stopped`` is true for all."""

    stopped = False

    async def __anext__(self) -> Event:
        pending = asyncio.ensure_future(super().__anext__())
        while not pending.done():
            if StoppableHandle.stopped:
                pending.cancel()
                self._ended = True
                return Failed(UnavailableError("the server is shutting down"))
            await asyncio.wait((pending,), timeout=0.02)
        return pending.result()


def endless(request: Request) -> Script:
    yield from list(play("a")(request))[:-1]
    yield Pause(None)


def main() -> None:
    bench = Bench(endless)
    bench.worker.submit = lambda request: StoppableHandle(endless(request))  # type: ignore[method-assign]

    def stop() -> None:
        StoppableHandle.stopped = True

    def begin(address: str) -> None:
        if loading == "at once":
            gate.open(bench.app)
        print(address, flush=True)
        while loading == "slowly" and not StoppableHandle.stopped:
            time.sleep(0.01)
        if loading == "failing":
            raise ConfigError("the model is broken")

    host, port, grace, loading = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    gate = LoadingApp(Cors())
    try:
        with bind(host, port) as sock:
            serve(gate, sock, grace_seconds=grace, on_ready=begin, on_stop=stop)
    except ConfigError as error:
        print(error, flush=True)
        raise SystemExit(2) from None
    print("ended in good order", flush=True)


if __name__ == "__main__":
    main()
