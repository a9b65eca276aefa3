"""An operator's requests, next to the clients': cache views, saves, restores, pins, clears."""

from __future__ import annotations

import random
import time
from typing import Any

import httpx

from bench.soak.findings import Findings
from bench.soak.target import Target

LOOKS = ("/metrics", "/slots", "/cache", "/props", "/v1/models", "/health", "/lora-adapters")


class Operator:
    """Does one thing about once a second."""

    def __init__(self, target: Target, findings: Findings, seed: int, n_sequences: int) -> None:
        self.target = target
        self.findings = findings
        self.n_sequences = n_sequences
        self.random = random.Random(seed)
        self._saved: set[str] = set()

    def run(self) -> None:
        """Send an operator's requests until the soak is over."""
        with httpx.Client(timeout=120) as client:
            while life := self.target.ready():
                what = self.random.choice(
                    ("look", "look", "save", "restore", "erase", "pin", "clear")
                )
                try:
                    response = self._do(client, what)
                except httpx.TransportError as error:
                    if self.target.lives(life):
                        self.findings.violate(f"{what}: {error!r}")
                    continue
                self.findings.count("requests")
                self.findings.count(f"operator: {what} {response.status_code}")
                allowed = (
                    (200, 404, 503)
                    if what == "pin"
                    else (200, 400, 503)
                    if what == "restore"
                    else (200, 503)
                )
                if response.status_code not in allowed and self.target.lives(life):
                    self.findings.violate(
                        f"operator: {what}: {response.status_code} {response.text[:200]}"
                    )
                time.sleep(self.random.uniform(0.2, 1.8))

    def _do(self, client: httpx.Client, what: str) -> httpx.Response:
        """Send a request of the kind ``what`` with random parameters, and return the response. A
        file that was not saved is saved instead of restored.
        """
        url = self.target.url
        if what == "look":
            return client.get(f"{url}{self.random.choice(LOOKS)}")
        if what == "clear":
            return (
                client.delete(f"{url}/cache")
                if self.random.random() < 0.1
                else client.get(f"{url}/cache")
            )
        if what == "pin":
            ids = list(_ids(client.get(f"{url}/cache").json().get("prefixes", [])))
            # Most pins are released again: pins for ever would fill the budget.
            body = {
                "id": self.random.choice(ids) if ids else "none",
                "pinned": self.random.random() < 0.3,
            }
            return client.post(f"{url}/cache/pin", json=body)
        name = f"slot-{self.random.randrange(4)}"
        if what == "restore" and name not in self._saved:
            what = "save"
        self._saved.add(name)
        slot = self.random.randrange(self.n_sequences)
        return client.post(f"{url}/slots/{slot}?action={what}", json={"filename": name})


def _ids(nodes: list[dict[str, Any]]) -> list[str]:
    return [name for node in nodes for name in (node["id"], *_ids(node["children"]))]
