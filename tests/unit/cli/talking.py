"""A conversation with a model that `assemble` has loaded, whose receipts are kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from pyctl.cli.arguments import parse_serve
from pyctl.cli.assemble import assemble
from pyctl.disk.file_format import RECEIPTS
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Request
from pyctl.receipts.receipt_store import ReceiptStore
from tests.unit.engine.drive import GREEDY, chat

PROMPTS = (chat((1, 150)), chat((1, 150), (2, 40)), chat((1, 150), (4, 40)))
"""The last two branch off the first."""


def talk(model: Path, cache_dir: Path, flags: Sequence[str] = ("--exact",)) -> list[int]:
    """Ask all PROMPTS, and end the engine; return the ids of the receipts, 0 for none."""
    given = ["-m", str(model), "-c", "1024", "-t", "1", "-ub", "128", "--cache-ram", "64"]
    settings = parse_serve([*given, "--kv-cache-dir", str(cache_dir), *flags], {})
    service = assemble(settings)
    with closing(service.worker) as worker:
        requests = [Request(prompt, sampling=GREEDY, max_tokens=6) for prompt in PROMPTS]
        return [_receipt(worker.submit(request)) for request in requests]


def _receipt(handle: RequestHandle) -> int:
    """Wait for the end of a reply; return the id of its receipt."""
    (done,) = (event for event in handle if isinstance(event, Done))
    return done.receipt


def receipts_in(cache_dir: Path) -> ReceiptStore:
    """Return the receipts of a cache directory."""
    return ReceiptStore(cache_dir / RECEIPTS)
