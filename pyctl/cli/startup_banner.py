"""The block that `pyctl serve` logs when it is ready: addresses, model, device, and contents of the
cache.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from pyctl.cache.ports import Entry
from pyctl.cache.saved_time import Saved
from pyctl.engine.backend import EngineInfo
from pyctl.text import duration

__all__ = [
    "Addresses",
    "cache_text",
    "device_text",
    "lan_address",
    "ready_text",
    "restored_text",
    "saved_text",
]

MIB = 2**20
GIB = 2**30


def lan_address() -> str:
    """Return this machine's IPv4 address in its network, "" if it has none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                ("192.0.2.1", 9)
            )  # reserved for documentation; connecting a datagram socket only routes
            return str(probe.getsockname()[0])
        except OSError:
            return ""


class Addresses(msgspec.Struct, frozen=True):
    """The addresses where clients find the server: ``local`` for this machine, ``network`` for
    others; "" for none.

    ``sockets`` are UNIX sockets. With ``is_open``, other machines reach it.
    """

    local: str = ""
    network: str = ""
    sockets: tuple[str, ...] = ()
    is_open: bool = False

    @classmethod
    def from_sockets(
        cls, bound: Iterable[Any], scheme: str, prefix: str, lan: Callable[[], str] = lan_address
    ) -> Addresses:
        """Return the addresses for names of ``bound`` sockets, as `getsockname` has them; ``lan``
        is called if all interfaces are bound.
        """
        sockets = []
        local = []
        network = []
        for name in bound:
            if isinstance(name, str):
                sockets.append(f"unix://{name}")
                continue
            host = ipaddress.ip_address(name[0])
            port = name[1]
            if host.is_unspecified:
                local.append(
                    _url(scheme, "127.0.0.1" if host.version == 4 else "::1", port, prefix)
                )
                network.append(_url(scheme, lan(), port, prefix))
            else:
                (local if host.is_loopback else network).append(_url(scheme, name[0], port, prefix))
        outside = next(filter(None, network), "")
        return cls(next(iter(local), outside), outside, tuple(sockets), bool(network))

    @property
    def open_text(self) -> str:
        """A warning that the server needs no key; "" if only this machine reaches it."""
        where = f" at {self.network}" if self.network else ""
        return (
            f"no --api-key: every machine in the network can use this server{where}"
            if self.is_open
            else ""
        )


def _url(scheme: str, host: str, port: int, prefix: str) -> str:
    """Return the address, "" without a host."""
    return host and f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{prefix}"


def ready_text(
    seconds: float,
    addresses: Addresses,
    *,
    has_page: bool,
    info: EngineInfo | str,
    device: str,
    cache: str,
    saved: str = "",
) -> str:
    """Return the block; its first line is "ready in ...". ``info`` is a text if there are several
    models, ``saved`` "" if nothing was saved today.
    """
    local = addresses.local
    network = addresses.network
    models = f"models     {info}"
    if not isinstance(info, str):
        requests = "1 request" if info.n_seqs == 1 else f"{info.n_seqs} requests"
        models = (
            f"model      {info.model_alias}, {info.n_ctx:,} tokens of context, {requests} at a time"
        )
    return "\n".join(
        [
            f"ready in {seconds:.1f} s",
            *([f"page       {local}/"] if local and has_page else ()),
            *(
                [f"OpenAI     {local}/v1", f"Anthropic  {local}", f"Ollama     {local}"]
                if local
                else ()
            ),
            *([f"network    {network}/"] if network not in ("", local) else ()),
            *(f"socket     {socket}" for socket in addresses.sockets),
            models,
            f"device     {device}",
            f"cache      {cache}",
            *([f"saved      {saved}"] if saved else ()),
        ]
    )


def device_text(gpus: Sequence[str], threads: tuple[int, int]) -> str:
    """Return ``gpus``, or the CPU with its ``threads`` for prompts and for single tokens, if they
    are known.
    """
    shown = ("1 thread" if n == 1 else f"{n} threads" for n in threads)
    by_use = " for prompts, ".join(shown) + " for replies" if any(threads) else ""
    return ", ".join(gpus) or ", ".join(filter(None, ("CPU", by_use)))


def restored_text(saved: Saved) -> str:
    """Return how many tokens the cache restored, in how many requests."""
    requests = "1 request" if saved.requests == 1 else f"{saved.requests:,} requests"
    return f"{saved.tokens:,} tokens restored in {requests}"


def saved_text(today: Saved) -> str:
    """Return the time that the cache saved ``today``, "" if it restored nothing."""
    if not today.requests:
        return ""
    return f"about {duration(today.seconds)} today, {restored_text(today)}"


def cache_text(budget: int, directory: str, entries: Sequence[Entry]) -> str:
    """Return the size of the cache in RAM, and of the part of ``directory`` for this model; it is
    "" without one.

    ``budget`` is in bytes, -1 for no limit.
    """
    ram = (
        "off"
        if budget == 0
        else "RAM without limit"
        if budget < 0
        else f"{budget // MIB:,} MiB of RAM"
    )
    if not directory:
        return (
            ram
            if budget == 0
            else f"{ram}; no directory, so nothing survives a restart (--kv-cache-dir)"
        )
    if not entries:
        return f"{ram}; {directory} holds nothing of this model yet"
    n_bytes = sum(entry.n_bytes for entry in entries)
    size = f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"
    prefixes = "1 prefix" if len(entries) == 1 else f"{len(entries):,} prefixes"
    return f"{ram}; {directory} holds {prefixes}, {size}"
