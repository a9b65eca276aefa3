"""Objects built from several settings at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cli.arguments import parse_serve
from pyctl.cli.assemble import assemble

MIB = 2**20


@pytest.mark.parametrize(("ram", "rows", "snapshots"), [("64", 4, 60), ("8192", 256, 8192 - 256), ("0", 0, 0)])
def test_rows_of_images_count_within_the_cache(
    model_path: Callable[[str], Path], tiny_mmproj: Path, ram: str, rows: int, snapshots: int
) -> None:
    flags = ["-m", str(model_path("tiny-hybrid")), "-c", "512", "-t", "1", "--cache-ram", ram]
    service = assemble(parse_serve([*flags, "--mmproj", str(tiny_mmproj)], {}))
    try:
        engine = service.worker._engine
        assert engine.backend.encoder.rows.limit == rows * MIB
        assert engine.prefix_cache.cache.budget == snapshots * MIB
    finally:
        service.worker.close()
