"""The image encoder on a tiny model: sizes, keys, the cache of embeddings, and refusals."""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_cpp import mtmd_cpp
from numpy.typing import NDArray
from PIL import Image

from pyctl.errors import ModelError, NotSupportedError, RequestError
from pyctl.files.image_file import ImageFile
from pyctl.llama.fit.dry_runs import dry_run
from pyctl.llama.fit.fitting import fit_all
from pyctl.llama.images.image_encoder import ImageEncoder, ImageRows, _Graphs
from pyctl.llama.images.make_encoder import make_encoder
from pyctl.llama.library.devices import devices
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.resolved import Resolved
from pyctl.llama.settings.vision_settings import VisionSettings
from pyctl.prompt import ImageSpan
from tests.effort import examples
from tests.pictures import image_bytes
from tools.generator import VISION_SHAPES, write_encoder


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> ModelSettings:
    return ModelSettings(path=str(model_path("tiny-hybrid")), n_ctx=512, n_ubatch=64, n_threads=1)


@pytest.fixture(scope="module")
def loaded(model: ModelSettings, tiny_mmproj: Path) -> Iterator[Loaded]:
    found = load(model, vision=VisionSettings(str(tiny_mmproj)))
    yield found
    found.backend.unload()


@pytest.fixture(scope="module")
def bounded(model: ModelSettings, tiny_mmproj: Path) -> Iterator[ImageEncoder]:
    """Yield an encoder with its own bounds on the tokens of an image."""
    limits = VisionSettings(str(tiny_mmproj), image_min_tokens=100, image_max_tokens=200)
    found = load(model, vision=limits)
    yield images_of(found)
    found.backend.unload()


def images_of(loaded: Loaded) -> ImageEncoder:
    assert loaded.images is not None
    return loaded.images


def file_of(seed: int, width: int = 100, height: int = 70) -> ImageFile:
    return ImageFile.parse(image_bytes(width, height, "bmp", seed=seed))


sides = st.one_of(
    st.integers(1, 200), st.integers(1, 6000), st.integers(1, 180).map(lambda n: 32 * n + 16)
)


@settings(
    deadline=None,
    max_examples=examples(300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(width=sides, height=sides)
def test_images_are_cut_as_libmtmd_cuts_them(
    loaded: Loaded, bounded: ImageEncoder, width: int, height: int
) -> None:
    for images in (images_of(loaded), bounded):
        columns, lines = images.grid.grid_size(width, height)
        assert images._chunk_grid(images._tokenized(width, height, None)) == (columns, lines)


def test_keys_tell_files_and_bounds_apart(loaded: Loaded, bounded: ImageEncoder) -> None:
    images = images_of(loaded)
    first, again, other = (images.picture(file_of(seed)) for seed in (1, 1, 2))
    assert first.key == again.key != other.key
    assert (first.tokens == again.tokens).all()
    assert (first.tokens < -1).all()
    assert bounded.picture(file_of(1, 512, 416)).key != images.picture(file_of(1, 512, 416)).key
    before, after = images.around
    special = loaded.tokenizer.special_tokens()
    assert before.tolist() == [special["<|vision_start|>"]]
    assert after.tolist() == [special["<|vision_end|>"]]


def test_rows_are_the_same_again_and_those_of_this_file(loaded: Loaded) -> None:
    images = images_of(loaded)
    first = images.picture(file_of(101))
    other = images.picture(file_of(102))
    assert images.encode(first)
    assert not images.encode(first), "they are known"
    rows = images.encoded_rows(first, 0, first.n_tokens)
    assert rows.shape == (first.n_tokens, loaded.info.n_embd)
    images.rows = ImageRows()
    assert np.array_equal(images.encoded_rows(first, 0, first.n_tokens), rows)
    assert np.array_equal(images.encoded_rows(first, 2, 5), rows[2:5])
    assert not np.array_equal(images.encoded_rows(other, 0, other.n_tokens), rows)


def test_a_file_is_decoded_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_of(loaded)
    picture = images.picture(file_of(105))
    images.encode(picture)

    monkeypatch.setattr(images, "_decoded", Mock(side_effect=AssertionError("decoded again")))
    assert images.picture(file_of(105)).key == picture.key
    assert not images.encode(picture)
    with pytest.raises(AssertionError, match="decoded again"):
        images.picture(file_of(106))


def test_nobody_waits_for_a_file_that_another_thread_decodes(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread decodes a slow file, others get known pictures and encode: one client's
    image does not hold up the engine.
    """
    images = images_of(loaded)
    known = images.picture(file_of(107))
    ready = images.picture(file_of(108))
    decoded = images._decoded
    began = threading.Event()
    go_on = threading.Event()

    def slow(picture: ImageSpan) -> object:
        began.set()
        assert go_on.wait(30)
        return decoded(picture)

    monkeypatch.setattr(images, "_decoded", slow)
    thread = threading.Thread(target=images.picture, args=(file_of(109),))
    thread.start()
    assert began.wait(30)
    assert images.picture(file_of(107)).key == known.key
    assert images.encode(ready), "its pixels are there"
    assert images.n_bytes > 0
    go_on.set()
    thread.join()


def test_a_release_that_cannot_keep_files_from_ffmpeg_opens_none(
    model: ModelSettings, tiny_mmproj: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mtmd_cpp, "mtmd_helper_init_opt_default")
    with pytest.raises(ModelError, match="images need llama-cpp-python"):
        load(model, vision=VisionSettings(str(tiny_mmproj)))


def test_while_the_model_is_freed_sizes_are_known(model: ModelSettings, tiny_mmproj: Path) -> None:
    found = load(model, vision=VisionSettings(str(tiny_mmproj)))
    images = images_of(found)
    picture = images.picture(file_of(3))
    rows = images.encoded_rows(picture, 0, picture.n_tokens)
    found.backend.unload()
    asleep = images.picture(file_of(4))
    assert asleep.n_tokens == picture.n_tokens
    found.backend.load()
    assert images.encode(asleep)
    images.rows = ImageRows()
    assert np.array_equal(images.encoded_rows(picture, 0, picture.n_tokens), rows)
    found.backend.unload()


def test_what_does_not_decode_is_refused_whoever_asks(loaded: Loaded) -> None:
    images = images_of(loaded)
    data = bytearray(image_bytes(320, 200, "jpeg", seed=9))
    data[2:300] = bytes(298)  # no tables
    broken = replace(file_of(1), data=bytes(data), kind="jpeg", width=320, height=200)
    with pytest.raises(RequestError, match="JPEG image is broken"):
        images.picture(broken)
    with pytest.raises(RequestError, match="JPEG image is broken"):
        images.encode(ImageSpan(b"k", 10, 6, broken))
    other = ImageFile.parse(image_bytes(64, 64, "png"))
    lying = replace(other, width=640, height=640)
    with pytest.raises(RequestError):
        images.picture(lying)


def webp(*frames: NDArray[np.uint8], mode: str = "RGB") -> ImageFile:
    """Return a file of frames without loss."""
    out = io.BytesIO()
    images = [Image.fromarray(frame).convert(mode) for frame in frames]
    images[0].save(out, "webp", lossless=True, save_all=len(images) > 1, append_images=images[1:])
    return ImageFile.parse(out.getvalue())


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_webp_is_seen_as_the_same_pixels_in_a_bmp(loaded: Loaded, mode: str) -> None:
    """The first frame of an animation is seen, as in a GIF."""
    images = images_of(loaded)
    first, second = (
        np.random.default_rng(seed).integers(0, 256, (70, 100, 3), np.uint8) for seed in (1, 2)
    )
    plain = images.picture(file_of(1))
    expected = images.encoded_rows(plain, 0, plain.n_tokens)
    for file in (webp(first, mode=mode), webp(first, second, mode=mode)):
        picture = images.picture(file)
        assert file.width == 100
        assert file.height == 70
        assert picture.key != plain.key
        assert np.array_equal(images.encoded_rows(picture, 0, picture.n_tokens), expected)
    other = images.picture(webp(second, mode=mode))
    assert not np.array_equal(images.encoded_rows(other, 0, other.n_tokens), expected)


def test_webp_that_does_not_decode(loaded: Loaded) -> None:
    images = images_of(loaded)
    data = image_bytes(320, 200, "webp", seed=9)
    with pytest.raises(RequestError, match="WEBP image is broken"):
        images.picture(
            ImageFile.parse(data[:4] + struct.pack("<I", 992) + data[8:1000])
        )  # a third of its pixels
    with pytest.raises(RequestError, match="not have the size in its header"):
        images.picture(replace(ImageFile.parse(data), width=640))


def test_the_latest_rows_stay_and_the_oldest_go() -> None:
    rows = ImageRows(limit=100)
    for name in (b"a", b"b"):
        rows.put(name, np.zeros((5, 2), np.float32))
    assert rows.n_bytes == 80
    rows.get(b"a")
    rows.put(b"c", np.zeros((5, 2), np.float32))
    assert b"a" in rows
    assert b"b" not in rows
    rows.put(b"d", np.zeros((500, 2), np.float32))
    assert rows.n_bytes == rows.get(b"d").nbytes
    rows.put(b"d", np.zeros((5, 2), np.float32))
    assert rows.n_bytes == 40


def test_files_that_are_no_encoder_are_refused(
    model: ModelSettings, tiny_mmproj: Path, tmp_path: Path
) -> None:
    """Each file or flag that gives no encoder is refused at the start with its own reason."""
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF" + bytes(100))
    text = tmp_path / "text.gguf"
    text.write_bytes(b"hello")
    wide = tmp_path / "wide.gguf"
    write_encoder(wide, replace(VISION_SHAPES["tiny-vision"], projection=32))
    for path, message in (
        (tmp_path / "none.gguf", "cannot read the vision encoder"),
        (text, "is not a GGUF file"),
        (junk, "cannot read the metadata of"),
        (Path(model.path), "is not a vision encoder"),
        (wide, "cannot load the vision encoder"),
    ):
        with pytest.raises(ModelError, match=message):
            load(model, vision=VisionSettings(str(path)))
    with pytest.raises(ModelError, match="no device GPU7"):
        load(model, vision=VisionSettings(str(tiny_mmproj), mmproj_device="GPU7"))
    with pytest.raises(ModelError, match="--kv-pool excludes --mmproj"):
        load(
            replace(model, n_ctx=1024),
            vision=VisionSettings(str(tiny_mmproj)),
            pool=PoolSettings(512),
        )


def test_a_model_without_an_encoder_sees_nothing(model: ModelSettings) -> None:
    found = load(model)
    assert found.images is None
    assert not found.info.vision
    with pytest.raises(NotSupportedError, match="without a vision encoder"):
        found.backend.encode(ImageSpan(b"k", 1, 1, file_of(1)))
    found.backend.unload()


def test_the_plan_counts_the_encoder(model: ModelSettings, tiny_mmproj: Path) -> None:
    resolved = Resolved.from_settings(model)
    place, n_bytes = make_encoder(resolved, VisionSettings(str(tiny_mmproj))).usage
    assert place == ""
    assert n_bytes > tiny_mmproj.stat().st_size // 2
    few = make_encoder(resolved, VisionSettings(str(tiny_mmproj), image_max_tokens=64)).usage[1]
    assert few < n_bytes
    with dry_run(resolved) as without, dry_run(resolved, (place, n_bytes)) as run:
        plan, plain = run.plan(512), without.plan(512)
    assert plan.host.usage.vision == n_bytes
    assert plan.host.usage.total == plain.host.usage.total + n_bytes
    assert any("vision encoder" in line for line in plan.lines())
    assert not any("vision encoder" in line for line in plain.lines())
    assert fit_all(resolved, vision=(place, n_bytes)).memory.host.usage.vision == n_bytes


def test_the_plan_counts_what_attention_needs_otherwise(
    model: ModelSettings, tiny_mmproj: Path
) -> None:
    """Without flash attention every patch has a number for each other one in each head."""
    vision = VisionSettings(str(tiny_mmproj), image_max_tokens=512)
    usual, without = (
        make_encoder(Resolved.from_settings(replace(model, flash_attn=mode)), vision).usage[1]
        for mode in ("auto", "off")
    )
    assert without - usual == VISION_SHAPES["tiny-vision"].num_heads * 4 * (4 * 512) ** 2


def encode_on_the_last_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyctl.llama.images.make_encoder._choose_device", lambda *_: devices()[-1])


def test_the_largest_image_is_encoded_at_the_start(
    model: ModelSettings,
    tiny_mmproj: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The largest image is encoded on the encoder's own device at the start, so that a full one is
    found there and not in the middle of a prompt.
    """
    vision = VisionSettings(str(tiny_mmproj), image_max_tokens=64)
    encode_on_the_last_device(monkeypatch)
    with patch.object(
        ImageEncoder, "_encode", autospec=True, side_effect=ImageEncoder._encode
    ) as encoded:
        load(model, vision=vision).backend.unload()
    assert [each.args[2:] for each in encoded.call_args_list] == [(8, 8)]
    assert not caplog.records
    monkeypatch.setattr("pyctl.llama.images.image_encoder.mtmd.mtmd_encode_chunk", lambda *_: 1)
    with pytest.raises(
        ModelError, match=r"an image of 64 tokens does not fit with the model.*--image-max-tokens"
    ):
        load(model, vision=vision)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.integers(0, 2), max_size=12))
def test_no_graph_is_replaced_by_one_of_another_size(sizes: list[int]) -> None:
    """The rule of llama.cpp: twice in a row captures, until something else comes; a second capture
    replaces the first.

    Behind something small in between, nothing is captured; with one size all the time that is never
    needed.
    """
    graphs = _Graphs()
    warm = False
    captured = False
    last = (0, 0)
    n_between = 0

    def encode(grid: tuple[int, int]) -> None:
        nonlocal warm, captured, last
        if grid == last and not warm:
            assert not captured, "replaced"
            captured = True
        warm = grid == last
        last = grid

    for grid in [(10 + size, 10) for size in sizes]:
        if graphs.would_replace(grid):
            graphs.encoded((3, 3))
            encode((3, 3))
            n_between += 1
        graphs.encoded(grid)
        encode(grid)
    assert n_between == 0 or len(set(sizes)) > 1


def test_images_of_several_sizes_one_after_another(
    model: ModelSettings, loaded: Loaded, tiny_mmproj: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small image on a GPU is encoded between two of a size for which a graph was captured, and
    all have the right rows.
    """
    encode_on_the_last_device(monkeypatch)
    found = load(model, vision=VisionSettings(str(tiny_mmproj), image_max_tokens=64))
    images = images_of(found)
    grids = []
    code_of = mtmd_cpp.mtmd_encode_chunk

    def watched(ctx: object, chunk: object) -> int:
        image = mtmd_cpp.mtmd_input_chunk_get_tokens_image(chunk)
        grids.append(
            (mtmd_cpp.mtmd_image_tokens_get_nx(image), mtmd_cpp.mtmd_image_tokens_get_ny(image))
        )
        return int(code_of(ctx, chunk))

    monkeypatch.setattr("pyctl.llama.images.image_encoder.mtmd.mtmd_encode_chunk", watched)
    files = [
        file_of(seed, *size)
        for seed, size in enumerate([(100, 70)] * 3 + [(128, 128)] * 2 + [(100, 70)] * 2)
    ]
    pictures = [images.picture(file) for file in files]
    rows = [images.encoded_rows(picture, 0, picture.n_tokens) for picture in pictures]
    a = (4, 3)
    b = (4, 4)
    small = (3, 3)
    found.backend.unload()
    assert images.n_encoded == 7
    assert grids == [a, a, a, b, small, b, a, small, a]
    plain = images_of(loaded)
    for file, made in zip(files, rows, strict=True):
        picture = plain.picture(file)
        assert np.array_equal(plain.encoded_rows(picture, 0, picture.n_tokens), made)
