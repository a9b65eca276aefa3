"""Images of requests, wherever they come from."""

from __future__ import annotations

import base64
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.errors import ContextSizeError, RequestError
from pyctl.files.image_file import ImageFile
from pyctl.prompt import ImageSpan
from pyctl.requests.body import ChatBody
from pyctl.requests.image_sources import (
    ImageLimits,
    ImagePart,
    ImageSources,
    data_images,
    load_images,
)
from pyctl.requests.prepare import prepare
from pyctl.requests.request_pool import FilesMissing
from pyctl.server.server_settings import ServerSettings
from tests.effort import examples
from tests.pictures import GridReader, image_bytes
from tests.unit.server.fake import Bench, play

PNG = image_bytes(70, 31)
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    media = tmp_path_factory.mktemp("media")
    (media / "inside").mkdir()
    (media / "inside" / "a b.png").write_bytes(PNG)
    (media.parent / "secret.png").write_bytes(PNG)
    (media / "link.png").symlink_to(media.parent / "secret.png")
    (media / "good.png").symlink_to(media / "inside" / "a b.png")
    os.mkfifo(media / "pipe.png")
    (media / "text.png").write_text("no image")
    return Bench(play("x"), settings=ServerSettings(media_path=str(media)), images=GridReader())


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, *parts]},
    ]


def sources(
    bench: Bench,
    fetched: dict[str, bytes] | None = None,
    limits: ImageLimits = ImageLimits(),
) -> ImageSources | None:
    service = bench.service
    if service.chat.images is None:
        return None
    return ImageSources(
        service.chat.images,
        fetched or {},
        n_ctx=service.info.n_ctx,
        media_path=service.shared.media_path,
        limits=limits,
    )


def loaded(
    bench: Bench,
    *parts: Any,
    fetched: dict[str, bytes] | None = None,
    limits: ImageLimits = ImageLimits(),
) -> list[Any]:
    messages = load_images(asked(*parts), sources(bench, fetched, limits))
    found: list[Any] = messages[1]["content"][1:]
    return found


@pytest.mark.parametrize(
    "url",
    [
        URL,
        BASE64,
        f"data:image/jpeg;charset=x;BASE64,{BASE64}",
        f"DATA:;base64,{BASE64.rstrip('=')}",
        "data:image/png;base64,\n"
        + "\n".join(BASE64[i : i + 76] for i in range(0, len(BASE64), 76)),
        "file://inside/a b.png",
        "file:///inside/a b.png",
        "file://good.png",
        "FILE://inside/../good.png",
    ],
    ids=lambda url: url[:30],
)
def test_an_image_comes_from_the_request_or_from_the_folder(bench: Bench, url: str) -> None:
    (image,) = loaded(bench, part(url))
    assert isinstance(image, ImageFile)
    assert image.data == PNG


def test_long_base64_is_read_in_steps(bench: Bench) -> None:
    limits = ImageLimits(step_chars=8)
    assert loaded(bench, part(BASE64), limits=limits)[0].data == PNG


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (None, "must be a string"),
        ("", "must be a string"),
        (3, "must be a string"),
        ("data:image/png,abc", "data:image/...;base64"),
        ("data:image/png;base64", "data:image/...;base64"),
        ("data:" + "x" * 5000 + ";base64,aaaa", "data:image/...;base64"),
        ("data:image/png;base64,", "only PNG"),
        ("data:image/png;base64,aaaä", "must be base64"),
        ("data:image/png;base64,a", "must be base64"),
        ("data:image/png;base64,aa=aa", "must be base64"),
        ("javascript:alert(1)", "must be base64"),
        ("ftp://host/x.png", "must be base64"),
        ("data:image/png;base64,aGVsbG8=", "only PNG, JPEG, GIF, BMP and WebP"),
        (BASE64[:60], "cut off"),
        ("file://../secret.png", "not allowed"),
        ("file://inside/../../secret.png", "not allowed"),
        ("file://link.png", "not allowed"),
        ("file:///etc/passwd", "does not exist"),
        ("file://~/x.png", "does not exist"),
        ("file://missing.png", "does not exist"),
        ("file://a\0b.png", "does not exist"),
        ("file://" + "x/" * 3000, "does not exist"),
        ("file://pipe.png", "is not a file"),
        ("file://inside", "no file|cannot be opened"),
        ("file://text.png", "only PNG"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_wrong_with_which_image(bench: Bench, url: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as raised:
        loaded(bench, part(URL), part(url))
    assert str(raised.value).startswith("messages[1].content[2]: ")
    assert len(str(raised.value)) < 400


def test_files_are_nobodys_unless_a_folder_is_named() -> None:
    with pytest.raises(RequestError, match="--media-path"):
        loaded(Bench(play("x"), images=GridReader()), part("file://good.png"))


def test_a_part_knows_where_it_was(bench: Bench) -> None:
    with pytest.raises(RequestError, match=r"^input\[7\]\.output\[1\]: "):
        loaded(bench, ImagePart("data:", "input[7].output[1]"))


def test_other_parts_stay_for_others_to_judge(bench: Bench) -> None:
    other = [{"type": "input_audio"}, "x", None, {"type": "image_url", "image_url": URL}]
    assert loaded(bench, *other)[:3] == other[:3]
    assert isinstance(loaded(bench, *other)[3], ImageFile)
    for messages in (None, 3, {"a": 1}, [None, {"content": 3}, "x"]):
        assert load_images(messages, sources(bench)) == messages
    blind = Bench(play("x"))
    assert load_images(asked(part(URL)), sources(blind)) == asked(part(URL))


def test_a_request_may_name_files_of_the_server(bench: Bench) -> None:
    body = ChatBody.from_json({"messages": asked(part("file://inside/a b.png"))})
    (prepared,) = prepare(bench.service, body)
    (picture,) = prepared.request.prompt.pictures
    assert picture.source.data == PNG
    closed = Bench(play("x"), images=GridReader())
    with pytest.raises(RequestError, match="--media-path"):
        prepare(closed.service, body)


def test_addresses_are_asked_for_once_and_all_at_once(bench: Bench) -> None:
    one = "http://a/x.png"
    other = "HTTPS://b/y.png"
    with pytest.raises(FilesMissing) as raised:
        loaded(bench, part(one), part(other), part(one))
    assert raised.value.addresses == {
        one: "messages[1].content[1]",
        other: "messages[1].content[2]",
    }
    images = loaded(bench, part(one), part(other), fetched={one: PNG, other: image_bytes(9, 9)})
    assert [image.width for image in images] == [70, 9]
    with pytest.raises(RequestError, match=r"content\[1\]: only PNG"):
        loaded(bench, part(one), fetched={one: b"<html>"})


def test_numbers_and_sizes_are_bounded(bench: Bench) -> None:
    with pytest.raises(RequestError, match="at most 512 images"):
        loaded(bench, *[part(BASE64)] * 513)
    with pytest.raises(RequestError, match="at most 16 addresses"):
        loaded(bench, *(part(f"http://host/{i}") for i in range(17)))
    limits = ImageLimits(max_bytes=len(PNG) - 9)
    for url in (URL, "file://good.png"):
        with pytest.raises(RequestError, match="more than"):
            loaded(bench, part(url), limits=limits)


def test_no_image_is_decoded_where_not_all_can_be_seen() -> None:
    """And one that cannot be is named."""
    decoded: list[int] = []

    class PixelReader(GridReader):
        """Takes a token for each pixel, and cannot decode an image of 33 columns."""

        def n_tokens(self, image: ImageFile) -> int:
            return image.width * image.height

        def picture(self, image: ImageFile) -> ImageSpan:
            decoded.append(image.width)
            if image.width == 33:
                raise RequestError("the PNG image is broken")
            return super().picture(image)

    bench = Bench(play("x"), images=PixelReader())
    sizes = ((30, 30), (33, 10), (31, 31))
    good, bad, large = (part(base64.b64encode(image_bytes(*size)).decode()) for size in sizes)
    with pytest.raises(ContextSizeError):
        loaded(bench, good, large, large, large, large)
    with pytest.raises(FilesMissing):
        loaded(bench, good, part("http://a/"))
    with pytest.raises(RequestError, match="1500 pixels together"):
        loaded(bench, good, large, limits=ImageLimits(max_pixels=1500))
    assert not decoded
    with pytest.raises(
        RequestError, match=r"^messages\[1\]\.content\[2\]: the PNG image is broken"
    ):
        loaded(bench, good, bad)
    assert decoded == [30, 33]


def test_images_beside_a_raw_prompt(bench: Bench) -> None:
    assert [image.data for image in data_images([BASE64, URL], sources(bench))] == [PNG, PNG]
    for wrong, said in (
        ({}, "list of strings"),
        ("x", "base64"),
        ([3], r"multimodal_data\[0\]"),
        ([URL, "?"], r"multimodal_data\[1\]"),
    ):
        with pytest.raises(RequestError, match=said):
            data_images(wrong, sources(bench))
    with pytest.raises(RequestError, match="may need to provide the mmproj"):
        data_images([URL], sources(Bench(play("x"))))


URLS = st.sampled_from((URL, "file://good.png", "http://a/", "data:x")) | st.text(max_size=8)
NAMES = st.sampled_from(("url", "type", "text", "detail", "image_url", "at"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | URLS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries({"type": st.just("image_url"), "image_url": JSON}) | JSON, max_size=4
    )
)
def test_whatever_parts_there_are_images_come_or_a_word_why_not(
    bench: Bench, parts: list[Any]
) -> None:
    found = parts
    error = ""
    try:
        found = loaded(bench, *parts)
    except RequestError as refusal:
        error = str(refusal)
    assert len(found) == len(parts)
    assert not error or error.startswith("messages[1].content[")
