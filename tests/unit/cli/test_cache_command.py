"""`pyctl cache` on directories that hold made-up snapshots."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cli.cache_command import run_cache
from pyctl.disk.directory import record_model_name
from pyctl.disk.file_format import INDEX, RULES
from pyctl.errors import ConfigError
from tests.unit.disk.making import DirectStore, conversation

LABEL = (
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\n" + "What is a cache? " * 20
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return three snapshots of one model, the last used first: seeds 3, 2, 1."""
    store = DirectStore(tmp_path, "model", None)
    record_model_name(tmp_path, "model", "Coder")
    for seed in (1, 2, 3):
        store.write(conversation(seed, turns=1, step=20 * seed)[0], LABEL)
    store.close()
    return tmp_path


@pytest.fixture
def run(directory: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str) -> tuple[int, str, str]:
        code = run_cache([*arguments, "--kv-cache-dir", str(directory)], {})
        out, err = capsys.readouterr()
        return code, out, err

    return command


def test_a_pipe_gets_whole_lines(run: Run) -> None:
    code, out, _ = run("ls")
    title, head, *lines, empty, last = out.splitlines()
    assert code == 0
    assert title == "Coder: 3 snapshots, 0.0 MiB"
    assert empty == ""
    assert head.split() == ["id", "tokens", "MiB", "age", "used", "hits", "marks", "text"]
    assert sorted(int(line.split()[1]) for line in lines) == [20, 40, 60]
    assert all(8 <= len(line.split()[0]) <= 12 for line in lines)
    assert all(
        line.endswith("System: You are terse. You: " + ("What is a cache? " * 20).strip())
        for line in lines
    )
    assert last.startswith("3 snapshots of 1 model, ")
    assert last.endswith(" MiB")


def test_a_snapshot_that_exact_does_not_use_is_not_called_damaged(
    directory: Path, run: Run
) -> None:
    store = DirectStore(directory, "model", None)
    (snapshot,) = conversation(9, turns=1, step=30)
    snapshot.exact = False
    store.write(snapshot, LABEL)
    store.close()
    *lines, note = run("ls")[1].splitlines()
    assert ["no-exact" in line for line in lines if "System: " in line] == [
        True,
        False,
        False,
        False,
    ]
    assert note == "no-exact: undamaged, but not used with --exact (pyctl cache ls --help)"


def test_a_terminal_of_80_columns_shows_everything_and_a_part_of_the_text(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("ls")[1].splitlines()[2:-2]
    assert all(len(line) <= 80 and line.endswith("…") and "System: You" in line for line in lines)


def test_json_has_every_fact(run: Run) -> None:
    entries = json.loads(run("ls", "--json")[1])
    assert len(entries) == 3
    assert all(
        (entry["model"], entry["fingerprint"]) == ("Coder", "model")
        and entry["label"] == LABEL
        and not entry["is_older"]
        for entry in entries
    )


def test_each_model_has_a_table_and_one_can_be_asked_for(run: Run, directory: Path) -> None:
    """`cache ls` lists the snapshots of each model under its name, or under its fingerprint if it
    has none. `--model` filters by either, and control characters of a name are escaped.
    """
    for fingerprint, name in (("other", "Evil\x1b[2J\nname"), ("third", "")):
        store = DirectStore(directory, fingerprint, None)
        if name:
            record_model_name(directory, fingerprint, name)
        store.write(conversation(9, turns=1)[0], LABEL)
        store.close()
    lines = run("ls")[1].splitlines()
    titles = [line.rpartition(",")[0] for line in lines if ": " in line and line.endswith(" MiB")]
    assert sorted(titles) == [
        "Coder: 3 snapshots",
        "Evil\\x1b[2J\\nname: 1 snapshot",
        "third: 1 snapshot",
    ]
    assert lines[-1].startswith("5 snapshots of 3 models, ")
    assert {
        entry["fingerprint"] for entry in json.loads(run("ls", "--json", "--model", "Coder")[1])
    } == {"model"}
    assert {
        entry["fingerprint"] for entry in json.loads(run("ls", "--json", "--model", "third")[1])
    } == {"third"}
    assert run("ls", "--model", "none")[1] == f"no snapshots of none in {directory}\n"
    assert run("verify")[0] == 0


def test_sizes_add_up_and_prune_says_what_it_would_do_and_who_else_is_there(
    run: Run, directory: Path
) -> None:
    """A dry run of `prune` reports the bytes and the processes that use the directory, and removes
    nothing. The same call without `--dry-run` removes the entries.
    """
    store = DirectStore(directory, "model", None)
    for snapshot in conversation(7, turns=4, step=30):
        store.write(snapshot, LABEL)
    entries = store.directory.entries()
    total = store.directory.n_bytes
    assert sum(entry.n_bytes for entry in entries) == total - store.directory.auxiliary_bytes()
    store.close()
    with (
        (directory / INDEX).open() as index,
        subprocess.Popen(["sleep", "60"], stdin=index) as other,
    ):
        code, out, err = run("prune", "--kv-cache-budget", "0", "--dry-run")
        other.kill()
    assert code == 0
    assert out == "0.0 of 0.0 MiB would be freed\n"
    assert err.startswith(f"in use by process {other.pid}: ")
    assert len(json.loads(run("ls", "--json")[1])) == len(entries)
    assert run("prune", "--kv-cache-budget", "0")[1:] == ("0.0 of 0.0 MiB freed\n", "")
    assert json.loads(run("ls", "--json")[1]) == []
    with pytest.raises(ConfigError, match="unexpected argument 'kv --to 1MB'"):
        run("prune", "kv", "--to", "1MB")


def test_verify_finds_and_fixes_damage(run: Run, directory: Path) -> None:
    victim = min(directory.rglob("*.state"))
    victim.write_bytes(bytes(byte ^ 1 for byte in victim.read_bytes()))
    code, out, _ = run("verify")
    assert code == 1
    assert f"broken: {victim.parent.name}/{victim.name}" in out
    assert [run("verify", "--fix")[0], run("verify")[0]] == [0, 0]
    assert not victim.exists()
    assert len(json.loads(run("ls", "--json")[1])) == 2


@pytest.mark.parametrize(
    ("command", "place", "message"),
    [
        ("ls", "none", "none is not a directory"),
        ("ls", "", "no prefix cache in "),
        ("dance", "", "no such command"),
    ],
)
def test_what_cannot_be_done(command: str, place: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_cache([command, "--kv-cache-dir", str(tmp_path / place)], {})


def test_a_default_directory_that_no_server_used_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run_cache(["ls"], environ) == 0
    assert capsys.readouterr().out == f"no snapshots: {tmp_path}/pyctl/kv has not been used yet\n"
    assert run_cache(["ls", "--json"], environ) == 0
    assert json.loads(capsys.readouterr().out) == []
    with pytest.raises(ConfigError, match="is not a directory"):
        run_cache(["prune", "--kv-cache-budget", "0"], environ)


def test_an_empty_cache_has_no_zeros(run: Run, directory: Path) -> None:
    assert run("prune", "--kv-cache-budget", "0")[0] == 0
    assert run("ls")[1] == f"no snapshots in {directory}\n"


def test_the_beginning_of_an_id_is_enough(run: Run) -> None:
    entries = json.loads(run("ls", "--json")[1])
    digest = entries[0]["name"].partition("-")[2]
    short = next(
        digest[:n]
        for n in range(1, 17)
        if sum(f"-{digest[:n]}" in each["name"] for each in entries) == 1
    )
    assert run("pin", short)[0] == 0
    assert [each["pinned"] for each in json.loads(run("ls", "--json")[1])] == [True, False, False]
    assert run("unpin", entries[0]["name"])[0] == 0
    assert run("rm", digest[:10])[0] == 0
    assert len(json.loads(run("ls", "--json")[1])) == 2


def test_an_ambiguous_id_changes_nothing_and_names_what_it_may_be(
    run: Run, directory: Path
) -> None:
    store = DirectStore(directory, "model", None)
    for seed in range(10, 30):
        store.write(conversation(seed, turns=1)[0])
    store.close()
    names = [each["name"] for each in json.loads(run("ls", "--json")[1])]
    first = [name.partition("-")[2][0] for name in names]
    letter = next(letter for letter in first if first.count(letter) > 1)
    code, _, err = run("rm", letter)
    assert code == 1
    assert all(name in err for name in names if f"-{letter}" in name)
    code, _, err = run("rm", "nothing", names[0])
    assert code == 1
    assert err == "no snapshot nothing\n"
    assert len(json.loads(run("ls", "--json")[1])) == len(names)


def test_what_was_made_under_older_rules_is_named_and_goes_first(run: Run, directory: Path) -> None:
    store = DirectStore(directory, "before", None)
    store.write(conversation(5, turns=1, step=60)[0])
    store.close()
    (directory / "before" / RULES).unlink()
    (directory / "before" / "notes").write_text("mine")
    assert run("ls")[1].count("  older\n") == 1
    _, out, _ = run("verify")
    assert "foreign: before/notes" in out
    entries = json.loads(run("ls", "--json")[1])
    assert entries[0]["is_older"], "the last used, and still the first to go"
    store = DirectStore(directory, "model", None)
    total = store.directory.n_bytes
    assert store.directory.prune(total - 1) > 0
    assert {entry.fingerprint for entry in store.directory.entries()} == {"model"}
    assert len(store.directory.entries()) == 3
    store.close()


def test_unpinning_belongs_to_one_model(directory: Path) -> None:
    """A snapshot pinned under another fingerprint may be dropped here."""
    other = DirectStore(directory, "other", None)
    other.write(conversation(1, turns=1, step=20)[0])
    name = other.directory.entries()[0].name
    assert other.directory.pin(f"other/{name}", True)
    pinned = {
        entry.fingerprint: entry.pinned for entry in other.directory.entries() if entry.name == name
    }
    assert pinned == {"other": True, "model": False}
    other.close()
