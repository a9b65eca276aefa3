"""Draft models that read rows of their target: EAGLE-3, DFlash and DSpark."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from llama_cpp import llama_cpp as api
from llama_cpp import llama_cpp_ext as ext
from numpy.typing import NDArray

from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.draft.draft_mirror import LayerRows
from pyctl.llama.draft.mtp import Eagle3, MtpHead
from pyctl.llama.library.batch import RowBatch
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens
from tests.model.llama.draft.test_mtp import LateRows, greedy, head_of, prefill, prompt
from tools.generator import SHAPES, Shape, generate, write_model
from tools.generator.shapes import tensors

MODEL = "tiny-hybrid-nextn"
KINDS = ("eagle3", "dflash", "dflash2", "dspark", "dflash-window")
UBATCH = 64

Draft = Callable[[list[int], int], Sequence[int]]


@pytest.fixture
def opened(
    open_model: Callable[..., Loaded], model_path: Callable[[str], Path]
) -> Callable[..., LlamaBackend]:
    """opened("eagle3", n_draft=3) -> a backend that drafts with a file of this kind, all sequences
    empty.
    """

    def get(kind: str, n_draft: int = 3, *, as_on_gpu: bool = False, **fields: Any) -> LlamaBackend:
        drafts = DraftSettings(
            draft_path=str(model_path(f"tiny-hybrid-{kind}")), n_draft=n_draft, **fields
        )
        backend = open_model(MODEL, drafts=drafts, n_ctx=2048, n_ubatch=UBATCH, n_seqs=3).backend
        if isinstance(head := backend.memory.drafts.model, MtpHead):
            head.n_rows = 1 + n_draft if as_on_gpu else 1
        hidden = backend.memory.drafts.hidden
        real = hidden.real if isinstance(hidden, LateRows) else hidden
        backend.memory.drafts.hidden = LateRows(real) if as_on_gpu else real  # type: ignore[assignment, arg-type]
        return backend

    return get


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_bit_of_a_logit_and_some_are_right(
    opened: Callable[..., LlamaBackend], kind: str, as_on_gpu: bool
) -> None:
    backend = opened(kind, as_on_gpu=as_on_gpu)
    tokens = prompt(150)
    wrong = greedy(backend, tokens, 80, lambda reply, end: (1, 2, 3))
    backend.memory.clear(0)
    reply, logits, drafts = greedy(backend, tokens, 80, head_of(backend))
    assert reply == wrong[0]
    assert all(np.array_equal(one, other) for one, other in zip(logits, wrong[1], strict=True))
    assert all(len(draft) == 3 for _, draft in drafts)
    assert len(drafts) < 70, "steps, of 80 tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_depends_on_the_text_alone(opened: Callable[..., LlamaBackend], kind: str) -> None:
    """After steps with rejected drafts it is what follows the same text in one prompt, and beside
    other replies.
    """
    backend = opened(kind)
    tokens = prompt(70)
    reply, _, drafts = greedy(backend, tokens, 40, head_of(backend))
    text = [*tokens, *reply]
    same = []
    for end, draft in drafts[:12]:
        items = []
        for seq, n in ((1, end), (2, end - 30)):
            backend.memory.clear(seq)
            prefill(backend, text[:n], seq)
            items.append(SequenceTokens(seq, (text[n],), n))
        together = backend.draft(items, 3)
        alone = [backend.draft([item], 3)[0] for item in items]
        same += [
            together[0] == draft,
            *(one == other for one, other in zip(together, alone, strict=True)),
        ]
        assert backend.draft(items[:1], 2) == [alone[0][:2]]
    # Rows that were evaluated in other batches differ in their last digits, which now and then
    # decides.
    assert sum(same) >= 0.9 * len(same)


class PlainEagle3:
    """An EAGLE-3 model by the shortest way: at position p the token after p, and what the target
    made of p.
    """

    def __init__(self, backend: LlamaBackend, head: Eagle3) -> None:
        self.backend = backend
        params = api.llama_context_default_params()
        params.n_ctx = 1024
        params.n_ubatch = 512
        params.n_batch = 512
        params.n_threads = 1
        params.ctx_other = backend.ctx
        self.ctx = api.llama_init_from_model(head._model, params)
        self.layers = head.layers
        self.width = int(api.llama_model_n_embd(head._model))
        ext.llama_set_embeddings_nextn(self.ctx, True, False)

    def nextn(self, n: int) -> NDArray[np.float32]:
        return np.array(
            np.ctypeslib.as_array(ext.llama_get_embeddings_nextn(self.ctx), (n, self.width))
        )

    def drafts(self, tokens: list[int], n: int) -> tuple[int, ...]:
        """After ``tokens``, of which the model has not evaluated the last, which are in its
        sequence 2 otherwise.
        """
        self.backend.memory.clear(2)
        rows = LayerRows(ctypes.cast(self.backend.ctx, ctypes.c_void_p).value or 0, self.layers)
        read = []
        for first in range(0, len(tokens) - 1, UBATCH):
            part = tokens[first : min(first + UBATCH, len(tokens) - 1)]
            self.backend.evaluate(2, as_tokens(part), first)
            read.append(np.array(rows.rows(len(part))))
        given = np.concatenate(read)
        api.llama_memory_clear(api.llama_get_memory(self.ctx), True)
        batch = RowBatch(512, given.shape[1])
        batch.fill_text(0, given, 0)
        assert api.llama_encode(self.ctx, batch.struct) == 0
        hidden = self.nextn(len(given))
        found = []
        start = 0
        while len(found) < n:
            now = [*tokens[1:], *found][start:]
            own = api.llama_batch_init(len(now), 0, 1)
            embd = np.ascontiguousarray(hidden[start:])
            for i, token in enumerate(now):
                own.token[i] = token
                own.pos[i] = start + i
                own.n_seq_id[i] = 1
                own.seq_id[i][0] = 0
                own.logits[i] = 1
            own.n_tokens, own.embd = len(now), embd.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            assert api.llama_decode(self.ctx, own) == 0
            logits = np.ctypeslib.as_array(api.llama_get_logits_ith(self.ctx, len(now) - 1), (282,))
            found.append(int(logits.argmax()))
            hidden = np.concatenate((hidden, self.nextn(len(now))[-1:]))
            own.embd = None
            api.llama_batch_free(own)
            start += len(now)
        return tuple(found)


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["cpu", "gpu"])
def test_eagle3_drafts_what_it_was_trained_to(
    opened: Callable[..., LlamaBackend], as_on_gpu: bool
) -> None:
    """A head drafts from the token after a position and the target's rows at it; nothing stands for
    the first token.
    """
    backend = opened("eagle3", as_on_gpu=as_on_gpu)
    head = backend.memory.drafts.model
    assert isinstance(head, Eagle3)
    tokens = prompt(2)
    reply, _, drafts = greedy(backend, tokens, 40, head_of(backend))
    reference = PlainEagle3(backend, head)
    rights = [draft == reference.drafts([*tokens, *reply][: end + 1], 3) for end, draft in drafts]
    api.llama_free(reference.ctx)
    assert len(rights) > 15
    assert sum(rights) >= len(rights) - 1


def test_block_is_not_drafted_from_rows_lost_in_a_rollback(
    opened: Callable[..., LlamaBackend],
) -> None:
    for kind in KINDS:
        backend = opened(kind)
        prefill(backend, prompt(50))
        drafts = backend.draft([SequenceTokens(0, (70, 71), 50, 2), SequenceTokens(1, (70,), 0)], 3)
        assert drafts[0] == () if kind != "eagle3" else len(drafts[0]) == 3
        assert len(drafts[1]) == 3


def test_evaluations_that_fail_cost_only_drafts(
    opened: Callable[..., LlamaBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model whose every third evaluation fails changes no token of the reply, and drafts as
    before once it works again.
    """
    for kind in KINDS:
        backend = opened(kind)
        tokens = prompt(100)
        expected, _, drafts = greedy(backend, tokens, 20, head_of(backend))
        failing = count()
        for name in ("llama_decode", "llama_encode"):
            real = getattr(api, name)
            trunk = ctypes.cast(backend.ctx, ctypes.c_void_p).value

            def sometimes(
                ctx: Any, batch: Any, real: Any = real, trunk: Any = trunk, failing: Any = failing
            ) -> int:
                is_own = ctypes.cast(ctx, ctypes.c_void_p).value != trunk
                return -2 if is_own and next(failing) % 3 == 0 else int(real(ctx, batch))

            monkeypatch.setattr(api, name, sometimes)
        backend.memory.clear(0)
        reply, _, others = greedy(backend, tokens, 20, head_of(backend))
        monkeypatch.undo()
        assert reply == expected
        assert others != drafts
        assert next(failing) > 3
        backend.memory.clear(0)
        assert greedy(backend, tokens, 20, head_of(backend))[2] == drafts


# -- refusals
# ----------------------------------------------------------------------------------


@pytest.fixture
def refused(model_path: Callable[[str], Path], tmp_path: Path) -> Callable[..., None]:
    """refused(shape, "reads layers 9") -> it is, by this error, beside the model of a name."""

    def check(shape: Shape, reason: str, name: str = MODEL, **fields: Any) -> None:
        path = tmp_path / "draft.gguf"
        write_model(path, shape)
        settings = ModelSettings(
            path=str(model_path(name)), n_ctx=1024, n_ubatch=64, n_threads=1, n_seqs=2
        )
        with pytest.raises(ModelError, match=reason):
            load(settings, drafts=DraftSettings(draft_path=str(path), **fields))

    return check


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_for_another_model_is_refused(refused: Callable[..., None], kind: str) -> None:
    shape = SHAPES[f"tiny-hybrid-{kind}"]
    layers = shape.target_layers[:-1]
    refused(
        replace(shape, target_layers=(*layers, 9)),
        r"draft.gguf reads layers 1, .*9, and this model has 8",
    )
    refused(
        replace(shape, target_layers=(*layers, -1)), r"reads layers 1, .*-1, and this model has 8"
    )
    refused(
        replace(shape, embedding=128, feed_forward=256),
        "drafts for another model: it is 128 wide, not 64",
    )
    refused(replace(shape, vocab_size=290), "drafts for another model: it has 290 tokens, not 282")


def test_a_target_whose_layers_llama_cpp_does_not_give_is_refused(
    refused: Callable[..., None],
) -> None:
    refused(
        SHAPES["tiny-dense-eagle3"],
        "does not give the rows of layer 1 of this model",
        "tiny-deepseek2",
    )


def test_a_block_that_does_not_fit_is_refused(refused: Callable[..., None]) -> None:
    refused(
        replace(SHAPES["tiny-hybrid-dflash"], block=99),
        "--ubatch-size 64 is below a block",
        n_draft=80,
    )


def test_a_block_is_drafted_up_to_its_end(opened: Callable[..., LlamaBackend]) -> None:
    for kind, maximum in (("dflash", 7), ("dflash2", 7), ("dspark", 8)):
        backend = opened(kind, n_draft=99)
        assert backend.facts.n_rollback == maximum
        prefill(backend, prompt(50))
        assert len(backend.draft([SequenceTokens(0, (70,), 50)], 99)[0]) == maximum


@pytest.mark.parametrize(
    ("kind", "lacks", "reason", "fields"),
    [
        ("dflash2", "mask", "names no mask token", {}),
        ("dspark", "block", "does not state the size of its block", {}),
        (
            "dspark",
            "confidence",
            "has no probabilities: it needs --spec-draft-p-min 0",
            {"draft_p_min": 0.5},
        ),
    ],
)
def test_a_file_that_lacks_what_drafting_needs_is_refused(
    refused: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    lacks: str,
    reason: str,
    fields: dict[str, Any],
) -> None:
    """Each missing part of a draft file is refused at the start by its name, before it could draft
    wrong tokens in silence.
    """
    shape = SHAPES[f"tiny-hybrid-{kind}"]
    if lacks == "block":
        add = GGUFWriter.add_uint32

        def add_others(self: GGUFWriter, key: str, value: int) -> None:
            if not key.endswith("block_size"):
                add(self, key, value)

        monkeypatch.setattr(GGUFWriter, "add_uint32", add_others)
    elif lacks == "mask":
        monkeypatch.setattr(GGUFWriter, "add_mask_token_id", lambda self, n: None)
    else:
        monkeypatch.setattr(
            generate, "tensors", lambda s: [each for each in tensors(s) if each.role != "conf_proj"]
        )
    refused(shape, reason, **fields)
