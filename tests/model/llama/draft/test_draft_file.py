from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.draft.draft_file import with_inferred_type
from pyctl.llama.library import extension
from pyctl.llama.library.library_log import log_callback, redirect_log
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.settings.draft_settings import AUTOMATIC, FEATURE_TYPES, MODEL_TYPES, DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens
from tools.generator import SHAPES, TINY_DENSE, TINY_HYBRID, Shape, Vocab, byte_vocab, write_model

READERS = {
    "tiny-hybrid-eagle3": "draft-eagle3",
    "tiny-hybrid-dflash": "draft-dflash",
    "tiny-hybrid-dflash2": "draft-dflash",
    "tiny-hybrid-dspark": "draft-dspark",
    "tiny-hybrid-dflash-window": "draft-dflash",
}
"""Files that read layers of their target, and their types."""


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("tiny-dense", "draft-simple"),
        ("tiny-hybrid-nextn", "draft-mtp"),
        ("tiny-hybrid-head", "draft-mtp"),
        *READERS.items(),
    ],
)
def test_a_draft_file_says_what_it_is_for(
    model_path: Callable[[str], Path], shape: str, expected: str
) -> None:
    """The type of a draft file follows from its metadata; a contradicting --spec-type is refused,
    since such a file would load and draft nonsense.
    """
    path = str(model_path(shape))
    assert with_inferred_type(DraftSettings(draft_path=path)).draft_types == (expected,)
    told = DraftSettings(("ngram-mod", "draft-simple", "ngram-mod"), draft_path=path)
    if expected not in FEATURE_TYPES:
        assert with_inferred_type(told).draft_types == ("ngram-mod", "draft-simple")
        return
    for wrong in ({*MODEL_TYPES} - {expected}, {"draft-simple"}):
        with pytest.raises(
            ModelError, match=f"is a file for --spec-type {expected}, not for draft-"
        ):
            with_inferred_type(replace(told, draft_types=tuple(wrong)))
    assert with_inferred_type(replace(told, draft_types=MODEL_TYPES)).draft_types == (expected,)
    assert with_inferred_type(replace(told, draft_types=("cache",))).draft_types == (
        "cache",
        expected,
    )


@pytest.mark.parametrize(
    ("shape", "fields", "maximum"),
    [
        ("tiny-hybrid-eagle3", {}, 99),
        ("tiny-hybrid-dflash", {}, 7),
        ("tiny-hybrid-dflash2", {}, 7),
        ("tiny-hybrid-dspark", {}, 8),
        ("tiny-hybrid-dspark", {"anchored": False}, 7),
        ("tiny-hybrid-dflash", {"block": 4}, 3),
    ],
)
def test_drafts_are_no_longer_than_the_block(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    shape: str,
    fields: dict[str, Any],
    maximum: int,
) -> None:
    """A block model cannot draft beyond its block, so longer requests are cut, with a warning only
    where something was cut.
    """
    path = tmp_path / "draft.gguf"
    write_model(path, replace(SHAPES[shape], **fields))
    for n, n_min in ((99, 50), (maximum, 0), (2, 1)):
        caplog.clear()
        found = with_inferred_type(
            DraftSettings(draft_path=str(path), n_draft=n, n_draft_min=n_min)
        )
        assert found.n_draft == min(n, maximum)
        assert found.n_draft_min == min(n_min, maximum)
        told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        warning = f"{path} drafts at most {maximum} tokens at a time, not {n} (--spec-draft-n-max)"
        assert told == [warning] * (n > maximum)


def test_a_separate_model_drafts_without_the_module_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model_path: Callable[[str], Path],
) -> None:
    """Without the extension's module a separate model still drafts; each of the other kinds turns
    off with one line in the log.
    """
    monkeypatch.setattr(extension, "drafts", None)
    dense = str(model_path("tiny-draft"))
    head = str(model_path("tiny-hybrid-head"))
    for types in ((), ("draft-simple",), ("cache",)):
        assert with_inferred_type(DraftSettings(types, draft_path=dense)).draft_path == dense
    assert not caplog.records
    for others in (
        DraftSettings((), draft_path=head),
        DraftSettings(("draft-mtp",), draft_path=dense),
        DraftSettings(("draft-mtp",)),
    ):
        assert with_inferred_type(others) == replace(others, draft_types=(), draft_path="")
    assert [record.message for record in caplog.records] == [
        "draft model disabled: it requires the extension"
    ] * 3
    assert with_inferred_type(DraftSettings(AUTOMATIC)).draft_types == ()


def test_without_a_file_nothing_is_inferred() -> None:
    assert with_inferred_type(DraftSettings()) == DraftSettings()
    assert with_inferred_type(DraftSettings(("draft-mtp",))).draft_types == ("draft-mtp",)


def test_draft_model_without_file_is_a_logged_error(caplog: pytest.LogCaptureFixture) -> None:
    types = ("draft-simple", *FEATURE_TYPES)
    assert with_inferred_type(DraftSettings((*types, "cache"))).draft_types == ("cache",)
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.ERROR, f"--spec-type {name} disabled: it requires --model-draft") for name in types
    ]


def test_a_draft_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    redirect_log()
    (tmp_path / "a.gguf").write_text("no")
    (tmp_path / "b.gguf").write_bytes(b"GGUF\xff\xff\x00\x00")
    for name, reason in (
        ("a.gguf", "a.gguf is not a GGUF file"),
        ("b.gguf", "cannot read the metadata of .*b.gguf: .*version"),
        ("missing.gguf", "cannot read the draft model .*missing.gguf: No such file or directory"),
    ):
        log_callback(4, b"what failed before is not the cause", None)
        with pytest.raises(ModelError, match=reason):
            with_inferred_type(DraftSettings(draft_path=str(tmp_path / name)))


Open = Callable[..., LlamaBackend]


@pytest.fixture
def opened(model_path: Callable[[str], Path]) -> Iterator[Open]:
    """opened("tiny-hybrid-nextn", "tiny-draft", ("draft-simple",)) -> a backend that drafts with
    the second file.
    """
    backends: list[LlamaBackend] = []

    def get(
        name: str, draft: str | Path, types: tuple[str, ...] = (), **fields: object
    ) -> LlamaBackend:
        path = str(model_path(draft) if isinstance(draft, str) else draft)
        settings = ModelSettings(
            path=str(model_path(name)), n_ctx=1024, n_ubatch=64, n_threads=1, n_seqs=2
        )
        backends.append(
            load(settings, drafts=DraftSettings(types, draft_path=path, **fields)).backend
        )
        return backends[-1]

    yield get
    for backend in backends:
        backend.unload()


TEXT = [ord(char) - 33 for char in "onceuponatimetherewasasea" * 6]


def drafts_along(backend: LlamaBackend, n: int = 20) -> list[tuple[int, ...]]:
    """Drafts at each step of a greedy reply, of which every other one is verified; checks that they
    change no token.
    """
    backend.memory.clear(0)
    for first in range(0, len(TEXT), 50):
        backend.evaluate(0, as_tokens(TEXT[first : first + 50]), first)
    token = int(backend.logits(0).argmax())
    position = len(TEXT)
    found = []
    for step in range(n):
        draft = backend.draft([SequenceTokens(0, (token,), position)], 3)[0]
        found.append(draft)
        verified = draft if step % 2 else ()
        backend.decode([SequenceTokens(0, (token, *verified), position)])
        for output in range(len(verified) + 1):
            token = int(backend.logits(output).argmax())
            position = position + 1
            if output < len(verified) and token != verified[output]:
                break
        assert backend.memory.rollback(0, position) == position
    return found


@pytest.mark.parametrize(
    ("draft", "type", "n_max"),
    [
        ("tiny-draft", "draft-simple", 3),
        ("tiny-hybrid-draft", "draft-simple", 3),
        ("tiny-hybrid-head", "draft-mtp", 3),
        *((name, type, 3) for name, type in READERS.items()),
    ],
)
def test_a_file_of_its_own_drafts(opened: Open, draft: str, type: str, n_max: int) -> None:
    backend = opened("tiny-hybrid-nextn", draft)
    assert backend.facts.draft_type == type
    found = drafts_along(backend)
    assert {len(each) for each in found} == {n_max}
    assert len(set(found)) > 10
    backend.unload()
    backend.load()
    assert drafts_along(backend) == found, "and again after the model has slept"


def test_a_file_of_fewer_tokens_drafts_these_alone(opened: Open, tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny-hybrid-eagle3"], has_trunk=False, draft_vocab=120)
    write_model(tmp_path / "draft.gguf", shape)
    found = drafts_along(opened("tiny-hybrid-nextn", tmp_path / "draft.gguf"))
    proposed = {token * shape.vocab_size // shape.draft_vocab for token in range(shape.draft_vocab)}
    assert {len(each) for each in found} == {3}
    assert {token for each in found for token in each} <= proposed


def test_a_head_in_a_file_of_its_own_drafts_as_the_one_inside(
    opened: Open, model_path: Callable[[str], Path]
) -> None:
    settings = ModelSettings(
        path=str(model_path("tiny-hybrid-nextn")), n_ctx=1024, n_ubatch=64, n_threads=1, n_seqs=2
    )
    inside = load(settings, drafts=DraftSettings(("draft-mtp",))).backend
    expected = drafts_along(inside)
    inside.unload()
    for draft in ("tiny-hybrid-head", "tiny-hybrid-nextn"):
        assert drafts_along(opened("tiny-hybrid-nextn", draft, ("draft-mtp",))) == expected


def test_drafts_are_shorter_where_they_are_unsure(opened: Open) -> None:
    for draft in ("tiny-draft", "tiny-hybrid-head", *READERS):
        lengths = {
            len(each) for each in drafts_along(opened("tiny-hybrid-nextn", draft, draft_p_min=0.7))
        }
        assert lengths == {0, 1, 2, 3} or (draft in READERS and 1 < len(lengths) <= 4)


def test_rows_of_another_file_are_nothing(opened: Open) -> None:
    first, same, other = (
        opened("tiny-hybrid-nextn", name)
        for name in ("tiny-hybrid-draft", "tiny-hybrid-draft", "tiny-draft")
    )
    tokens = as_tokens(TEXT[:60])
    first.evaluate(0, tokens, 0)
    first.memory.synchronize()
    rows = first.memory.save_rows(0, 0, 60)
    state = first.memory.save_state(0, 60)
    first.memory.synchronize()
    assert rows.draft.size == first.memory.shape.sizes.draft_rows(0, 60) > 0
    assert state.draft.size == first.memory.shape.sizes.draft_state > 0
    for backend, is_known in ((same, True), (other, False)):
        backend.memory.restore(0, 0, [(rows, 0, 60)], state)
        items = [SequenceTokens(0, (80,), 60)]
        assert (backend.draft(items, 3) == first.draft(items, 3)) == is_known


def test_another_vocabulary_is_an_error_in_the_log_and_no_drafts(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft model with other texts of tokens drafts nothing and the log names the first
    difference; a few unused tokens, or another text of the first one, do no harm.
    """
    vocab = byte_vocab()
    shapes: list[tuple[Shape, Vocab, str]] = [
        (
            TINY_DENSE,
            replace(vocab, tokens=(*vocab.tokens[:70], "zz", *vocab.tokens[71:])),
            "its token 70 is 'zz', not",
        ),
        (replace(TINY_DENSE, vocab_size=282 + 129), vocab, "it has 411 tokens, not 282"),
    ]
    for i, (shape, other, reason) in enumerate(shapes):
        write_model(tmp_path / f"{i}.gguf", shape, vocab=other)
        caplog.clear()
        backend = opened("tiny-hybrid-nextn", tmp_path / f"{i}.gguf")
        assert backend.facts.draft_type == ""
        (error,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert error.startswith(f"draft model {tmp_path / f'{i}.gguf'} disabled: {reason}")
        assert backend.draft([SequenceTokens(0, (80,), 0)], 3) == [()]
    # A few tokens more are none that it could draft.
    write_model(tmp_path / "more.gguf", replace(TINY_DENSE, vocab_size=282 + 128))
    assert opened("tiny-hybrid-nextn", tmp_path / "more.gguf").facts.draft_type == "draft-simple"
    write_model(
        tmp_path / "begin.gguf", TINY_DENSE, vocab=replace(vocab, tokens=("zz", *vocab.tokens[1:]))
    )
    assert opened("tiny-hybrid-nextn", tmp_path / "begin.gguf").facts.draft_type == "draft-simple"


def test_a_file_that_is_no_head_for_this_model_is_refused(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no head for --spec-type draft-mtp"):
        opened("tiny-hybrid-nextn", "tiny-draft", ("draft-mtp",))
    write_model(tmp_path / "wide.gguf", replace(TINY_HYBRID, embedding=128).only_nextn())
    with pytest.raises(ModelError, match="128 wide, not 64"):
        opened("tiny-hybrid-nextn", tmp_path / "wide.gguf")


def test_of_two_draft_models_the_one_of_the_file_is_left(
    model_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    both = ("draft-mtp", "draft-simple", "cache")
    for shape, expected in (("tiny-draft", "draft-simple"), ("tiny-hybrid-head", "draft-mtp")):
        settings = DraftSettings(both, draft_path=str(model_path(shape)))
        assert with_inferred_type(settings).draft_types == ("cache", expected)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
