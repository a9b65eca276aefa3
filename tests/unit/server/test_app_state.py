"""A served model, and the state of the process that serves it."""

from __future__ import annotations

from pathlib import Path

from pyctl.requests.service import SharedState
from pyctl.server.app_state import AppState
from pyctl.server.server_settings import ServerSettings
from tests.unit.server.fake import Bench


def test_bytes_are_counted_by_use() -> None:
    bench = Bench()
    bench.chat()
    service = bench.service
    memory = service.admin.memory().result()
    counted = service.counted_bytes(memory)
    assert counted["snapshots"] == memory.snapshots > 0
    assert counted["arena"] == memory.blocks.held >= counted["blocks"] == memory.blocks.used
    assert counted["recent_prompts"] == memory.recent_prompts > 0
    assert service.chat.n_bytes.keys() <= counted.keys()


def test_only_a_server_has_a_directory_of_images(tmp_path: Path) -> None:
    assert AppState(ServerSettings(media_path=str(tmp_path))).media_path == str(tmp_path)
    assert AppState().media_path == SharedState().media_path == ""
