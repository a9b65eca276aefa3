"""`pyctl verify`: evaluates exact replies again, from nothing, and compares their logits."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyctl.cache.cache_settings import DiskSettings, default_directory
from pyctl.cli.command_parser import CommandParser
from pyctl.errors import ConfigError, EngineError, ModelError, ReceiptError
from pyctl.settings.setting import class_flags
from pyctl.text import one_line

if TYPE_CHECKING:
    from pyctl.engine.backend import Evaluator
    from pyctl.receipts.receipt import Provenance, Receipt
    from pyctl.receipts.receipt_store import ReceiptStore

__all__ = ["run_verify"]

DIRECTORY = next(flag for _, flag in class_flags(DiskSettings) if flag.dest == "cache_dir")

LAST = "last"
"""The word for the newest receipt."""

EQUAL = "equal"
"""The end of the line of a receipt whose logits are the same."""


def run_verify(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Verify the named receipts, and print a line for each; return the exit code: 1 if one differs
    or cannot be verified.

    Raises ConfigError if the arguments name no receipt.
    """
    options = _parser(environ).parse_args(argv)
    if bool(options.id) == options.all:
        raise ConfigError(f"name receipts: their ids, {LAST}, or --all")
    try:
        cache_dir = Path(options.kv_cache_dir or default_directory(environ)).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"no directory; pass {DIRECTORY.names} or set {DIRECTORY.env}") from error
    # Only now: --help needs none of it.
    from pyctl.disk.file_format import RECEIPTS
    from pyctl.receipts.receipt_store import ReceiptStore

    store = ReceiptStore(cache_dir / RECEIPTS)
    numbers = _named(options.id, store)
    is_good = True
    for number, result in _verify(store, numbers):
        is_good = is_good and result.endswith(EQUAL)
        print(f"{number}  {result}", flush=True)
    return 0 if is_good else 1


def _parser(environ: Mapping[str, str] = os.environ) -> CommandParser:
    """Return the parser of `pyctl verify`."""
    parser = CommandParser(
        prog="pyctl verify",
        description="Evaluate replies again, from nothing, and compare their logits to the bit. "
        "A server keeps a receipt of each exact reply for a day; its id is in the timings of the "
        "reply.",
        epilog="The model is loaded with the flags of the server: stop the server if the device "
        "has no room for two.",
    )
    parser.add_argument("id", nargs="*", metavar="ID", help=f"ids of receipts, or {LAST}")
    parser.add_argument("--all", action="store_true", help="all receipts, the oldest first")
    parser.add_argument(
        DIRECTORY.names,
        metavar="DIR",
        default=environ.get(DIRECTORY.env, ""),
        help=f"the directory of the servers (default: {DIRECTORY.default.partition(',')[0]})",
    )
    return parser


def _named(words: Sequence[str], store: ReceiptStore) -> list[int]:
    """Return the receipts that ``words`` name, all without words. Raises ConfigError if there are
    none, or a word names none.
    """
    known = store.ids()
    if not known:
        raise ConfigError(
            f"no receipts in {store.directory}: pyctl serve --exact writes them, and keeps them "
            "for a day"
        )
    numbers = []
    for word in words:
        if word != LAST and not (word.isascii() and word.isdigit() and int(word) in known):
            raise ConfigError(f"no receipt {one_line(word)} in {store.directory}")
        numbers.append(known[-1] if word == LAST else int(word))
    return numbers or known


def _verify(store: ReceiptStore, numbers: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield each receipt with its line; a model is loaded once for all its receipts."""
    groups: dict[bytes, list[Receipt]] = {}
    for number in numbers:
        try:
            receipt = store.read(number)
        except ReceiptError as error:
            yield number, f"not verified: it is damaged: {error}"
            continue
        groups.setdefault(receipt.provenance.key, []).append(receipt)
    for receipts in groups.values():
        yield from _verify_group(store, receipts[0].provenance, receipts)


def _verify_group(
    store: ReceiptStore, provenance: Provenance, receipts: Sequence[Receipt]
) -> Iterator[tuple[int, str]]:
    """Load a model, and yield each of its ``receipts`` with its line."""
    # The environment is set before the libraries are loaded, which read it.
    _prepare_process(provenance)
    from pyctl.cli.receipts import load_recorded

    print(f"loading {one_line(provenance.model)}", file=sys.stderr, flush=True)
    try:
        loaded = load_recorded(provenance)
    except (ReceiptError, ModelError) as error:
        for receipt in receipts:
            yield receipt.id, f"not verified: {one_line(str(error))}"
        return
    try:
        for receipt in receipts:
            yield receipt.id, f"{_describe(receipt)}  {_compare(store, receipt, loaded.backend)}"
    finally:
        loaded.backend.unload()


def _compare(store: ReceiptStore, receipt: Receipt, evaluator: Evaluator) -> str:
    """Evaluate one receipt again, and record the result; return it as text."""
    from pyctl.receipts.verification import find_difference

    try:
        index = find_difference(receipt, evaluator)
    except EngineError as error:
        return f"not verified: {one_line(str(error))}"
    try:
        store.mark(receipt.id, is_equal=index is None)
    except OSError as error:
        print(f"the result is not recorded: {error}", file=sys.stderr)
    if index is None:
        return EQUAL
    position = len(receipt.prompt) + index
    return f"differs at position {position}, token {index + 1} of the reply"


def _describe(receipt: Receipt) -> str:
    """Return the time and the sizes of a reply."""
    when = time.strftime("%H:%M:%S", time.localtime(receipt.id / 1e6))
    cache = receipt.cache
    source = f" ({cache.n_cached} from {cache.source})" if cache.n_cached else ""
    return (
        f"{when}  {one_line(receipt.provenance.model)}  "
        f"{len(receipt.prompt)} tokens{source} + {receipt.reply.size}"
    )


def _prepare_process(provenance: Provenance) -> None:
    """Set the environment as `pyctl serve` does before it loads the libraries."""
    from pyctl.engine.openmp import limit_spinning
    from pyctl.machine.environment import USE_EXTENSION

    settings = provenance.settings.get("model", {})
    has_extension = settings.get("extension", True)
    os.environ[USE_EXTENSION] = "on" if has_extension else "off"
    limit_spinning(waits_for_gpu=bool(settings.get("placements")))
