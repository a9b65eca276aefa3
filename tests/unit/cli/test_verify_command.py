"""`pyctl verify` on receipts of a tiny model: its lines, its exit codes and its errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pyctl.cli.verify_command import run_verify
from pyctl.errors import ConfigError
from pyctl.receipts.receipt import Receipt
from pyctl.receipts.receipt_store import ReceiptStore
from tests.unit.cli.talking import PROMPTS, receipts_in, talk

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def written(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache directory with three receipts."""
    cache_dir = tmp_path_factory.mktemp("kv")
    assert all(talk(model_path("tiny-hybrid"), cache_dir))
    return cache_dir


@pytest.fixture
def store(written: Path, tmp_path: Path) -> ReceiptStore:
    """Return a copy of these receipts."""
    copy = receipts_in(tmp_path)
    shutil.copytree(receipts_in(written).directory, copy.directory)
    return copy


@pytest.fixture
def run(store: ReceiptStore, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `pyctl verify`; it returns the exit code and the lines."""

    def command(*arguments: str) -> tuple[int, list[str]]:
        code = run_verify([*arguments, "--kv-cache-dir", str(store.directory.parent)], {})
        return code, capsys.readouterr().out.splitlines()

    return command


def alter(store: ReceiptStore, number: int, **fields: object) -> None:
    """Write the receipt ``number`` with other values for ``fields`` of its reply."""
    receipt = store.read(number)
    reply = msgspec.structs.replace(receipt.reply_record, **fields)
    store.write(msgspec.structs.replace(receipt, reply_record=reply))


def with_provenance(store: ReceiptStore, number: int, **fields: object) -> Receipt:
    """Write the receipt ``number`` with other values for ``fields`` of its provenance."""
    receipt = store.read(number)
    provenance = msgspec.structs.replace(receipt.provenance, **fields)
    changed = msgspec.structs.replace(receipt, provenance=provenance)
    store.write(changed)
    return changed


def test_all_receipts_are_equal_with_a_line_for_each(run: Run, store: ReceiptStore) -> None:
    code, lines = run("--all")
    assert code == 0
    assert [line.split()[0] for line in lines] == [str(number) for number in store.ids()]
    assert all(line.endswith("  equal") for line in lines)
    assert f"  {len(PROMPTS[0])} tokens + 6  " in lines[0]
    assert "live) + 6  " in lines[1]
    assert store.counts().verified == 3
    assert store.counts().differing == 0


def test_receipts_are_chosen_by_id_and_as_the_last(run: Run, store: ReceiptStore) -> None:
    first, _, last = store.ids()
    _, lines = run("last", str(first))
    assert [int(line.split()[0]) for line in lines] == [last, first]


def test_an_altered_digest_is_a_difference_at_its_position(run: Run, store: ReceiptStore) -> None:
    number = store.ids()[1]
    digests = np.array(store.read(number).digests, "<u4")
    digests[3] ^= 1
    alter(store, number, logits_digests=digests.tobytes())
    code, lines = run("--all")
    assert code == 1
    position = len(PROMPTS[1]) + 3
    assert lines[1].endswith(f"  differs at position {position}, token 4 of the reply")
    assert [line.endswith("  equal") for line in lines] == [True, False, True]
    assert store.counts().differing == 1


def test_another_build_and_another_model_are_named_and_the_rest_is_verified(
    run: Run, store: ReceiptStore
) -> None:
    first, second, third = store.ids()
    build = with_provenance(store, first, llama_build="llama.cpp 0.0.1").provenance.llama_build
    with_provenance(store, second, fingerprint="0" * 32)
    code, lines = run("--all")
    assert code == 1
    by_id = {int(line.split()[0]): line for line in lines}
    assert f"not verified: it is of {build}, here is llama.cpp " in by_id[first]
    assert "not verified: the model, the machine, or a variable" in by_id[second]
    assert by_id[third].endswith("  equal")
    assert store.counts().verified == 1


def test_layers_on_other_devices_are_named(run: Run, store: ReceiptStore) -> None:
    with_provenance(store, store.ids()[-1], layers=("CUDA0", "CUDA0"))
    code, (line,) = run("last")
    assert code == 1
    assert "not verified: its layers are not placed on the devices as in the receipt" in line


def test_a_model_that_is_gone_is_named(run: Run, store: ReceiptStore) -> None:
    settings = store.read(store.ids()[-1]).provenance.settings
    gone = {**settings, "model": {**settings["model"], "path": "/nowhere/model.gguf"}}
    with_provenance(store, store.ids()[-1], settings=gone)
    code, (line,) = run("last")
    assert code == 1
    assert "  not verified: " in line
    assert "/nowhere/model.gguf" in line


def test_settings_of_another_version_are_named(run: Run, store: ReceiptStore) -> None:
    with_provenance(store, store.ids()[-1], settings={"model": {"n_ctx": "many"}})
    code, (line,) = run("last")
    assert code == 1
    assert "not verified: its settings are of another version of pyctl" in line


def test_a_damaged_receipt_is_named_and_the_rest_is_verified(run: Run, store: ReceiptStore) -> None:
    damaged = store.ids()[0]
    path = store.directory / f"{damaged}.receipt"
    path.write_bytes(path.read_bytes()[:-3])
    code, lines = run("--all")
    assert code == 1
    assert lines[0] == f"{damaged}  not verified: it is damaged: its checksum is wrong"
    assert [line.endswith("  equal") for line in lines[1:]] == [True, True]


@pytest.mark.parametrize("name", ["1234567890123456", "lost", "-1", "\x1b[31m"])
def test_an_unknown_id_is_an_error(run: Run, name: str) -> None:
    with pytest.raises(ConfigError, match=r"no receipt|unrecognized arguments"):
        run("last", name)


def test_a_directory_without_receipts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no receipts in .*: pyctl serve --exact writes them"):
        run_verify(["--all", "--kv-cache-dir", str(tmp_path / "none")], {})


@pytest.mark.parametrize("arguments", [[], ["last", "--all"]])
def test_receipts_are_named_or_all_of_them(run: Run, arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="name receipts: their ids, last, or --all"):
        run(*arguments)


def test_the_directory_is_the_default_one_without_a_flag(tmp_path: Path) -> None:
    expected = tmp_path / "pyctl" / "kv" / "receipts"
    with pytest.raises(ConfigError, match=f"no receipts in {expected}"):
        run_verify(["--all"], {"XDG_CACHE_HOME": str(tmp_path)})
