"""The reading of a vocabulary, on a thread of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import ModelParams

if TYPE_CHECKING:
    from pyctl.llama.library.llama_tokenizer import LlamaTokenizer

__all__ = ["read_vocabulary"]


def read_vocabulary(settings: ModelSettings) -> Future[LlamaTokenizer]:
    """Load the vocabulary alongside everything else: half a second for 250,000 tokens. The future
    raises ModelError.
    """

    def read() -> LlamaTokenizer:
        params = ModelParams(settings)  # the metadata of the user count here
        params.struct.vocab_only = True
        model = params.load(str(Path(settings.path)), "the vocabulary of")
        # After the file: another thread imports numpy meanwhile, which the tokenizer needs.
        from pyctl.llama.library.llama_tokenizer import LlamaTokenizer

        tokenizer = LlamaTokenizer(model, owns=True)
        # Reads the attributes of all tokens, which chat needs, while others read weights.
        tokenizer.control_tokens()
        return tokenizer

    thread = ThreadPoolExecutor(1, "pyctl-vocabulary")
    try:
        return thread.submit(read)
    finally:
        thread.shutdown(wait=False)
