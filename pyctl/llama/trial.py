"""python -m pyctl.llama.trial: use the modules that its input names in a separate process, to which
the libraries may do anything.

That is the native module that PYCTL_TRIAL names, on tiny models written to a directory, or settings
of a model. The last line is the reason if it fails; the exit code is then 1, or NOT_TRIED if the
machine was short of something.
"""

from __future__ import annotations

import lzma
import os
import pickle
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from pyctl.cache.resume_points import NOWHERE
from pyctl.engine.backend import SequenceTokens
from pyctl.llama.library.module_trial import NOT_TRIED
from pyctl.llama.library.trial_models import list_trial_models, models_with_drafts
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.memory.memory_check import synthetic_tokens
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.machine.environment import TRIAL

__all__ = ["try_module", "try_settings"]

SETTINGS = ModelSettings(n_ctx=1024, n_ubatch=64, n_gpu_layers=0, n_threads=2, devices=("none",))
"""The ring of the model with windows has 256 cells, and so it wraps."""

N_DRAFTED = 100


def try_module(directory: Path, memory: str = "") -> None:
    """Raise SystemExit with the reason if bits differ; with ``memory`` only try the models of that
    class.
    """
    module = Path(os.environ[TRIAL]).name.partition(".")[0]
    for path in list_trial_models(memory) if module == "_core" else models_with_drafts():
        model = directory / path.stem
        model.write_bytes(lzma.decompress(path.read_bytes()))
        settings = replace(SETTINGS, path=str(model))
        if module == "_pool":
            load(
                settings, pool=PoolSettings(512)
            ).backend.unload()  # compares bits with and without the pool
            continue
        backend = load(
            settings, drafts=DraftSettings(("draft-mtp",) if module == "_drafts" else ())
        ).backend
        if backend.memory.kv.reason:
            raise SystemExit(f"{model.stem}: {backend.memory.kv.reason}")
        backend.check_restoring(in_depth=True)
        if backend.memory.shape.resume_points == NOWHERE:
            raise SystemExit(f"{model.stem}: a restored sequence has other bits")
        if module == "_drafts" and not _drafts_again(backend):
            raise SystemExit("a restored sequence has other drafts")
        backend.unload()


def _drafts_again(backend: LlamaBackend) -> bool:
    """Return whether the head has the same drafts after rows and states were saved and restored."""
    memory = backend.memory
    tokens = synthetic_tokens(N_DRAFTED, backend.tokenizer.n_vocab)
    n = N_DRAFTED
    for first, last in pairwise([*range(0, n, backend.facts.n_ubatch), n]):
        backend.evaluate(0, tokens[first:last], first)
    rows = memory.save_rows(0, 0, n)
    state = memory.save_state(0, n)
    asked = [SequenceTokens(0, (1,), n)]
    memory.synchronize()
    drafted = backend.draft(asked, 2)
    memory.clear(0)
    memory.restore(0, 0, [(rows, 0, n)], state)
    return bool(drafted[0]) and drafted == backend.draft(asked, 2)


def try_settings(settings: ModelSettings, drafts: DraftSettings) -> None:
    """Load the model of ``settings`` and evaluate some tokens."""
    backend = load(replace(settings, n_ctx=1024), drafts=drafts).backend
    backend.evaluate(0, synthetic_tokens(64, backend.tokenizer.n_vocab), 0)
    backend.logits(0)
    os._exit(0)


if __name__ == "__main__":
    try:
        (try_module if TRIAL in os.environ else try_settings)(*pickle.load(sys.stdin.buffer))
    except (
        OSError,
        MemoryError,
    ) as error:  # this moment's fault: no room for the models, no memory
        print(str(error) or type(error).__name__, file=sys.stderr)
        raise SystemExit(NOT_TRIED) from None
    except Exception as error:
        raise SystemExit(f"its trial fails: {str(error) or type(error).__name__}") from None
