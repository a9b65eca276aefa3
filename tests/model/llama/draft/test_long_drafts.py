"""Drafts longer than the planes, on tiny models: a mark, the rollback to it, and a replay that
verifies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyctl.cache.ram import RamCache
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.draft.ngram import ngram_sources
from pyctl.engine.draft.ngram_settings import NgramSettings
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.sampling import Sampling
from pyctl.errors import StateError
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import Prompt, as_tokens
from tests.unit.engine.draft.guesses import Continuing
from tests.unit.engine.drive import ask
from tests.unit.engine.single_precision import F32_ROWS

N = 90
Q8_0 = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}
MODELS = {
    "hybrid": ("tiny-hybrid", ("ngram-mod",), {}),
    "moe": ("tiny-moe", ("ngram-mod",), {}),
    "q8_0": ("tiny-hybrid", ("ngram-mod",), Q8_0),
    "planes": ("tiny-hybrid-nextn", ("ngram-mod", "draft-mtp"), {}),
    "planes-moe": ("tiny-moe-nextn", ("ngram-mod", "draft-mtp"), {}),
    "dense": ("tiny-dense", ("ngram-mod",), {}),
}
Opened = Callable[..., LlamaBackend]


@pytest.fixture
def opened(open_model: Callable[..., Loaded]) -> Opened:
    def get(name: str, *, is_f32: bool = False) -> LlamaBackend:
        shape, types, options = MODELS[name]
        sizes = {"n_ctx": 2048, "n_ubatch": 128, "n_batch": 128, "n_seqs": 2}
        drafts = DraftSettings(draft_types=types)
        return open_model(
            shape, drafts=drafts, **sizes, **(F32_ROWS if is_f32 else options)
        ).backend

    return get


def tokens(seed: int, n: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 256, n).tolist())


def prefill(backend: LlamaBackend, seq: int = 0) -> None:
    backend.evaluate(seq, as_tokens(tokens(seq, N)), 0)


def outputs(backend: LlamaBackend, n: int) -> list[NDArray[np.float32]]:
    found = [backend.logits(i) for i in range(n)]
    assert all(np.isfinite(logits).all() for logits in found)
    return found


def equal(one: Sequence[NDArray[np.float32]], other: Sequence[NDArray[np.float32]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


HYBRIDS = [name for name in MODELS if name != "dense"]
"""Models whose logits may differ by roundings. Those with experts are in f32: in f16 they choose
other experts at times.
"""


@pytest.mark.parametrize("n_right", [0, 1, 7, 30])
@pytest.mark.parametrize("name", HYBRIDS)
def test_after_the_way_back_every_bit_is_as_if_nothing_had_been_drafted(
    opened: Opened, name: str, n_right: int
) -> None:
    """A draft beyond the planes that proves wrong returns to its mark, and the replay of the right
    tokens has the logits of a run that never drafted.
    """
    backend = opened(name)
    reply = tokens(7, 60)
    again = SequenceTokens(0, reply[: n_right + 2], N, n_right + 2)
    following = [
        SequenceTokens(0, reply[i : i + 1], N + i) for i in range(n_right + 2, n_right + 5)
    ]

    def go_on() -> list[NDArray[np.float32]]:
        found = []
        for item in (again, *following):
            backend.decode([item])
            found += outputs(backend, 1)
        return found

    prefill(backend)
    expected = go_on()
    backend.memory.clear(0)
    prefill(backend)
    wrong = tokens(8, 40 - n_right)
    backend.decode([SequenceTokens(0, (*reply[: n_right + 1], *wrong), N)])
    assert backend.memory.rollback(0, N + n_right + 1) == N
    assert equal(go_on(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_what_was_right_stays_without_a_way_back(opened: Opened, name: str) -> None:
    backend = opened(name)
    reply = tokens(7, 41)
    prefill(backend)
    backend.decode([SequenceTokens(0, reply, N)])
    first = outputs(backend, 41)
    assert backend.memory.rollback(0, N + 41) == N + 41
    backend.memory.clear(0)
    prefill(backend)
    backend.decode([SequenceTokens(0, (*reply[:40], 1), N)])
    assert equal(outputs(backend, 40), first[:40])


def test_rows_alone_are_taken_back_for_nothing(opened: Opened) -> None:
    backend = opened("dense")
    prefill(backend)
    backend.decode([SequenceTokens(0, tokens(3, 50), N)])
    assert backend.memory.rollback(0, N + 4) == N + 4


@pytest.mark.parametrize(("n_wrong", "held"), [(3, N + 38), (4, N)])
def test_planes_are_used_where_they_suffice(opened: Opened, n_wrong: int, held: int) -> None:
    backend = opened("planes")
    assert backend.facts.n_rollback == 3
    assert backend.facts.max_drafts == 127
    prefill(backend)
    backend.decode([SequenceTokens(0, tokens(3, 41), N)])
    assert backend.memory.rollback(0, N + 41 - n_wrong) == held


@pytest.mark.parametrize("name", HYBRIDS)
def test_beyond_what_was_drafted_there_is_no_way_back(opened: Opened, name: str) -> None:
    backend = opened(name)
    for n in (N - 1, N, N + 1, N + 41):
        prefill(backend)
        backend.decode([SequenceTokens(0, tokens(3, 40), N, 2)])
        with pytest.raises(StateError):
            backend.memory.rollback(0, n)
        assert backend.memory.cells.n_tokens(0) == 0, "the sequence is empty"
    prefill(backend)
    backend.decode([SequenceTokens(0, tokens(3, 40), N, 2)])
    assert backend.memory.rollback(0, N + 2) == N
    with pytest.raises(StateError):
        backend.memory.rollback(0, N - 1)


@pytest.mark.parametrize("name", HYBRIDS)
def test_without_marks_long_drafts_are_not_asked_for(model_path: Any, name: str) -> None:
    settings = ModelSettings(
        path=str(model_path(MODELS[name][0])), n_ctx=256, n_ubatch=64, n_threads=1
    )
    backend = load(settings).backend
    assert backend.facts.max_drafts == backend.facts.n_rollback == 0
    backend.unload()


class Counting(Speculation):
    """Notes what each step evaluates."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.steps: list[tuple[int, int]] = []

    def propose(self, jobs: Any) -> Any:
        drafts = super().propose(jobs)
        self.steps += [
            (len(job.sure), len(draft.tokens)) for job, draft in zip(jobs, drafts, strict=True)
        ]
        return drafts


SEEDS = {"hybrid": 4, "moe": 1, "planes": 5}
"""Prompts with whose replies in f32 the two likeliest tokens differ by 100 times as much as batches
of other widths.
"""


@pytest.mark.parametrize("wrong", [0.0, 0.05, 1.0])
@pytest.mark.parametrize(
    ("name", "is_composed"),
    [("hybrid", False), ("moe", False), ("planes", False), ("planes", True)],
)
def test_replies_are_those_without_drafts_and_nothing_is_verified_twice(
    opened: Opened, name: str, is_composed: bool, wrong: float
) -> None:
    """Composed drafts begin with the head's tokens, and go on beyond the planes."""
    backend = opened(name, is_f32=True)
    prompt = Prompt.from_ids(tokens(SEEDS[name], N), [30, 80])
    n = 150
    endless = Sampling(temperature=0.0, ignore_eos=True)
    expected = ask(
        Engine(backend, RamCache(4, 2**26), EngineSettings()), prompt, n, sampling=endless
    ).tokens
    source = Continuing({prompt: expected}, 40, wrong, seed=3)
    source.leads = not is_composed
    model = ModelDrafts(backend, 3) if backend.facts.draft_type else None
    speculation = Counting([source], model)
    for seq in range(2):
        backend.memory.clear(seq)
    engine = Engine(backend, RamCache(4, 2**26), EngineSettings(), speculation=speculation)
    reply = ask(engine, prompt, n, sampling=endless)
    assert reply.error is None
    assert reply.tokens == expected
    replays = [step for step in speculation.steps if step[0] > 1]
    assert all(n_drafts <= backend.facts.n_rollback for _, n_drafts in replays)
    assert any(n_drafts > backend.facts.n_rollback for _, n_drafts in speculation.steps)
    assert bool(replays) == (wrong > 0.0 or is_composed), (
        "what follows a wrong token of the head is wrong"
    )
    # After a replay the next step begins anew: no token is replayed twice.
    for (n_sure, _), (n_next, _) in zip(speculation.steps, speculation.steps[1:], strict=False):
        assert n_sure == 1 or n_next == 1
    evaluated = sum(n_sure for n_sure, _ in speculation.steps)
    assert evaluated <= 2 * n


@pytest.mark.parametrize("kind", ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"])
def test_a_text_that_repeats_takes_fewer_steps(opened: Opened, kind: str) -> None:
    """The tiny model repeats what it is forced to say by a grammar."""
    backend = opened("hybrid")
    line = (
        "the quick brown fox jumps over the lazy dog, and then it sleeps until the next "
        "morning comes again. "
    )
    text = backend.tokenizer.tokenize(line * 3)
    forced = Sampling(temperature=0.0, grammar=f'root ::= "{line * 3}"', grammar_kind="gbnf")
    settings = NgramSettings()
    speculation = Counting(ngram_sources([kind], settings))
    engine = Engine(backend, RamCache(4, 2**26), EngineSettings(), speculation=speculation)
    reply = ask(engine, Prompt.from_ids(text), 250, sampling=forced)
    assert reply.error is None
    assert reply.text.startswith(line * 2)
    assert len(speculation.steps) < len(reply.tokens) / 4


class RandomSequences:
    """Two sequences that decode, go back, are saved and restored at random, and the tokens that
    they must hold.
    """

    def __init__(self, backend: LlamaBackend, seed: int) -> None:
        self.backend, self.rng = backend, np.random.default_rng(seed)
        self.held: list[list[int]] = [[], []]
        self.pending: list[list[int]] = [[], []]  # right, and to be evaluated again
        self.saved: tuple[list[int], Any, Any] | None = None
        self.n_resets = 0
        for seq in range(2):
            self.fill(seq)

    def fill(self, seq: int) -> None:
        self.backend.memory.clear(seq)
        self.held[seq] = self.rng.integers(3, 256, int(self.rng.integers(20, 100))).tolist()
        self.backend.evaluate(seq, as_tokens(self.held[seq]), 0)
        self.pending[seq] = []

    def step(self) -> None:
        """Do one thing at random to one of the sequences, or to both."""
        match self.rng.choice(["decode", "decode", "decode", "save", "load", "fill"]):
            case "decode":
                self.decode(
                    sorted(self.rng.choice(2, int(self.rng.integers(1, 3)), replace=False).tolist())
                )
            case "save":
                seq = int(self.rng.integers(2))
                n = len(self.held[seq])
                rows = self.backend.memory.save_rows(seq, 0, n)
                state = self.backend.memory.save_state(seq, n)
                self.backend.memory.synchronize()
                self.saved = list(self.held[seq]), rows, state
            case "load" if self.saved is not None:
                seq, (held, rows, state) = int(self.rng.integers(2)), self.saved
                self.backend.memory.clear(seq)
                self.backend.memory.restore(seq, 0, [(rows, 0, len(held))], state)
                self.held[seq] = list(held)
                self.pending[seq] = []
            case _:
                if self.rng.random() < 0.2:
                    self.fill(int(self.rng.integers(2)))

    def decode(self, seqs: list[int]) -> None:
        """Evaluate drafts of random lengths in these sequences, and take back those that prove
        wrong.
        """
        items = []
        rights = []
        for seq in seqs:
            sure = [*self.pending[seq], int(self.rng.integers(3, 256))]
            n_drafts = 0 if self.pending[seq] else int(self.rng.choice([0, 1, 3, 4, 20, 31]))
            drafts = self.rng.integers(3, 256, n_drafts).tolist()
            items.append(SequenceTokens(seq, (*sure, *drafts), len(self.held[seq]), len(sure)))
            rights.append(int(self.rng.integers(0, n_drafts + 1)))
        widths = {len(item.tokens) for item in items}
        self.backend.decode(items)
        for item, right in zip(items, rights, strict=True):
            if len(widths) > 1 and 0 < item.n_drafts <= self.backend.facts.n_rollback:
                right = item.n_drafts  # what the engine never asks for: planes of unequal widths
            n = item.position + item.n_committed + right
            kept = self.backend.memory.rollback(item.seq, n)
            all_held = [*self.held[item.seq], *item.tokens][:n]
            assert kept in (n, item.position)
            self.n_resets += kept < n
            self.held[item.seq] = all_held[:kept]
            self.pending[item.seq] = all_held[kept:]

    def check(self, other: LlamaBackend) -> None:
        """``other`` evaluates from nothing what each sequence must hold; a wrong state would be far
        off.
        """
        for seq in range(2):
            probe = SequenceTokens(
                seq, (*self.pending[seq], 77), len(self.held[seq]), len(self.pending[seq]) + 1
            )
            tokens = [*self.held[seq], *probe.tokens]
            assert self.backend.memory.cells.n_tokens(seq) == len(self.held[seq])
            self.backend.decode([probe])
            ours = self.backend.logits(0)
            self.held[seq] = tokens
            self.pending[seq] = []
            other.memory.clear(0)
            for start in range(0, len(tokens), 100):
                other.evaluate(0, as_tokens(tokens[start : start + 100]), start)
            theirs = other.logits(0)
            assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["hybrid", "planes", "planes-moe"])
def test_whatever_happens_a_sequence_holds_what_it_should(
    opened: Opened, model_path: Any, name: str, seed: int
) -> None:
    """Through any order of drafts, rollbacks, saves and restores each sequence predicts as one that
    evaluated its tokens from nothing; a state of other tokens would be far off.
    """
    path = model_path(MODELS[name][0])
    options = {}
    is_f32 = "moe" in name
    if is_f32:
        options = F32_ROWS
    other = load(
        ModelSettings(path=str(path), n_ctx=2048, n_ubatch=128, n_threads=1, **options)
    ).backend
    conversations = RandomSequences(opened(name, is_f32=is_f32), seed)
    for i in range(60):
        conversations.step()
        if max(map(len, conversations.held)) > 700:
            conversations.fill(int(np.argmax([len(held) for held in conversations.held])))
        if i % 6 == 5:
            conversations.check(other)
    assert conversations.n_resets > 3
    other.unload()
