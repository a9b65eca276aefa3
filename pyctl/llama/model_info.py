"""The description of a loaded model for clients and for the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyctl.engine.backend import EngineInfo, ModelTemplates, Placement
from pyctl.llama.library import extension
from pyctl.llama.library.bindings import api
from pyctl.llama.library.devices import metadata_text
from pyctl.llama.library.llama_tokenizer import LlamaTokenizer
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.sampling.file_sampling import recommended_sampling
from pyctl.llama.settings.resolved import Resolved

__all__ = ["describe_model"]


def describe_model(backend: LlamaBackend, resolved: Resolved) -> EngineInfo:
    """Return the facts about the model of ``backend`` and its context."""
    model = backend.model
    tokenizer = backend.tokenizer
    settings = resolved.model
    plan = resolved.memory
    path = Path(settings.path)
    return EngineInfo(
        model_path=str(path),
        model_name=metadata_text(model, "general.name") or path.stem,
        model_alias=min(settings.alias, default=path.name),  # llama-server sorts aliases
        model_aliases=tuple(sorted(set(settings.alias))) or (path.name,),
        model_tags=tuple(sorted(set(settings.tags))),
        arch=metadata_text(model, "general.architecture"),
        ftype_name=api.llama_ftype_name(api.llama_model_ftype(model)).decode(),
        n_ctx=backend.facts.n_ctx,
        n_ctx_train=int(api.llama_model_n_ctx_train(model)),
        n_seqs=backend.facts.n_seqs,
        n_vocab=tokenizer.n_vocab,
        n_embd=int(api.llama_model_n_embd(model)),
        n_params=int(api.llama_model_n_params(model)),
        model_size=int(api.llama_model_size(model)),
        bos_token=_special(model, tokenizer, "bos", tokenizer.bos),
        eos_token=_special(model, tokenizer, "eos", tokenizer.eos),
        build=extension.build_version(),
        vocab_type=int(api.llama_vocab_type(tokenizer.vocab)),
        pooling=backend.embedder.pooling if backend.embedder is not None else "",
        rerank_marks=_rerank_marks(tokenizer),
        fingerprint=backend.memory.identity,
        pool=plan.pool,
        vision=backend.encoder is not None,
        lora=settings.lora,
        memory=backend.memory_text,
        placement=Placement(
            type_k=settings.type_k,
            type_v=settings.type_v,
            n_layers=len(plan.layers),
            n_gpu_layers=plan.n_gpu_layers,
            n_rules=len(settings.placements),
            resolved=resolved.values,
        ),
        templates=ModelTemplates(
            *(_template(model, name) for name in (None, b"tool_use", b"rerank"))
        ),
        sampling=recommended_sampling(lambda key: metadata_text(model, key)),
    )


def _template(model: Any, name: bytes | None) -> str:
    """Return the model's template of this name, the plain one for None; empty if the file has
    none.
    """
    source = api.llama_model_chat_template(model, name)
    return source.decode("utf-8", "replace") if source else ""


def _rerank_marks(
    tokenizer: LlamaTokenizer,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    eos = tokenizer.eos if tokenizer.eos >= 0 else tokenizer.sep
    end = (eos,) if tokenizer.add_eos else ()
    return (
        (tokenizer.bos,) if tokenizer.add_bos else (),
        (*end, *((tokenizer.sep,) if tokenizer.add_sep else ())),
        end,
    )


def _special(model: Any, tokenizer: LlamaTokenizer, name: str, token: int) -> str:
    """Return the text of a special token; empty if the file does not define it, since llama.cpp
    then uses a default.
    """
    if not metadata_text(model, f"tokenizer.ggml.{name}_token_id"):
        return ""
    return tokenizer.piece(token).decode("utf-8", "replace")
