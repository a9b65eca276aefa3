from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.errors import RequestError
from pyctl.server.api.sequences import _filename
from pyctl.server.service import Settings
from tests.server.fake import Bench, Client, FakeSlots, play

HERE = Path("/saved")


def client_of(slots: FakeSlots | None = None, **settings: object) -> Client:
    return Bench(play(), settings=Settings(slots=slots or FakeSlots(), **settings)).client


def test_what_each_slot_is_doing() -> None:
    first, second = client_of().get("/slots").json()
    assert first == {"id": 0, "n_ctx": 4096, "speculative": False, "is_processing": False}
    params = second.pop("params")
    assert (params["n_predict"], params["speculative.types"], params["lora"]) == (9, "none", [])
    assert "grammar" not in params
    assert second == {
        "id": 1,
        "n_ctx": 4096,
        "speculative": False,
        "is_processing": True,
        "id_task": 7,
        "n_prompt_tokens": 8,
        "n_prompt_tokens_processed": 3,
        "n_prompt_tokens_cache": 2,
        "next_token": [{"has_next_token": True, "has_new_line": True, "n_remain": 5, "n_decoded": 4}],
    }


def test_prompts_are_shown_on_demand_only() -> None:
    second = client_of(slots_debug=True).get("/slots").json()[1]
    assert (second["prompt"], second["generated"]) == ("hello", "a\nb")
    assert second["params"]["grammar"] == ""


def test_no_slot_available() -> None:
    assert client_of().get("/slots?fail_on_no_slot=1").status_code == 200
    busy = client_of(FakeSlots(idle=False))
    assert busy.get("/slots").status_code == 200
    response = busy.get("/slots?fail_on_no_slot=1")
    assert response.status_code == 503
    assert response.json()["error"] == {"code": 503, "message": "no slot available", "type": "unavailable_error"}


def test_slots_can_be_hidden() -> None:
    error = client_of(show_slots=False).get("/slots").json()["error"]
    assert (error["code"], error["type"]) == (501, "not_supported_error")


def test_save_restore_erase() -> None:
    slots = FakeSlots()
    client = client_of(slots, slot_save_path=HERE)
    body = {"filename": "a.bin"}
    saved = client.post("/slots/1?action=save", json=body).json()
    assert saved == {"id_slot": 1, "filename": "a.bin", "n_saved": 11, "n_written": 222, "timings": {"save_ms": 3.5}}
    read = client.post("/slots/0?action=restore", json=body).json()
    assert read == {"id_slot": 0, "filename": "a.bin", "n_restored": 5, "n_read": 6, "timings": {"restore_ms": 7.0}}
    assert client.post("/slots/2?action=erase").json() == {"id_slot": 2, "n_erased": 4}
    assert client.post("/slots/1?action=restore", json=body).json()["error"]["message"] == "Unable to restore slot: no"
    assert slots.done == [
        ("save", 1, HERE / "a.bin"),
        ("restore", 0, HERE / "a.bin"),
        ("erase", 2, None),
        ("restore", 1, HERE / "a.bin"),
    ]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/slots/x?action=save", {"filename": "a"}, "Invalid slot ID"),
        ("/slots/0?action=eat", {"filename": "a"}, "Invalid action"),
        ("/slots/0", {"filename": "a"}, "Invalid action"),
        ("/slots/0?action=save", {}, "Invalid filename"),
        ("/slots/0?action=save", {"filename": 5}, "Invalid filename"),
        ("/slots/0?action=restore", {"filename": "../a"}, "Invalid filename"),
        ("/slots/0?action=restore", [], "the body must be a JSON object"),
    ],
)
def test_bad_actions(path: str, body: object, message: str) -> None:
    slots = FakeSlots()
    response = client_of(slots, slot_save_path=HERE).post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"] == {"code": 400, "message": message, "type": "invalid_request_error"}
    assert not slots.done


def test_without_a_directory_nothing_is_saved() -> None:
    response = client_of().post("/slots/0?action=save", json={"filename": "a"})
    assert response.status_code == 501
    assert "--slot-save-path" in response.json()["error"]["message"]


@given(st.one_of(st.text(max_size=300), st.sampled_from([".", "..", "a/b", "a\\b", " a", "a.", "\ud800", "x" * 256])))
def test_a_file_name_never_leaves_its_directory(name: str) -> None:
    try:
        kept = _filename(name)
    except RequestError:
        return
    assert kept == name
    assert (HERE / kept).parent == HERE
    assert len(name.encode()) <= 255
