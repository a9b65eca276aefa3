from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.engine.admin import EngineAdmin
from pyctl.engine.engine_stats import SequenceView
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Request
from pyctl.engine.schedule.admission import ActiveRequest
from pyctl.errors import RequestError
from pyctl.prompt import Prompt
from pyctl.server.api.sequences import _filename, sequence_json
from pyctl.server.server_settings import ServerSettings
from tests.case import Case
from tests.fake import FakeBackend
from tests.unit.engine.drive import AtOnce, engine_of, request
from tests.unit.engine.scheduling import ENDLESS
from tests.unit.server.fake import N_CTX, Bench

HERE = Path("/saved")

PROMPT = {"prompt": "hello", "n_predict": 4, "ignore_eos": True}


def test_what_each_slot_is_doing() -> None:
    """An idle slot has its size only, a busy one llama-server's fields, and texts are shown only
    with the debug setting.
    """
    service = Bench().service
    request = Request(Prompt.from_ids(list(b"hello")), max_tokens=9)
    busy = SequenceView(
        1, N_CTX, True, 7, request, 8, 2, 3, 4, True, tuple(b"hello"), tuple(b"a\nb")
    )
    assert sequence_json(service, SequenceView(0, N_CTX, False)) == {
        "id": 0,
        "n_ctx": 4096,
        "speculative": False,
        "is_processing": False,
    }
    shown = sequence_json(service, busy)
    params = shown.pop("params")
    assert params["n_predict"] == 9
    assert params["speculative.types"] == "none"
    assert params["lora"] == []
    assert "grammar" not in params
    assert shown == {
        "id": 1,
        "n_ctx": 4096,
        "speculative": False,
        "is_processing": True,
        "id_task": 7,
        "n_prompt_tokens": 8,
        "n_prompt_tokens_processed": 3,
        "n_prompt_tokens_cache": 2,
        "next_token": [
            {"has_next_token": True, "has_new_line": True, "n_remain": 5, "n_decoded": 4}
        ],
    }
    debug = sequence_json(Bench(settings=ServerSettings(slots_debug=True)).service, busy)
    assert debug["prompt"] == "hello"
    assert debug["generated"] == "a\nb"
    assert debug["params"]["grammar"] == ""


def test_slots_of_a_server_that_has_served() -> None:
    bench = Bench(n_seqs=2)
    assert [slot["is_processing"] for slot in bench.client.get("/slots").json()] == [False, False]
    bench.post("/completion", {**PROMPT, "id_slot": 1})
    first, second = bench.client.get("/slots").json()
    assert "id_task" not in first
    assert second["id"] == 1
    assert second["is_processing"] is False
    assert second["params"]["n_predict"] == 4


def test_cached_tokens_of_others_are_shown_in_blocks() -> None:
    """Else a page that planted a prompt reads from the number how far the next prompt of another
    client equals it.
    """
    bench = Bench()
    here = {"Host": "localhost:8080"}
    views = Future[tuple[SequenceView, ...]]()
    views.set_result(
        (SequenceView(0, N_CTX, True, 7, Request(Prompt.from_ids([1] * 95)), 95, 45, 50),)
    )
    bench.service.admin.sequences = lambda **_: views  # type: ignore[method-assign]
    counts = ("n_prompt_tokens_cache", "n_prompt_tokens_processed")
    for headers, expected in (
        (here, (45, 50)),
        ({**here, "Origin": "http://evil.example"}, (32, 63)),
    ):
        (slot,) = bench.client.get("/slots", headers=headers).json()
        assert tuple(slot[name] for name in counts) == expected


class Spelling(FakeBackend):
    """Spells its fourth token, whichever that is, with the end of a line."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces = iter([b"a", b"a", b"a", b"b\n"])

    def piece(self, token: int) -> bytes:
        return next(self._pieces, b"c")


def test_a_running_reply_shows_a_new_line_once_it_has_one() -> None:
    """A view has the texts only if it is asked for them."""
    engine = engine_of(Spelling())
    admin = EngineAdmin(AtOnce(), engine)
    engine.submit(RequestHandle(request(Prompt.from_ids([5, 6, 7] * 20), 9, sampling=ENDLESS)))
    seen: list[tuple[int, bool]] = []
    while engine.step():
        (view,) = admin.sequences().result()
        assert view.prompt == (), "no text without a wish for it"
        assert view.reply == (), "no text without a wish for it"
        if view.busy:
            seen.append((view.n_predicted, view.has_new_line))
            (whole,) = admin.sequences(with_tokens=True).result()
            assert len(whole.prompt) + len(whole.reply) == view.n_tokens
    assert [has for _, has in seen] == sorted(has for _, has in seen), "and for ever"
    assert {has for _, has in seen} == {False, True}


def test_no_slot_available() -> None:
    bench = Bench()
    assert bench.client.get("/slots?fail_on_no_slot=1").status_code == 200
    serving = ActiveRequest(
        RequestHandle(Request(Prompt.from_ids([1]))), seq=bench.engine.sequences[0]
    )
    bench.engine.running.append(serving)
    assert bench.client.get("/slots").status_code == 200
    response = bench.client.get("/slots?fail_on_no_slot=1")
    assert response.status_code == 503
    assert response.json()["error"] == {
        "code": 503,
        "message": "no slot available",
        "type": "unavailable_error",
    }


def test_slots_can_be_hidden() -> None:
    error = Bench(settings=ServerSettings(show_slots=False)).client.get("/slots").json()["error"]
    assert error["code"] == 501
    assert error["type"] == "not_supported_error"


def test_save_restore_erase(tmp_path: Path) -> None:
    bench = Bench(settings=ServerSettings(slot_save_path=tmp_path), n_seqs=2)
    client = bench.client
    body = {"filename": "a.bin"}
    bench.post("/completion", {**PROMPT, "id_slot": 1})
    n_tokens = len("hello") + 4 - 1  # the last token is not evaluated
    saved = client.post("/slots/1?action=save", body).json()
    assert saved.pop("timings")["save_ms"] >= 0
    n_bytes = (tmp_path / "a.bin").stat().st_size
    assert saved == {"id_slot": 1, "filename": "a.bin", "n_saved": n_tokens, "n_written": n_bytes}
    read = client.post("/slots/0?action=restore", body).json()
    assert read.pop("timings")["restore_ms"] >= 0
    assert read == {"id_slot": 0, "filename": "a.bin", "n_restored": n_tokens, "n_read": n_bytes}
    assert client.post("/slots/2?action=erase").json() == {"id_slot": 2, "n_erased": n_tokens}
    missing = client.post("/slots/1?action=restore", {"filename": "b.bin"}).json()["error"]
    assert missing["code"] == 400
    assert missing["message"].partition(":")[0] == "Unable to restore slot"


@pytest.mark.parametrize(
    "case",
    [
        Case("/slots/x?action=save", {"filename": "a"}, 400, "Invalid slot ID"),
        Case("/slots/0?action=eat", {"filename": "a"}, 400, "Invalid action"),
        Case("/slots/0", {"filename": "a"}, 400, "Invalid action"),
        Case("/slots/0?action=save", {}, 400, "Invalid filename"),
        Case("/slots/0?action=save", {"filename": 5}, 400, "Invalid filename"),
        Case("/slots/0?action=restore", {"filename": "../a"}, 400, "Invalid filename"),
        Case("/slots/0?action=restore", [], 400, "the body must be a JSON object"),
    ],
    ids=str,
)
def test_bad_actions(case: Case) -> None:
    bench = Bench(settings=ServerSettings(slot_save_path=HERE))
    assert case.check(bench.client) == case.error


def test_without_a_directory_nothing_is_saved() -> None:
    response = Bench().post("/slots/0?action=save", {"filename": "a"})
    assert response.status_code == 501
    assert "--slot-save-path" in response.json()["error"]["message"]


@given(
    st.one_of(
        st.text(max_size=300),
        st.sampled_from([".", "..", "a/b", "a\\b", " a", "a.", "\ud800", "x" * 256]),
    )
)
def test_a_file_name_never_leaves_its_directory(name: str) -> None:
    try:
        kept = _filename(name)
    except RequestError:
        return
    assert kept == name
    assert (HERE / kept).parent == HERE
    assert len(name.encode()) <= 255
