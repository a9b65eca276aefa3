"""How several GPUs share a model: by layers, or with a part of each tensor, where that is faster and llama.cpp can.

``python -m pyctl.llama.split`` is the trial of parts, for what ends in an assertion.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired

from pyctl.engine.draft.draft_settings import DraftSettings
from pyctl.engine.model_settings import ModelSettings
from pyctl.limit import limit
from pyctl.llama.devices import tensor_bytes
from pyctl.llama.extension import build_version, core
from pyctl.llama.module_trial import read_results, write_results
from pyctl.llama.params import gpus
from pyctl.module_process import answer_of_module, end_with_parent
from pyctl.user_directory import user_directory

__all__ = ["with_split"]

log = logging.getLogger(__name__)

SPLIT_SECONDS = limit(600.0, "trial of --split-mode tensor", "the GPUs share the model by layers", "process", "s")

IN_TRIAL, FITS = "PYCTL_SPLIT_TRIAL", "it fits"

FAST_SUMS = {"GGML_CUDA_P2P": "1", "GGML_CUDA_ALLREDUCE": "none"}
"""Variables with which parts were measured to be faster, on two H200: 1.08 times for a dense prompt. Without them 0.84
times; models of experts 0.74 and 0.59 times (bench/results/gpu-tensor.md)."""


def with_split(settings: ModelSettings, drafts: DraftSettings, *, pooled: bool) -> ModelSettings:
    """Return ``settings`` with a split, by layers if parts of tensors are not faster, or if llama.cpp cannot make them.

    A given split is only replaced if llama.cpp would end the process.
    """
    if settings.split_mode not in ("auto", "tensor") or IN_TRIAL in os.environ:
        return settings
    layers, parts = replace(settings, split_mode="layer"), replace(settings, split_mode="tensor")
    is_given, found = settings.split_mode == "tensor", gpus(settings)
    if not is_given:
        if pooled or not _can_choose(settings):
            return layers
        if not all(os.environ.get(name) == value for name, value in FAST_SUMS.items()) or _has_experts(settings):
            log.info("%d equal GPUs share the model by layers; --split-mode tensor gives each a part", len(found))
            return layers
    if len(found) > 1 and (reason := _refusal(parts, drafts)):
        log.warning("the GPUs share the model by layers, not with --split-mode tensor: %s", reason)
        return layers
    if not is_given:
        log.info("%d equal GPUs have parts of all tensors: --split-mode tensor is faster here", len(found))
    return parts


def _can_choose(settings: ModelSettings) -> bool:
    """Whether there are equal GPUs of this machine, and no flag says what they get."""
    found = gpus(settings)
    given = settings.tensor_split or settings.main_gpu or settings.placements or settings.n_gpu_layers >= 0
    is_equal = len({(gpu.description, gpu.total) for gpu in found}) == 1 and not any(gpu.is_remote for gpu in found)
    return core is not None and len(found) > 1 and is_equal and not given and settings.flash_attn != "off"


def _has_experts(settings: ModelSettings) -> bool:
    return any("_exps." in name for name in tensor_bytes(Path(settings.path)))


def _refusal(settings: ModelSettings, drafts: DraftSettings) -> str:
    """Return why llama.cpp cannot evaluate with these settings, empty if it can; known from an earlier start."""
    status, place = Path(settings.path).stat(), Path(os.devnull)
    with suppress(RuntimeError):  # a user without a home directory
        place = user_directory("cache", os.environ) / "splits.json"
    facts = status.st_size, status.st_mtime_ns, build_version(), [gpu.description for gpu in gpus(settings)]
    key = hashlib.blake2b(repr((settings, drafts, facts)).encode(), digest_size=16).hexdigest()
    known = read_results(place)
    if key not in known:
        log.info("trying --split-mode tensor once with this model")
        known[key] = {"tensor": _tried(settings, drafts)}
        write_results([place], key, known[key])
    return known[key]["tensor"]


def _tried(settings: ModelSettings, drafts: DraftSettings) -> str:
    """Return the reason against these settings from a process of its own, which llama.cpp may end."""
    try:
        environment = {**os.environ, IN_TRIAL: "1", "GGML_NO_BACKTRACE": "1"}
        said = answer_of_module("pyctl.llama.split", pickle.dumps((settings, drafts)), SPLIT_SECONDS, environment)
    except (OSError, TimeoutExpired) as error:
        return f"its trial fails: {error}"
    last = next((line for line in reversed(said.decode("utf-8", "replace").split("\n")) if line.strip()), "")
    return "" if last == FITS else last.rpartition("/")[2] or "llama.cpp ends the process"


def main() -> None:
    """Load the model of standard input and evaluate some tokens; the last line that is printed says how that went."""
    from pyctl.llama.loader import load
    from pyctl.llama.memory_check import made_up_text

    end_with_parent(signal.SIGKILL)
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    settings, drafts = pickle.load(sys.stdin.buffer)
    backend = load(replace(settings, n_ctx=1024), drafts=drafts).backend
    backend.evaluate(0, made_up_text(64, backend.tokenizer.n_vocab), 0)
    backend.logits(0)
    print(FITS, flush=True)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(str(error) or type(error).__name__, flush=True)
