"""Images in the requests of all APIs."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from pyctl.chat.images import MEDIA_MARKER
from pyctl.prompt import Prompt
from pyctl.requests.reply_settings import ReplySettings
from pyctl.requests.request_pool import Lane
from tests.client import HI
from tests.pictures import GridReader, image_bytes
from tests.unit.server.fake import Bench, play

PNG = image_bytes(70, 31)
OTHER = image_bytes(33, 65, "jpeg", seed=1)
URL, OTHER_URL = (
    f"data:image/any;base64,{base64.b64encode(data).decode()}" for data in (PNG, OTHER)
)


@pytest.fixture
def bench() -> Bench:
    return Bench(play("x"), images=GridReader())


def openai(*parts: str) -> dict[str, Any]:
    """Return a message whose parts are texts, or images if they are addresses."""
    return {"role": "user", "content": [_openai(part) for part in parts]}


def _openai(part: str) -> dict[str, Any]:
    if ":" not in part:
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": part, "detail": "low"}}


def anthropic(part: str) -> dict[str, Any]:
    if ":" not in part:
        return {"type": "text", "text": part}
    if part.startswith("http"):
        return {"type": "image", "source": {"type": "url", "url": part}}
    data = part.partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def of_responses(part: str) -> dict[str, Any]:
    return (
        {"type": "input_image", "image_url": part}
        if ":" in part
        else {"type": "input_text", "text": part}
    )


def prompt_of(bench: Bench, path: str, body: dict[str, Any]) -> Prompt:
    response = bench.post(path, body)
    assert response.status_code == 200, response.text
    return bench.worker.requests[-1].prompt


def refusal(bench: Bench, path: str, body: dict[str, Any]) -> str:
    response = bench.post(path, body)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


def test_all_apis_make_the_same_prompt(bench: Bench) -> None:
    """Equal texts and images give equal tokens through each API, so that a conversation hits the
    cache whichever client continues it.
    """
    expected = prompt_of(
        bench, "/v1/chat/completions", {"messages": [openai("look", URL, "and", OTHER_URL)]}
    )
    assert [picture.source.data for picture in expected.pictures] == [PNG, OTHER]
    parts = ("look", URL, "and", OTHER_URL)
    user = {"role": "user", "content": [anthropic(part) for part in parts]}
    text = (
        f"<|im_start|>user\nlook{MEDIA_MARKER}and{MEDIA_MARKER}<|im_end|>\n<|im_start|>assistant\n"
    )
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"messages": [user]},
        "/v1/responses": {
            "input": [{"role": "user", "content": [of_responses(part) for part in parts]}]
        },
        "/completion": {
            "prompt": {"prompt_string": text, "multimodal_data": [URL, OTHER_URL.partition(",")[2]]}
        },
    }
    bodies["/v1/completions"] = bodies["/completion"]
    for path, body in bodies.items():
        assert prompt_of(bench, path, body).tokens.tolist() == expected.tokens.tolist(), path


def test_images_in_results_of_tools(bench: Bench) -> None:
    """An image in the result of a tool stays at its place in the text, and the three chat APIs give
    the same tokens.
    """
    function = {"name": "shot", "arguments": "{}"}
    called = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    result = {**openai("here", URL), "role": "tool", "tool_call_id": "c"}
    expected = prompt_of(bench, "/v1/chat/completions", {"messages": [*HI, called, result]})
    (picture,) = expected.pictures
    assert bytes(expected.tokens[picture.start - 5 : picture.start - 1].tolist()) == b"here"
    block = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [anthropic("here"), anthropic(URL)],
    }
    use = {"type": "tool_use", "id": "c", "name": "shot", "input": {}}
    messages = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
    assert (
        prompt_of(bench, "/v1/messages", {"messages": messages}).tokens.tolist()
        == expected.tokens.tolist()
    )
    call = {"type": "function_call", "call_id": "c", **function}
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [of_responses("here"), of_responses(URL)],
    }
    asked = {"input": [*HI, call, output]}
    assert prompt_of(bench, "/v1/responses", asked).tokens.tolist() == expected.tokens.tolist()


def test_text_behind_an_image_and_a_result_without_one_stay_as_they_were(bench: Bench) -> None:
    block = {"type": "tool_result", "tool_use_id": "c", "content": [anthropic("a"), anthropic("b")]}
    content = [block, anthropic("and"), anthropic(URL), anthropic("what?")]
    prompt = prompt_of(bench, "/v1/messages", {"messages": [{"role": "user", "content": content}]})
    text = bench.service.readable(prompt.tokens.tolist())
    assert (
        "tool\nab<|im_end|>\n<|im_start|>user\nand\x01[image: 3 tokens]\x02what?<|im_end|>" in text
    )


def test_the_same_image_twice_and_again(bench: Bench) -> None:
    prompt = prompt_of(
        bench, "/v1/chat/completions", {"messages": [openai(URL, URL), openai(OTHER_URL)]}
    )
    one, two, other = prompt.pictures
    assert (one.tokens == two.tokens).all()
    assert one.start < two.start < other.start
    again = prompt_of(bench, "/v1/chat/completions", {"messages": [openai(URL, URL)]})
    assert (again.tokens[: two.end] == prompt.tokens[: two.end]).all()
    changed = bytearray(PNG)
    changed[-20] ^= 1
    url = "data:image/png;base64," + base64.b64encode(changed).decode()
    bit = prompt_of(bench, "/v1/chat/completions", {"messages": [openai(url, URL)]})
    assert not (bit.pictures[0].tokens == one.tokens).any()


def test_counts_have_the_images_in_them(bench: Bench) -> None:
    n = len(prompt_of(bench, "/v1/chat/completions", {"messages": [openai("a", URL)]}))
    asked = {"messages": [openai("a", URL)]}
    assert bench.post("/v1/chat/completions/input_tokens", asked).json()["input_tokens"] == n
    blocks = {"messages": [{"role": "user", "content": [anthropic("a"), anthropic(URL)]}]}
    assert bench.post("/v1/messages/count_tokens", blocks).json()["input_tokens"] == n
    items = {"input": [{"role": "user", "content": [of_responses("a"), of_responses(URL)]}]}
    assert bench.post("/v1/responses/input_tokens", items).json()["input_tokens"] == n


def test_text_shows_the_marker_of_props(bench: Bench) -> None:
    props = bench.client.get("/props").json()
    assert props["modalities"] == {"vision": True, "video": False, "audio": False}
    marker = props["media_marker"]
    shown = bench.post("/apply-template", {"messages": [openai("a", URL)]}).json()["prompt"]
    assert shown == f"<|im_start|>user\na{marker}<|im_end|>\n<|im_start|>assistant\n"
    assert bench.client.get("/v1/models").json()["models"][0]["capabilities"] == [
        "completion",
        "multimodal",
    ]
    reply = bench.post(
        "/v1/chat/completions", {"messages": [openai("a", URL)], "verbose": True}
    ).json()
    assert reply["__verbose"]["prompt"] == shown
    assert base64.b64encode(PNG).decode()[:40] not in json.dumps(reply)


def test_a_server_that_sees_nothing_says_so_in_all_apis() -> None:
    bench = Bench(play("x"))
    hint = "may need to provide the mmproj"
    assert hint in refusal(bench, "/v1/chat/completions", {"messages": [openai("a", URL)]})
    assert hint in refusal(
        bench, "/v1/messages", {"messages": [{"role": "user", "content": [anthropic(URL)]}]}
    )
    assert hint in refusal(
        bench, "/v1/responses", {"input": [{"role": "user", "content": [of_responses(URL)]}]}
    )
    assert hint in refusal(
        bench, "/completion", {"prompt": {"prompt_string": "x", "multimodal_data": [URL]}}
    )
    assert bench.client.get("/props").json()["modalities"]["vision"] is False
    assert bench.client.get("/v1/models").json()["models"][0]["capabilities"] == ["completion"]


@pytest.mark.parametrize("kind", ["image", "input_image"])
def test_a_server_that_sees_names_the_right_type_of_a_part(bench: Bench, kind: str) -> None:
    content = [{"type": kind, "image_url": URL}]
    said = refusal(
        bench, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
    )
    assert said == f"messages[0].content[0]: an image must be a part of type image_url, not {kind}"
    embedding = Bench(replies=ReplySettings(embeddings=True), pooling="mean", images=GridReader())
    for value in ({"content": content}, {"prompt_string": "x", "multimodal_data": [URL]}):
        answer = embedding.post("/embeddings", {"input": [value]})
        assert answer.status_code == 501
        assert "mmproj" not in answer.text


def test_errors_name_the_image_as_the_client_wrote_it(bench: Bench) -> None:
    """The error for a bad image has its place in the body that the client sent, not in the
    converted messages, and nothing is evaluated.
    """
    bad = "data:image/png;base64,aGVsbG8="
    for path, body, place in (
        (
            "/v1/chat/completions",
            {"messages": [*HI, openai("a", URL, bad)]},
            "messages[1].content[2]",
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "content": [anthropic("a"), anthropic(bad)]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[1]",
        ),
        (
            "/v1/responses",
            {"input": [*HI, {"role": "user", "content": [of_responses(bad)]}]},
            "input[1].content[0]",
        ),
        (
            "/completion",
            {"prompt": {"prompt_string": "x", "multimodal_data": [bad]}},
            "multimodal_data[0]",
        ),
    ):
        message = refusal(bench, path, body)
        assert message.startswith(f"{place}: only PNG, JPEG, GIF, BMP and WebP"), message
        assert not bench.worker.requests, "nothing is evaluated for it"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "of type base64 or url"),
        ({"type": "file", "file_id": "f"}, "of type base64 or url"),
        ({"type": "base64"}, "must be a string"),
        ({"type": "url"}, "must be a string"),
        ("x", "'source' must be an object"),
    ],
)
def test_sources_that_are_none(bench: Bench, source: Any, said: str) -> None:
    block = {"type": "image", **({} if source is None else {"source": source})}
    assert said in refusal(
        bench, "/v1/messages", {"messages": [{"role": "user", "content": [block]}]}
    )


def test_markers_and_images_are_as_many(bench: Bench) -> None:
    prompt = {"prompt_string": f"{MEDIA_MARKER}", "multimodal_data": [URL, URL]}
    assert "1 times the media_marker of /props for 2 images" in refusal(
        bench, "/completion", {"prompt": prompt}
    )
    assert "with 'multimodal_data'" in refusal(
        bench, "/completion", {"prompt": {"multimodal_data": [URL]}}
    )
    for blind in (bench, Bench(play("x"))):
        said = refusal(blind, "/completion", {"prompt": {**prompt, "multimodal_data": []}})
        assert "1 times the media_marker of /props for 0 images" in said
    assert not prompt_of(
        bench, "/completion", {"prompt": {"prompt_string": "x", "multimodal_data": []}}
    ).pictures


def test_a_response_with_an_image_is_continued(bench: Bench) -> None:
    asked = {"role": "user", "content": [of_responses(URL)]}
    first = bench.post("/v1/responses", {"input": [asked]}).json()
    more = {"role": "user", "content": "and?"}
    prompt = prompt_of(bench, "/v1/responses", {"input": [asked, *first["output"], more]})
    assert [picture.source.data for picture in prompt.pictures] == [PNG]


def test_a_conversation_with_an_image_is_warmed_and_made_ready() -> None:
    bench = Bench(images=GridReader())
    answer = bench.post("/cache/warm", {"messages": [openai("a", URL)]})
    assert answer.status_code == 200, answer.text
    assert bench.worker.requests[-1].prompt.pictures


def test_an_address_is_fetched_beside_the_pool(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that read requests are never those that wait for other servers."""
    asked: list[str] = []
    pool = bench.service.shared.pool
    pool.reading = Lane(pool, 1)

    def fetch(url: str) -> bytes:
        asked.append(url)
        assert bench.post("/tokenize", {"content": "a"}).status_code == 200, (
            "the one thread is free meanwhile"
        )
        return PNG

    monkeypatch.setattr("pyctl.requests.remote_images.fetch_image", fetch)
    url = "http://host.example/a.png"
    expected = prompt_of(
        bench, "/v1/chat/completions", {"messages": [openai("a", URL)]}
    ).tokens.tolist()
    for path, body in (
        ("/v1/chat/completions", {"messages": [openai("a", url)]}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [anthropic("a"), anthropic(url)]}]},
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [of_responses("a"), of_responses(url)]}]},
        ),
    ):
        assert prompt_of(bench, path, body).tokens.tolist() == expected
    assert asked == [url] * 3
    prompt = {"prompt_string": MEDIA_MARKER, "multimodal_data": [url]}
    assert prompt_of(bench, "/completion", {"prompt": prompt}).pictures
    assert bench.post(
        "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [anthropic(url)]}]}
    ).is_success


def test_an_address_that_fails(bench: Bench) -> None:
    message = refusal(
        bench, "/v1/chat/completions", {"messages": [openai("a", "http://127.0.0.1:1/a.png")]}
    )
    assert (
        message == "messages[0].content[1]: the address of the image is not in the public network"
    )
