"""The options of a replay on servers: those that do not fit together."""

from __future__ import annotations

import pytest

from bench.traces.servers import main


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "no server: give --start or --url"),
        (["--start", "llama-server"], "--start llama-server needs --llama-server FILE"),
        (["--url", "http://127.0.0.1:9", "--restart"], "--restart needs servers of --start"),
        (["--url", "http://127.0.0.1:9", "--switch"], "--switch needs the name"),
        (["--start", "pyctl", "--only", "7", "999"], "no session 999 is recorded"),
    ],
)
def test_options_that_do_not_fit_end_with_a_reason(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert problem in f"{ended.value} {capsys.readouterr().err}"
