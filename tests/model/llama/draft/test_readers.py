"""Draft models that read rows of their target: EAGLE-3, DFlash and DSpark."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as api
from llama_cpp import llama_cpp_ext as ext
from numpy.typing import NDArray

from pyctl.engine.backend import SequenceTokens
from pyctl.llama.draft.draft_mirror import LayerRows
from pyctl.llama.draft.mtp import Eagle3
from pyctl.llama.library.batch import RowBatch
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.prompt import as_tokens
from tests.model.llama.draft.drafting import (
    KINDS,
    UBATCH,
    greedy_reply,
    head_of,
    prefill,
    prompt,
)
from tools.generator import SHAPES


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_bit_of_a_logit_and_some_are_right(
    open_reader: Callable[..., LlamaBackend], kind: str, as_on_gpu: bool
) -> None:
    backend = open_reader(kind, as_on_gpu=as_on_gpu)
    tokens = prompt(150)
    wrong = greedy_reply(backend, tokens, 80, lambda reply, end: (1, 2, 3))
    backend.memory.clear(0)
    reply, logits, drafts = greedy_reply(backend, tokens, 80, head_of(backend))
    assert reply == wrong[0]
    assert all(np.array_equal(one, other) for one, other in zip(logits, wrong[1], strict=True))
    assert all(len(draft) == 3 for _, draft in drafts)
    assert len(drafts) < 70, "steps, of 80 tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_depends_on_the_text_alone(
    open_reader: Callable[..., LlamaBackend], kind: str
) -> None:
    """After steps with rejected drafts it is what follows the same text in one prompt, and beside
    other replies.
    """
    backend = open_reader(kind)
    tokens = prompt(70)
    reply, _, drafts = greedy_reply(backend, tokens, 40, head_of(backend))
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
    open_reader: Callable[..., LlamaBackend], as_on_gpu: bool
) -> None:
    """A head drafts from the token after a position and the target's rows at it; nothing stands for
    the first token.
    """
    backend = open_reader("eagle3", as_on_gpu=as_on_gpu)
    head = backend.memory.drafts.model
    assert isinstance(head, Eagle3)
    tokens = prompt(2)
    reply, _, drafts = greedy_reply(backend, tokens, 40, head_of(backend))
    reference = PlainEagle3(backend, head)
    rights = [draft == reference.drafts([*tokens, *reply][: end + 1], 3) for end, draft in drafts]
    api.llama_free(reference.ctx)
    assert len(rights) > 15
    assert sum(rights) >= len(rights) - 1


def test_evaluations_that_fail_cost_only_drafts(
    open_reader: Callable[..., LlamaBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model whose every third evaluation fails changes no token of the reply, and drafts as
    before once it works again.
    """
    for kind in KINDS:
        backend = open_reader(kind)
        tokens = prompt(100)
        expected, _, drafts = greedy_reply(backend, tokens, 20, head_of(backend))
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
        reply, _, others = greedy_reply(backend, tokens, 20, head_of(backend))
        monkeypatch.undo()
        assert reply == expected
        assert others != drafts
        assert next(failing) > 3
        backend.memory.clear(0)
        assert greedy_reply(backend, tokens, 20, head_of(backend))[2] == drafts


# -- refusals
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_for_another_model_is_refused(check_refused: Callable[..., None], kind: str) -> None:
    shape = SHAPES[f"tiny-hybrid-{kind}"]
    layers = shape.target_layers[:-1]
    check_refused(
        replace(shape, target_layers=(*layers, 9)),
        r"draft.gguf reads layers 1, .*9, and this model has 8",
    )
    check_refused(
        replace(shape, target_layers=(*layers, -1)), r"reads layers 1, .*-1, and this model has 8"
    )
    check_refused(
        replace(shape, embedding=128, feed_forward=256),
        "drafts for another model: it is 128 wide, not 64",
    )
    check_refused(
        replace(shape, vocab_size=290), "drafts for another model: it has 290 tokens, not 282"
    )


def test_a_target_whose_layers_llama_cpp_does_not_give_is_refused(
    check_refused: Callable[..., None],
) -> None:
    check_refused(
        SHAPES["tiny-dense-eagle3"],
        "does not give the rows of layer 1 of this model",
        "tiny-deepseek2",
    )
