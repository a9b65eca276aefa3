"""The log when the server is ready: addresses, warnings, the cache."""

from __future__ import annotations

import pytest

from pyctl.cache.ports import Entry
from pyctl.cli.startup_banner import Addresses, cache_text, device_text, ready_text
from tests.unit.server.fake import INFO

ALL = ("0.0.0.0", 1)
ALL_V6 = ("::", 1, 0, 0)
LOCAL = ("127.0.0.1", 1)
LOCAL_V6 = ("::1", 1, 0, 0)
OTHER = ("10.0.0.1", 1)
SOCKET = "/run/a.sock"


def addresses(*bound: object, scheme: str = "http", prefix: str = "") -> Addresses:
    return Addresses.from_sockets(bound, scheme, prefix, lambda: "192.168.1.5")


@pytest.mark.parametrize(
    ("bound", "local", "network"),
    [
        ([LOCAL], "https://127.0.0.1:1/llm", ""),
        ([ALL], "https://127.0.0.1:1/llm", "https://192.168.1.5:1/llm"),
        ([ALL_V6], "https://[::1]:1/llm", "https://192.168.1.5:1/llm"),
        ([OTHER, LOCAL_V6], "https://[::1]:1/llm", "https://10.0.0.1:1/llm"),
        ([SOCKET, OTHER], "https://10.0.0.1:1/llm", "https://10.0.0.1:1/llm"),
        ([SOCKET], "", ""),
    ],
)
def test_where_clients_find_the_server(bound: list[object], local: str, network: str) -> None:
    found = addresses(*bound, scheme="https", prefix="/llm")
    assert found.local == local
    assert found.network == network
    assert found.sockets == (("unix:///run/a.sock",) if SOCKET in bound else ())


@pytest.mark.parametrize(
    ("bound", "warning"),
    [
        ([LOCAL, LOCAL_V6, SOCKET], ""),
        ([ALL], "can use this server at http://192.168.1.5:1"),
        ([LOCAL, OTHER], "can use this server at http://10.0.0.1:1"),
    ],
)
def test_a_server_open_to_the_network_says_so(bound: list[object], warning: str) -> None:
    text = addresses(*bound).open_text
    assert text.endswith(warning)
    assert bool(text) == bool(warning)


def test_a_machine_without_a_network_gets_no_address() -> None:
    found = Addresses.from_sockets([ALL], "http", "", lambda: "")
    assert found.local == "http://127.0.0.1:1"
    assert found.network == ""
    assert found.open_text.endswith("can use this server")


def entry(n_bytes: int) -> Entry:
    return Entry("f", "9-abc", 9, n_bytes, 0.0, 0.0, 0, False, True, "", "")


@pytest.mark.parametrize(
    ("ram", "directory", "sizes", "text"),
    [
        (8192 * 2**20, "/kv", [2**29] * 3, "8,192 MiB of RAM; /kv holds 3 prefixes, 1.5 GiB"),
        (-1, "/kv", [2**20], "RAM without limit; /kv holds 1 prefix, 1.0 MiB"),
        (2**20, "/kv", [], "1 MiB of RAM; /kv holds nothing of this model yet"),
        (
            2**20,
            "",
            [],
            "1 MiB of RAM; no directory, so nothing survives a restart (--kv-cache-dir)",
        ),
        (0, "", [], "off"),
    ],
)
def test_what_the_cache_holds(ram: int, directory: str, sizes: list[int], text: str) -> None:
    assert cache_text(ram, directory, [entry(size) for size in sizes]) == text


def test_the_block_has_a_line_for_each_address() -> None:
    """The banner lists each protocol of a TCP address, and the socket. Without a TCP address no
    line shows a URL.
    """
    both = addresses(ALL, SOCKET)
    text = ready_text(2.64, both, has_page=True, info=INFO, device="GPU (CUDA0)", cache="off")
    lines = text.splitlines()
    assert lines[0] == "ready in 2.6 s"
    names = [
        "page",
        "OpenAI",
        "Anthropic",
        "Ollama",
        "network",
        "socket",
        "model",
        "device",
        "cache",
    ]
    assert [line.split()[0] for line in lines[1:]] == names
    assert lines[2].split()[1] == "http://127.0.0.1:1/v1"
    assert f"{INFO.n_ctx:,} tokens of context" in lines[7]
    without = ready_text(
        1.0, addresses(SOCKET), has_page=True, info=INFO, device="CPU", cache="off"
    )
    assert [line.split()[0] for line in without.splitlines()[1:]] == [
        "socket",
        "model",
        "device",
        "cache",
    ]
    assert "\ndevice     CPU\n" in without


def test_the_device_of_a_cpu_has_its_threads() -> None:
    assert device_text([], (2, 1)) == "CPU, 2 threads for prompts, 1 thread for replies"
    assert device_text([], (0, 0)) == "CPU"  # of several models, none is loaded
    assert device_text(["RTX (CUDA0)"], (8, 8)) == "RTX (CUDA0)"
