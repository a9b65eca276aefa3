"""The flags of a serve command that `pyctl bench` passes on, and those that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.cli.arguments import kept_flags
from pyctl.cli.bench_command import DROPPED, run_bench
from pyctl.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["-c", "8192", "--port", "80", "-fa"], ["-c", "8192", "-fa"]),
        (["--port=80", "-fa", "on", "-ngl", "-1"], ["-fa", "on", "-ngl", "-1"]),
        (["-fa", "-c", "0", "--no-warm-next", "--metrics"], ["-fa", "-c", "0", "--no-warm-next"]),
        (["--kv_cache_dir", "/kv", "--kv-cache-min-tokens", "64"], ["--kv-cache-min-tokens", "64"]),
        (["--api-key", "secret", "-lv", "4", "--exact"], ["--exact"]),
    ],
)
def test_addresses_keys_and_the_users_cache_stay_behind(given: list[str], kept: list[str]) -> None:
    assert kept_flags(given, DROPPED) == kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--depths", "1", "2", "3", "4", "5"], "1 to 4 numbers"),
        (["--depths", "many"], "invalid int value"),
        (["-m", "/nowhere.gguf"], "no model at /nowhere.gguf"),
        (["--llama-server", "/nowhere/llama-server"], "cannot run --llama-server"),
        (["--quik"], "unknown flag --quik"),
    ],
)
def test_mistakes_end_before_a_server_starts(
    given: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_bench(given)
