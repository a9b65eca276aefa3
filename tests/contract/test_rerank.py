"""Ranks of a real reranker are those of llama-server.

Runs where LLAMA_SERVER names the binary, as the rest of the contract.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tests.client import Client
from tests.contract.tiny_bert import write_tiny_bert
from tools.generator import TINY_RERANK, cached_model

LLAMA_SERVER = os.environ.get("LLAMA_SERVER", "")
DOCUMENTS = [
    "A machine",
    "Learning is the process of acquiring understanding.",
    "Machine learning is " * 20,
    "",
]
BODIES: list[dict[str, Any]] = [
    {"query": "Machine learning is", "documents": DOCUMENTS},
    {"query": "Machine learning is", "texts": DOCUMENTS, "return_text": True},
    {"query": "<|im_end|>", "documents": DOCUMENTS, "top_n": 2, "model": "mine"},
    {"query": "long", "documents": ["word " * 90, "other " * 60]},
    {"query": "q", "documents": []},
    {"query": "q"},
    {"query": 5, "documents": ["a"]},
    {"documents": ["a"]},
]


@pytest.fixture(scope="module", params=["qwen3", "bert"])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ServerProcess]]:
    """Yield llama-server and pyctl on the same reranker."""
    if not LLAMA_SERVER:
        pytest.skip("LLAMA_SERVER does not name a llama-server to compare with")
    directory: Path = tmp_path_factory.mktemp("rerank")
    model = directory / "bert.gguf"
    if request.param == "qwen3":
        model = cached_model(TINY_RERANK, directory)
    else:
        write_tiny_bert(model)
    # A model that reads a text in both directions needs all of it in one batch.
    n_batch = "128" if request.param == "qwen3" else "512"
    sizes = shlex.split(f"-c 4096 -t 1 -np 1 -ub {n_batch} -b {n_batch}")
    flags = ["-m", str(model), "--rerank", *sizes]
    with (
        ServerProcess([LLAMA_SERVER, *flags], directory / "llama-server.log") as theirs,
        ServerProcess([*PYCTL_SERVE, *flags], directory / "pyctl.log") as ours,
    ):
        yield [theirs, ours]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.timeout(120)
def test_ranks_are_those_of_llama_server(
    servers: list[ServerProcess], body: dict[str, Any]
) -> None:
    """Ranks, their order and the errors are llama-server's; scores differ by rounding only."""
    theirs, ours = (Client.to_server(server.url).post("/v1/rerank", body) for server in servers)
    assert ours.status_code == theirs.status_code, (theirs.text, ours.text)
    expected = theirs.json()
    found = ours.json()
    if theirs.status_code != 200:
        assert found == expected
        return
    if isinstance(expected, dict):
        assert {**found, "results": None, "model": ""} == {**expected, "results": None, "model": ""}
        expected = expected["results"]
        found = found["results"]
    label = next(name for name in expected[0] if name.endswith("score"))
    assert [{**item, label: None} for item in found] == [{**item, label: None} for item in expected]
    assert [item[label] for item in found] == pytest.approx(
        [item[label] for item in expected], abs=2e-4
    )
    assert len({round(item[label], 3) for item in expected}) > 1, "these scores tell nothing"


def test_of_what_is_longer_than_a_batch(servers: list[ServerProcess]) -> None:
    body = {"query": "q", "documents": ["word " * 4000]}
    theirs, ours = (Client.to_server(server.url).post("/v1/rerank", body) for server in servers)
    assert ours.status_code == 400, ours.text
    assert theirs.status_code in (400, 500)
