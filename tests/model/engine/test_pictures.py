"""Images in prompts, on tiny models: encoded once, cached like text, and bit-identical to a cold
run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.draft.ngram import ngram_sources
from pyctl.engine.draft.ngram_settings import NgramSettings
from pyctl.engine.draft.source import DraftJob, Match
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, RequestError
from pyctl.files.image_file import ImageFile
from pyctl.llama.images.image_encoder import ImageEncoder, ImageRows
from pyctl.llama.loader import Loaded
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.vision_settings import VisionSettings
from pyctl.prompt import ImageSpan, Prompt, as_tokens
from tests.pictures import image_bytes
from tests.unit.engine.drive import Reply, ask, cold, collect, empty, request, run_all, tier_on

EXACT = EngineSettings(exact=True)
HEAD = (
    "<|im_start|>system\nYou look at pictures and say what you see in them, at length.<|im_end|>\n"
)
USER = "<|im_start|>user\n"
REPLY = "<|im_start|>assistant\n"
END = "<|im_end|>\n"
LAYOUTS = [(name, kv) for name in ("tiny-hybrid", "tiny-moe") for kv in ("f16", "q8_0")]

Open = Callable[..., Loaded]


@pytest.fixture
def opened(open_model: Open, model_path: Callable[[str], Path], tiny_mmproj: Path) -> Open:
    def get(
        name: str = "tiny-hybrid", kv: str = "f16", types: tuple[str, ...] = (), draft: str = ""
    ) -> Loaded:
        path = str(model_path(draft)) if draft else ""
        drafts = DraftSettings(draft_types=types, draft_path=path)
        vision = VisionSettings(str(tiny_mmproj))
        kinds = {"type_k": kv, "type_v": kv}
        loaded = open_model(
            name, n_ctx=2048, n_ubatch=128, n_batch=128, drafts=drafts, vision=vision, **kinds
        )
        encoder_of(loaded).rows = ImageRows()
        return loaded

    return get


def encoder_of(loaded: Loaded) -> ImageEncoder:
    assert loaded.images is not None
    return loaded.images


def picture_file(
    width: int = 512, height: int = 416, seed: int = 0, kind: str = "bmp"
) -> ImageFile:
    return ImageFile.parse(image_bytes(width, height, kind, seed=seed))


A = picture_file(seed=1)
B = picture_file(seed=2)
C = picture_file(160, 96, seed=3)


def prompt_of(loaded: Loaded, *parts: str | ImageFile) -> Prompt:
    """Return text with images in it, and the boundaries of messages."""
    images = encoder_of(loaded)
    ids = []
    pictures: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, str):
            ids += loaded.tokenizer.tokenize(part)
            continue
        seen = images.picture(part)
        before, behind = images.around
        ids += before.tolist()
        pictures.append(ImageSpan(seen.key, seen.columns, seen.lines, part, len(ids)))
        ids += [*seen.tokens.tolist(), *behind.tolist()]
    tokens = as_tokens(ids)
    starts = loaded.tokenizer.special_tokens()["<|im_start|>"]
    return Prompt(
        tokens,
        tuple(int(i) for i in np.flatnonzero(tokens == starts) if i),
        pictures=tuple(pictures),
    )


def conversations(loaded: Loaded) -> dict[str, Prompt]:
    """Return prompts by title that share an image, a size, or text with one another."""
    answered = [f"What is in this picture?{END}{REPLY}A tree.{END}{USER}", C]
    return {
        "A, a question": prompt_of(loaded, HEAD + USER, A, f"What is in this picture?{END}{REPLY}"),
        "A, another question": prompt_of(
            loaded, HEAD + USER, A, f"Which colours does the picture have?{END}{REPLY}"
        ),
        "B of the same size": prompt_of(
            loaded, HEAD + USER, B, f"What is in this picture?{END}{REPLY}"
        ),
        "A, answered, then C": prompt_of(
            loaded, HEAD + USER, A, *answered, f"And in this one?{END}{REPLY}"
        ),
        "the same, another end": prompt_of(
            loaded, HEAD + USER, A, *answered, f"And here? One word.{END}{REPLY}"
        ),
        "other text before A": prompt_of(
            loaded, HEAD + USER + "Look: ", A, f"What is in this picture?{END}{REPLY}"
        ),
    }


def assert_same(warm: Reply, cold: Reply) -> None:
    assert warm.error is None
    assert warm.done is not None
    assert warm.tokens == cold.tokens


@pytest.mark.parametrize(("name", "kv"), LAYOUTS)
def test_what_is_restored_is_what_a_cold_run_says(
    opened: Open, tmp_path: Path, name: str, kv: str
) -> None:
    """A conversation resumed from the live sequence, from RAM, or from disk after a restart has the
    tokens and the logits' bits of a cold run.
    """
    reference = opened(name, kv)
    expected = {}
    for title, prompt in conversations(reference).items():
        reply = cold(reference.backend, prompt, 12, EXACT)
        expected[title] = reply, reference.backend.logits(0)

    def run(loaded: Loaded) -> dict[str, tuple[int, int]]:
        tier = tier_on(tmp_path / "kv", "pictures", min_tokens=32)
        engine = Engine(loaded.backend, RamCache(32, None), EXACT, tier)
        found = {}
        for title, prompt in conversations(loaded).items():
            before = encoder_of(loaded).n_encoded
            reply = ask(engine, prompt, 12)
            assert_same(reply, expected[title][0])
            assert (loaded.backend.logits(0) == expected[title][1]).all(), title
            assert reply.done is not None
            found[title] = reply.done.stats.n_cached, encoder_of(loaded).n_encoded - before
        assert engine.prefix_cache.close()
        return found

    found = run(opened(name, kv))
    picture = conversations(reference)["A, a question"].pictures[0]
    assert found["A, a question"] == (0, 1)
    assert found["A, another question"][0] >= picture.end
    assert found["A, another question"][1] == 0
    assert found["B of the same size"][0] < picture.start + 1
    assert found["B of the same size"][1] == 1
    assert found["A, answered, then C"][0] >= picture.end
    assert found["A, answered, then C"][1] == 1, "C alone"
    assert found["the same, another end"][1] == 0
    assert found["other text before A"][0] < picture.start
    assert found["other text before A"][1] == 0, "its rows are known"
    again = run(opened(name, kv))
    assert all(n_cached > picture.end - 20 for n_cached, _ in again.values()), again
    assert sum(n_encoded for _, n_encoded in again.values()) == 0, "no image was looked at again"


def test_a_cancelled_prefill_goes_on_and_leaves_no_half_image(opened: Open) -> None:
    """Stopped between two batches of an image: the live sequence goes on, and nothing resumes
    inside.
    """
    loaded = opened()
    backend = loaded.backend
    first, second = (
        prompt_of(loaded, HEAD + USER, file, f"What is it?{END}{REPLY}") for file in (A, B)
    )
    expected = [cold(backend, prompt, 8, EXACT) for prompt in (first, second)]
    for n_steps in range(2, 7):
        encoder_of(loaded).rows = ImageRows()
        empty(backend)
        engine = Engine(backend, RamCache(32, None), EXACT)
        ask(engine, first, 8, cancel_after=n_steps)
        assert not any(
            first.is_inside(snapshot.n) for snapshot in engine.prefix_cache.cache.snapshots()
        )
        assert_same(ask(engine, first, 8), expected[0])
        ask(engine, second, 8, cancel_after=n_steps)
        assert_same(ask(engine, first, 8), expected[0])
        assert_same(ask(engine, second, 8), expected[1])


def test_a_failing_encoder_leaves_the_cache_as_it_was(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that fails costs its own request only: earlier snapshots stay, and the same prompt
    gets the cold reply afterwards.
    """
    loaded = opened()
    engine = Engine(loaded.backend, RamCache(32, None), EXACT)
    text = prompt_of(loaded, HEAD + USER + f"Hello{END}{REPLY}")
    ask(engine, text)
    before = {snapshot.prefix for snapshot in engine.prefix_cache.cache.snapshots()}

    prompt = prompt_of(loaded, HEAD + USER, B, f"What is it?{END}{REPLY}")
    with monkeypatch.context() as patch:
        patch.setattr(
            encoder_of(loaded), "_encode", Mock(side_effect=EngineError("the encoder fails"))
        )
        reply = ask(engine, prompt)
    assert isinstance(reply.error, EngineError)
    assert before <= {snapshot.prefix for snapshot in engine.prefix_cache.cache.snapshots()}
    assert_same(ask(engine, prompt, 8), cold(loaded.backend, prompt, 8, EXACT))


def test_a_file_that_cannot_be_decoded_is_refused_at_once(opened: Open) -> None:
    """Its header is valid, its pixels are damaged."""
    images = encoder_of(opened())
    data = bytearray(image_bytes(320, 200, seed=9))
    at = data.index(b"IDAT") + 6
    data[at : at + 100] = b"\xff" * 100
    with pytest.raises(RequestError, match="the PNG image is broken"):
        images.picture(ImageFile.parse(bytes(data)))
    data = bytearray(image_bytes(320, 200, "webp", seed=9)[:3000])
    data[4:8] = (len(data) - 8).to_bytes(4, "little")
    with pytest.raises(RequestError, match="the WEBP image is broken"):
        images.picture(ImageFile.parse(bytes(data)))


def test_two_conversations_share_the_cells(opened: Open) -> None:
    """Both want more than there is: one waits for the other, with its image, and says what it says
    alone.
    """
    loaded = opened()
    backend = loaded.backend
    prompts = [
        prompt_of(loaded, HEAD + USER, file, "x" * 400 + f"What is it?{END}{REPLY}")
        for file in (A, B)
    ]
    expected = [cold(backend, prompt, 8).tokens for prompt in prompts]
    engine = Engine(backend, RamCache(32, None), EngineSettings())
    handles = [RequestHandle(request(prompt, 8)) for prompt in prompts]
    run_all(engine, *handles)
    assert [collect(handle).tokens for handle in handles] == expected


@pytest.mark.parametrize("type", ["", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"])
def test_drafts_pause_inside_an_image_and_go_on_behind(opened: Open, type: str) -> None:
    """Exact drafts change no token, and n-grams of a prompt with an image never propose what stands
    for it.
    """
    kind = type.removeprefix("draft-")
    types = ("ngram-mod", type) if type else ("ngram-mod",)
    loaded = opened(
        "tiny-hybrid-nextn", "f16", types, f"tiny-hybrid-{kind}" if kind not in ("", "mtp") else ""
    )
    backend = loaded.backend
    assert backend.facts.draft_type == type
    repeated = "one two three four five six seven eight nine ten " * 4
    prompt = prompt_of(
        loaded, HEAD + USER + repeated, A, repeated, C, f"{repeated}{END}{REPLY}{repeated}"
    )
    plain = cold(backend, prompt, 24, EXACT if type else None)
    sources = ngram_sources(("ngram-mod",), NgramSettings())
    model = ModelDrafts(backend, 3) if backend.facts.draft_type else None
    engine = Engine(
        backend, RamCache(32, None), EngineSettings(), speculation=Speculation(sources, model)
    )
    reply = ask(engine, prompt, 24)
    assert reply.error is None
    assert len(reply.tokens) == len(plain.tokens)
    again = ask(engine, prompt, 24)
    assert again.error is None
    assert again.done is not None
    assert again.done.stats.n_cached > prompt.pictures[-1].end


@pytest.mark.parametrize("kind", ["ngram-simple", "ngram-map-k", "ngram-mod"])
def test_what_stands_for_an_image_is_no_draft(opened: Open, kind: str) -> None:
    """The model says again what stands before the image, so that n-grams find what follows
    there.
    """
    loaded = opened("tiny-hybrid-nextn", "f16", ("ngram-mod",))
    begin = loaded.tokenizer.special_tokens()["<|vision_start|>"]
    said = Sampling(temperature=0.0, logit_bias=((begin, 1e4),))
    prompt = prompt_of(loaded, HEAD + USER, A, f"What is it?{END}{REPLY}")
    small = NgramSettings(1, 2, 1, 2, mod_match=1, mod_max=4)
    sources = ngram_sources((kind,), small)
    proposed: list[tuple[int, ...]] = []
    find = sources[0].match

    def match(job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        found = find(job, draft)
        proposed.append(found.read(4))
        return found

    sources[0].match = match  # type: ignore[method-assign]
    speculation = Speculation(sources)
    reply = ask(
        Engine(loaded.backend, RamCache(32, None), EngineSettings(), speculation=speculation),
        prompt,
        12,
        sampling=said,
    )
    assert reply.error is None
    assert reply.tokens == [begin] * 12
    assert any(token < 0 for draft in proposed for token in draft), "what is tested did not happen"
