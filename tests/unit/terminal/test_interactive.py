from __future__ import annotations

import base64
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pyctl.chat.reply import ReplyDelta
from pyctl.errors import EngineError
from pyctl.terminal import conversation
from pyctl.terminal.conversation import Conversation, Message, ReplyStats, load
from pyctl.terminal.interactive import COMMANDS, Chat
from tests.pictures import image_bytes


class Recorder:
    """A view that notes what it is shown."""

    def __init__(self) -> None:
        self.text = ""
        self.infos: list[str] = []
        self.errors: list[str] = []
        self.ends: list[ReplyStats | None] = []

    def delta(self, delta: ReplyDelta) -> None:
        self.text += delta.content

    def end(self, stats: ReplyStats | None) -> None:
        self.ends.append(stats)

    def info(self, text: str) -> None:
        self.infos.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)


class Lines:
    """A reader that gives prepared texts and notes what it was asked to edit."""

    def __init__(self, items: Sequence[str | type[BaseException]]) -> None:
        self.items = list(items)
        self.defaults: list[str] = []

    def read(self, default: str = "") -> str:
        self.defaults.append(default)
        item = self.items.pop(0) if self.items else EOFError
        if isinstance(item, str):
            return item
        raise item


def start(
    backend: Any, *items: str | type[BaseException], interactive: bool = True
) -> tuple[Chat, Recorder, Lines]:
    view = Recorder()
    reader = Lines(items)
    return Chat(backend, reader, view, Conversation(), interactive=interactive), view, reader


def talk(backend: Any, *items: str | type[BaseException]) -> tuple[Chat, Recorder, Lines]:
    """Return a chat that has read all of ``items`` and ended."""
    chat, view, reader = start(backend, *items)
    assert chat.run() == 0
    return chat, view, reader


def test_replies_follow_questions_and_history_grows(script: Any) -> None:
    backend = script.backend(script.say("Hel", "lo", reasoning="hm"), script.say("Bye"))
    _, view, _ = talk(backend, "hi", "", "  ", "bye")
    assert view.text == "HelloBye"
    assert view.ends == [script.stats, script.stats]
    assert backend.seen[1] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
        {"role": "user", "content": "bye"},
    ]
    assert backend.closed == 2


def shown(data: bytes, kind: str, text: str) -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def test_an_image_goes_with_the_next_message_and_stays_in_the_history(
    script: Any, tmp_path: Path
) -> None:
    """An image is sent with the next message and again in each later request, and survives an edit,
    a new try, saving and loading.
    """
    path = tmp_path / "a picture.jpg"
    saved = tmp_path / "chat.json"
    path.write_bytes(data := image_bytes(40, 30, "jpeg"))
    replies = [script.say(text) for text in "ABCDE"]
    backend = script.backend(*replies)
    _, view, _ = talk(
        backend,
        f"/image {path}",
        "what?",
        "and?",
        "/undo",
        "/edit who?",
        f"/save {saved}",
        "/regen",
    )
    assert not view.errors
    assert view.infos[0] == "JPEG, 40 x 30 pixels: shown with the next message"
    first = shown(data, "jpeg", "what?")
    assert backend.seen[0] == [first]
    assert backend.seen[1] == [
        first,
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "and?"},
    ]
    assert backend.seen[2] == backend.seen[3] == [shown(data, "jpeg", "who?")]
    talk(other := script.backend(script.say("x")), f"/load {saved}", "go on")
    assert other.seen[0][:2] == [shown(data, "jpeg", "who?"), {"role": "assistant", "content": "C"}]


def test_an_image_waits_until_somebody_has_seen_or_refused_it(script: Any, tmp_path: Path) -> None:
    """An image stays attached after a failed request, so that the user can try again, and goes once
    a reply has come, it was refused, or `/image -` removed it.
    """
    path = tmp_path / "a.png"
    path.write_bytes(data := image_bytes(40, 30))
    refused = EngineError("image input is not supported")
    backend = script.backend(
        [EngineError("full")], script.say("A"), script.say("B"), [refused], script.say("C")
    )
    lines = (
        "what?",
        "what?",
        f"/image {path}",
        "/image -",
        "and?",
        f"/image {path}",
        "who?",
        "who?",
    )
    _, view, _ = talk(backend, f"/image {path}", *lines)
    assert view.errors == ["full", "image input is not supported; the next message shows no image"]
    assert backend.seen[0] == backend.seen[1] == [shown(data, "png", "what?")]
    assert backend.seen[2][-1] == {"role": "user", "content": "and?"}
    assert backend.seen[4][-1] == {"role": "user", "content": "who?"}


def test_a_model_without_an_encoder_gets_no_image(script: Any, tmp_path: Path) -> None:
    (path := tmp_path / "a.png").write_bytes(image_bytes(40, 30))
    backend = script.backend(script.say("A"))
    backend.sees = False
    _, view, _ = talk(backend, f"/image {path}", f"/file {path}", "what?")
    refused = "scripted cannot read images: it has no image encoder (--mmproj)"
    assert view.errors == [refused, f"{path} is not UTF-8 text; /image shows images"]
    assert backend.seen == [[{"role": "user", "content": "what?"}]]


def test_what_is_no_image_says_so(script: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "huge.png").write_bytes(b"")
    os.truncate(tmp_path / "huge.png", 2**30)
    names = ("a.txt", "none.png", "huge.png", ".")
    _, view, _ = talk(script.backend(), *(f"/image {tmp_path / name}" for name in names), "/image")
    said = ("only PNG, JPEG", "No such file", "more than", "Is a directory", "missing file name")
    assert all(words in error for words, error in zip(said, view.errors, strict=True))


def test_regen_and_edit_and_undo(script: Any) -> None:
    backend = script.backend(script.say("A"), script.say("A2"), script.say("B"), script.say("C"))
    chat, _, reader = talk(backend, "a", "/regen", "/edit b\nb", "/edit", "c", "/undo", "/undo")
    assert [seen[-1]["content"] for seen in backend.seen] == ["a", "a", "b\nb", "c"]
    assert all(len(seen) == 1 for seen in backend.seen)
    assert "b\nb" in reader.defaults
    assert chat.conversation == Conversation()


def test_system_and_clear(script: Any) -> None:
    backend = script.backend(script.say("A"), script.say("B"))
    _, view, _ = talk(backend, "/system Be  brief.", "a", "/clear", "/system", "/system -", "b")
    assert backend.seen[0][0] == {"role": "system", "content": "Be  brief."}
    assert backend.seen[1] == [{"role": "user", "content": "b"}]
    assert view.infos == ["system: Be  brief.", "system: Be  brief.", "no system message"]


def test_file_commands_without_a_usable_file(script: Any) -> None:
    _, view, _ = talk(
        script.backend(), "/save", "/load", "/load /no/such/file", "/save ~no-such-user/x"
    )
    assert view.errors[:2] == ["missing file name", "missing file name"]
    assert view.errors[2] == "cannot load /no/such/file: No such file or directory"
    assert view.errors[3].endswith("no such user")


def test_help_names_every_command(script: Any) -> None:
    _, view, _ = talk(script.backend(), "/help")
    for name in COMMANDS:
        assert f"{name} " in view.infos[0]
    _, found, _ = talk(script.backend(), *COMMANDS)
    assert not any("unknown" in error for error in found.errors)
    assert max(map(len, view.infos[0].split("\n"))) <= 80


def test_help_of_one_command(script: Any) -> None:
    _, view, _ = talk(script.backend(), "/help regen", "/help /bye", "/help nothing")
    assert view.infos[0] == "/regen another reply to the last message"
    assert view.infos[1].startswith("/quit ")
    assert view.infos[2].startswith("/help ")


def test_a_file_goes_with_the_next_message_under_its_name(script: Any, tmp_path: Path) -> None:
    """Files precede the question in fences longer than any inside them. An edit keeps them and
    shows the question only.
    """
    notes = tmp_path / "my notes.txt"
    code = tmp_path / "a.md"
    saved = tmp_path / "chat.json"
    notes.write_text("one\ntwo\n")
    code.write_text("```\nx\n```")
    backend = script.backend(*(script.say(text) for text in "ABC"))
    chat, view, reader = talk(
        backend,
        f"/file {notes}",
        f"/file {code}",
        "what?",
        "/edit",
        "why?",
        f"/save {saved}",
        f"/load {saved}",
        "/regen",
    )
    assert not view.errors
    attached = "my notes.txt:\n```\none\ntwo\n```\n\na.md:\n````\n```\nx\n```\n````\n\n"
    assert [seen[0]["content"] for seen in backend.seen] == [
        attached + "what?",
        attached + "why?",
        attached + "why?",
    ]
    assert "what?" in reader.defaults
    assert chat.conversation.question() == "why?"


def test_only_text_of_bounded_size_is_attached(script: Any, tmp_path: Path) -> None:
    """Binary, huge, missing and too many files are errors in one line each, and the next message is
    sent without them.
    """
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "zero").write_bytes(b"a\0b")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**30)
    (tmp_path / "half").write_bytes(b"x" * 3 * 2**20)
    names = ("binary", "zero", "huge", "none", ".", "half", "half")
    backend = script.backend(script.say("A"))
    _, view, _ = talk(
        backend, *(f"/file {tmp_path / name}" for name in names), "/file", "/file -", "bare"
    )
    said = (
        "not UTF-8",
        "not text",
        "more than",
        "No such file",
        "not a file",
        "at most",
        "missing file name",
    )
    assert all(words in error for words, error in zip(said, view.errors, strict=True)), view.errors
    assert backend.seen[0][0]["content"] == "bare"


def test_sampling_fields_are_checked_and_sent(script: Any) -> None:
    """Fields of `/set` go with each request until they are unset. Unknown names and values out of
    range are errors and change nothing.
    """
    backend = script.backend(*(script.say(text) for text in "AB"))
    lines = (
        "/set temperature 0.2",
        "/set top_k 5",
        "/set seed -1",
        "/set max_tokens 9",
        "a",
        "/set top_k -",
        "/set",
        "b",
    )
    _, view, _ = talk(
        backend, *lines, "/set temperature", "/set size 3", "/set max_tokens -5", "/set min_p x"
    )
    sent = {"temperature": 0.2, "seed": -1, "max_tokens": 9}
    assert backend.fields == [{**sent, "top_k": 5}, sent]
    assert view.infos[:2] == ["temperature 0.2", "top_k 5"]
    assert view.infos[5] == "temperature 0.2\nseed -1\nmax_tokens 9"
    assert view.infos[6] == "temperature 0.2"
    said = (
        "'size' is not one of max_tokens, seed,",
        "'max_tokens' must be in [-1, 2147483647], not -5",
        "'min_p' must be a number",
    )
    assert all(error.startswith(words) for words, error in zip(said, view.errors, strict=True)), (
        view.errors
    )


def test_models_are_listed_and_switched(script: Any) -> None:
    backend = script.backend()
    _, view, _ = talk(backend, "/model", "/model second", "/model second-", "/model s", "/model x")
    assert view.infos == [
        "* scripted\n  second\n  second-best",
        "model: second",
        "model: second-best",
    ]
    assert [error.split()[0] for error in view.errors] == ["several", "no"]
    assert backend.model == "second-best"


def test_each_reply_is_kept_for_the_next_time(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "state" / "last.json"
    backend = script.backend(script.say("A"), script.say("B"))
    Chat(backend, Lines(["a", "b"]), Recorder(), Conversation(), interactive=True, last=path).run()
    assert [message.content for message in load(path).messages] == ["a", "A", "b", "B"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    view = Recorder()
    backend = script.backend(script.say("A"), script.say("B"))
    assert (
        Chat(
            backend, Lines("ab"), view, Conversation(), interactive=True, last=Path("/proc/x/y")
        ).run()
        == 0
    )
    assert len(view.infos) == 1
    assert view.infos[0].startswith("--continue will not find this chat: ")


def test_a_saved_chat_is_bounded(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "_MAX_CHAT_BYTES", 200)
    path = tmp_path / "chat.json"
    chat, view, _ = start(
        script.backend(script.say("A")), "a" * 200, f"/save {path}", f"/load {path}"
    )
    path.write_text("[" + " " * 300 + "]")
    assert chat.run() == 0
    assert ["more than 200 bytes" in error for error in view.errors] == [True, True]


def test_quit_ends_and_unknown_commands_do_not(script: Any) -> None:
    for leave in ("/exit", "/bye"):
        assert start(script.backend(), leave, "never")[0].run() == 0
    _, view, reader = talk(script.backend(), "/frobnicate", "/quit", "never")
    assert view.errors == [
        "unknown command /frobnicate; /help lists them, and // starts a message with a slash"
    ]
    assert reader.items == ["never"]


def test_two_slashes_begin_a_message(script: Any) -> None:
    backend = script.backend(script.say("A"))
    talk(backend, "//usr/bin?")
    assert backend.seen[0][0]["content"] == "/usr/bin?"


def test_ctrl_c_keeps_what_was_said_marked(script: Any) -> None:
    backend = script.backend(
        [ReplyDelta("hm"), ReplyDelta(content="par"), KeyboardInterrupt()], script.say("rest")
    )
    chat, view, _ = talk(backend, "a", KeyboardInterrupt, "b")
    assert chat.conversation.messages[1] == Message("assistant", "par", "hm", stopped=True)
    assert view.ends == [None, script.stats]
    assert view.infos == ["Ctrl-D or /exit ends the chat"]
    assert backend.closed == 2
    assert len(backend.seen[1]) == 3


def test_a_failed_reply_changes_nothing(script: Any) -> None:
    backend = script.backend(
        script.say("A"),
        [ReplyDelta(content="par"), EngineError("out of\n memory")],
        script.say("B"),
    )
    _, view, _ = talk(backend, "a", "/regen", "b")
    assert view.errors == ["out of memory"]
    assert len(backend.seen[2]) == 3


def test_only_the_first_of_several_interrupts_counts() -> None:
    """A second Ctrl+C while the reply ends does not interrupt the clean-up: the text so far stays,
    and the handler of before is back.
    """
    before = signal.getsignal(signal.SIGINT)

    class Impatient:
        closed = 0

        def stream(self, messages: Any, fields: Any) -> Any:
            try:
                yield ReplyDelta(content="par")
                os.kill(os.getpid(), signal.SIGINT)
                yield ReplyDelta(content="never")
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                self.closed += 1

    backend = Impatient()
    chat, view, _ = talk(backend, "a")
    assert backend.closed == 1
    assert view.text == "par"
    assert chat.conversation.messages[1].stopped
    assert signal.getsignal(signal.SIGINT) is before
