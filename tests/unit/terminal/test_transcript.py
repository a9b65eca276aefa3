from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.errors import RequestError
from pyctl.terminal.conversation import Conversation, load, save

CHAT = Conversation("Sei kurz.").asked("Grüß\nGott").answered("Hallo 👋", "hm", stopped=True)


def test_bare_lists_of_messages_load(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "a"}]')
    assert load(tmp_path / "chat.json") == Conversation().asked("a")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot save .*: No such file or directory"):
        save(tmp_path / "no" / "chat.json", CHAT)
    with pytest.raises(RequestError, match=r"cannot save .*: Is a directory"):
        save(tmp_path, CHAT)
    with pytest.raises(RequestError, match="cannot save"):
        save(tmp_path / "a\0b", CHAT)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not JSON in UTF-8"),
        (b"{", "not JSON in UTF-8"),
        (b"\xff", "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b"{}", "no list of messages"),
        (b"3", "no list of messages"),
        (b'{"messages": 3}', "no list of messages"),
        (b'{"messages": [], "version": 2}', "unknown version 2"),
        (b"[1]", "message 1 has no text"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "chat.json").write_bytes(content)
    with pytest.raises(RequestError, match=text) as caught:
        load(tmp_path / "chat.json")
    assert str(caught.value).startswith(f"cannot load {tmp_path / 'chat.json'}: ")
