"""The format of receipts: what a file brings back, and which files are refused."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest

from pyctl.engine.sampling import Sampling
from pyctl.errors import ReceiptError
from pyctl.receipts.receipt import MAGIC, Provenance, Receipt
from tests.unit.engine.drive import ask
from tests.unit.receipts.making import FIRST, LONGER, NOON, PROVENANCE, receipt_at, recorded_engine

DIGEST_BYTES = 16


def file_of(values: dict[str, Any]) -> bytes:
    """Return a file with a right checksum and these values."""
    body = msgspec.msgpack.encode(values)
    return MAGIC + hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() + body


def changed(part: str = "", **fields: Any) -> bytes:
    """Return the file of a receipt with other values for ``fields`` of one ``part``, or of all."""
    values = msgspec.to_builtins(receipt_at(NOON), builtin_types=(bytes,))
    changed_part = values[part] if part else values
    changed_part.update(fields)
    return file_of(values)


def test_a_file_brings_back_the_prompt_the_reply_and_the_digests() -> None:
    engine, recorder = recorded_engine()
    ask(engine, FIRST)
    ask(engine, LONGER, sampling=Sampling(temperature=0.0, seed=7, logit_bias=((5, -np.inf),)))
    reply = recorder.replies[1]
    receipt = Receipt.from_bytes(Receipt.from_reply(3, PROVENANCE, reply).to_bytes())
    assert receipt.id == 3
    assert receipt.provenance == PROVENANCE
    assert receipt.prompt.tokens.tolist() == LONGER.tokens.tolist()
    assert receipt.prompt.boundaries == LONGER.boundaries
    assert receipt.prompt.headers == LONGER.headers
    assert receipt.reply.tolist() == reply.trace.tokens
    assert receipt.digests == reply.trace.digests
    assert receipt.cache.n_cached == reply.stats.n_cached > 0
    assert receipt.cache.source == reply.stats.source == "live"
    assert receipt.reply_record.sampling["seed"] == 7
    assert receipt.reply_record.sampling["logit_bias"] == [[5, -np.inf]]


def test_the_seed_is_the_one_in_use() -> None:
    engine, recorder = recorded_engine()
    ask(engine, FIRST)
    recorder.replies[0].trace.seed = 123
    receipt = Receipt.from_reply(1, PROVENANCE, recorder.replies[0])
    assert receipt.reply_record.sampling["seed"] == 123


@pytest.mark.parametrize("at", [0, len(MAGIC), len(MAGIC) + DIGEST_BYTES, -1])
def test_a_flipped_bit_anywhere_is_found(at: int) -> None:
    data = bytearray(receipt_at(NOON).to_bytes())
    data[at] ^= 1
    with pytest.raises(ReceiptError):
        Receipt.from_bytes(bytes(data))


@pytest.mark.parametrize("n", [0, 5, len(MAGIC) + 3, -1])
def test_a_part_of_a_file_is_no_receipt(n: int) -> None:
    with pytest.raises(ReceiptError):
        Receipt.from_bytes(receipt_at(NOON).to_bytes()[:n])


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("prompt_record", {"ids": b""}),
        ("prompt_record", {"ids": b"123"}),
        ("prompt_record", {"ids": np.array([-5], "<i4").tobytes()}),
        ("prompt_record", {"boundaries": [9, 3]}),
        ("reply_record", {"ids": b""}),
        ("reply_record", {"logits_digests": b""}),
        ("reply_record", {"draft_width": -1}),
        ("provenance", {"settings": None}),
        ("", {"id": "1"}),
        ("", {"more": 1}),
    ],
    ids=str,
)
def test_a_receipt_that_no_reply_can_have_is_refused(part: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ReceiptError, match="its content is impossible"):
        Receipt.from_bytes(changed(part, **fields))


def test_the_made_up_files_differ_in_their_fields_alone() -> None:
    assert Receipt.from_bytes(changed()).to_bytes() == receipt_at(NOON).to_bytes()


def test_equal_provenances_have_equal_keys() -> None:
    same = msgspec.msgpack.decode(msgspec.msgpack.encode(PROVENANCE), type=Provenance)
    assert same.key == PROVENANCE.key
    assert msgspec.structs.replace(same, model="other").key != PROVENANCE.key
