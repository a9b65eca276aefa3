"""Which Pythons the matrix runs, its table, and its exit code; `make` and the interpreters are
scripts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import matrix

MAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$2 $3" in
  install*3.11) exit 2 ;;
  unit*) echo "== 7 passed, 2 skipped in 1.25s ==" ;;
  model*3.12) echo "== 1 failed, 6 passed in 61.00s (0:01:01) =="; exit 2 ;;
  model*) echo "== 7 passed in 2.00s ==" ;;
  soak*) echo "│ violations │   0 │" ;;
esac
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a machine with 3.11 and 3.12, and with pyenv's 3.13, whose command on PATH does not
    start.
    """
    for version in ("3.11", "3.12"):
        script(tmp_path / f"python{version}", f"#!/bin/sh\necho {version}")
    script(tmp_path / "python3.13", "#!/bin/sh\nexit 127")
    script(
        tmp_path / "pyenv" / "versions" / "3.13.0" / "bin" / "python3.13", "#!/bin/sh\necho 3.13"
    )
    script(tmp_path / "make", MAKE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def test_the_others_run_whatever_fails(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A version that is missing, cannot be installed or fails a stage does not stop the others. The
    table has a row for each, and the exit code is 1.
    """
    with pytest.raises(SystemExit) as ended:
        matrix.main(["--stages", "unit", "model", "soak"])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "Python 3.10: none with venv and headers, neither on PATH nor in pyenv\n" in said
    table = [
        [cell.strip() for cell in line.split("|")] for line in said.splitlines() if "|" in line
    ]
    assert [cells[:-1] for cells in table] == [
        ["Python", "install", "unit", "model", "soak"],
        ["3.10", "skipped: missing", "", "", ""],
        ["3.11", "FAILED", "", "", ""],
        ["3.12", "done", "7 passed, 2 skipped", "FAILED 1 failed, 6 passed", "0 violations"],
        ["3.13", "done", "7 passed, 2 skipped", "7 passed", "0 violations"],
    ]
    environments = [line.split()[2] for line in calls.read_text(encoding="utf-8").splitlines()]
    assert environments == [
        "VENV=build/matrix/3.11",
        *["VENV=build/matrix/3.12"] * 4,
        *["VENV=build/matrix/3.13"] * 4,
    ]
    assert f"PYTHON={calls.parent}/pyenv/versions/3.13.0/bin/python3.13" in calls.read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["3.13", "--stages", "soak"], 0),
        (["3.10"], 1),
        (["3.10", "--optional"], 0),
        (["3.12", "--stages", "model"], 1),
    ],
)
def test_a_named_python_must_be_there_unless_it_is_optional(
    calls: Path, arguments: list[str], code: int
) -> None:
    ended = 0
    try:
        matrix.main(arguments)
    except SystemExit as error:
        ended = int(str(error.code))
    assert ended == code
