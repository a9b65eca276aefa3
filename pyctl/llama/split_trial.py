"""python -m pyctl.llama.split_trial: load the model of the settings that come in, and evaluate some tokens.

The last line that is printed says how that went.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import replace

from pyctl.llama.loader import load
from pyctl.llama.memory_check import made_up_text
from pyctl.llama.split import FITS
from pyctl.module_process import end_with_parent


def main() -> None:
    """End the process with what the parent reads."""
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
