"""Loading of models: opens GGUF files and creates contexts."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from llama_cpp import llama_cpp as api

from pyctl.engine.backend import EngineInfo, ModelTemplates, Placement
from pyctl.engine.draft.draft_settings import FEATURE_TYPES, DraftSettings
from pyctl.engine.model_settings import NUMA, POOLING, ModelSettings
from pyctl.engine.pool_settings import PoolSettings
from pyctl.engine.vision_settings import VisionSettings
from pyctl.errors import ModelError, UnavailableError
from pyctl.limit import limit
from pyctl.llama import extension
from pyctl.llama.batch import Embedder
from pyctl.llama.devices import check_gguf, file_head, start_backends, tensor_bytes
from pyctl.llama.draft.block_model import BlockModel
from pyctl.llama.draft.draft_file import (
    block_shape,
    check_target,
    vocabulary_difference,
    with_inferred_type,
)
from pyctl.llama.draft.draft_model import DraftModel, MakeDraftModel
from pyctl.llama.draft.mtp import Eagle3, MtpHead
from pyctl.llama.draft.separate_model import SeparateModel
from pyctl.llama.dry_runs import NO_DRAFTS
from pyctl.llama.file_sampling import recommended_sampling
from pyctl.llama.fingerprint import file_digest, fingerprint, shared_split
from pyctl.llama.fit import fit_drafts, fit_settings
from pyctl.llama.image_encoder import ImageEncoder
from pyctl.llama.library import forget_log_errors, last_log_error, lose, when_aborted
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.llama_tokenizer import LlamaTokenizer
from pyctl.llama.make_encoder import make_encoder
from pyctl.llama.memory_plan import MemoryPlan
from pyctl.llama.params import (
    ModelParams,
    batch_cost,
    check_head,
    context_params,
    draft_cells,
    finds,
    gpus,
    head_params,
    layer_bytes,
    max_outputs,
    max_tokens,
    metadata_text,
    pool_cells,
    uses_own_head,
    with_ubatch,
    without_amx,
)
from pyctl.llama.pool_fit import fit_pool
from pyctl.llama.split import with_split

__all__ = ["Loaded", "load"]

log = logging.getLogger(__name__)

W = TypeVar("W")


@dataclass(frozen=True)
class Loaded:
    """A loaded model; ``drafts`` are the settings of its draft sources, ``split`` is how GPUs share
    it.
    """

    backend: LlamaBackend
    tokenizer: LlamaTokenizer
    info: EngineInfo
    images: ImageEncoder | None = None  # `picture` is thread-safe
    drafts: DraftSettings = NO_DRAFTS
    split: str = ""


def load(
    settings: ModelSettings,
    progress: Callable[[float], bool] | None = None,
    announce: Callable[[MemoryPlan], None] | None = None,
    drafts: DraftSettings | None = None,
    vision: VisionSettings | None = None,
    *,
    pool: PoolSettings | None = None,
) -> Loaded:
    """Load the model, its context, and optionally a draft model, a vision encoder and a pool.

    ``announce`` receives the memory plan before allocation. ``progress`` receives fractions from 0
    to 1 and returns whether to continue. The tokenizer has its own copy of the vocabulary, read
    with the weights and usable while the model is unloaded. Raises ModelError if a file is missing,
    damaged, unsupported or too large for memory, and UnavailableError if ``progress`` stopped
    loading.
    """
    path = Path(settings.path)
    start_backends()
    when_aborted(lose)
    if settings.numa:
        api.llama_numa_init(NUMA[settings.numa])
    check_gguf(path)
    vocabulary = _read_vocabulary(path, settings)
    drafts = with_inferred_type(drafts or DraftSettings())
    vision = _possible(
        vision if vision and vision.mmproj_path else None, "--mmproj", extension.core
    )
    pool = _possible(pool if pool and pool.n_pooled else None, "--kv-pool", extension.pool)
    settings = without_amx(with_ubatch(_alone(path, settings)))
    settings = with_split(settings, drafts, gpus(settings))
    encoder = make_encoder(settings, vision) if vision is not None else None
    pooled = fit_pool(settings, drafts, pool) if pool is not None else None
    if pooled is not None and encoder is not None:
        raise ModelError("--kv-pool excludes --mmproj: a pool holds no rows of images")
    usage = encoder.usage if encoder is not None else None
    known = None
    if pooled is None:
        drafts, known = fit_drafts(settings, drafts, usage)
    settings, plan = pooled or fit_settings(settings, drafts, usage, known)
    if announce is not None:
        announce(plan)
    source = _Source(
        path, settings, progress, drafts, pool_cells(settings) if pooled else settings.n_ctx
    )
    # Encoders of images and draft models read the texts of the model's own.
    source.vocabulary, source.needs_texts = (
        vocabulary,
        encoder is not None or bool(drafts.draft_path),
    )
    backend = LlamaBackend(
        source,
        lambda backend: fingerprint(backend, settings, plan.layers),
        (lambda model: _make_embedder(model, settings)) if settings.embeddings else None,
        lambda n_cells: max_tokens(settings, n_cells),
        max_outputs(settings, drafts),
        _draft_maker(settings, drafts),
        marks=finds(drafts),
        pool=plan.pool,
        batch_cost=batch_cost(settings),
        encoder=encoder,
    )
    if not backend.facts.is_async:
        _note_blocking_copies(plan)
    if not drafts.draft_types and api.llama_model_n_layer_nextn(backend.model) > 0:
        log.info("the model has a draft head: --spec-type draft-mtp enables it")
    info = _describe(path, backend, settings, plan)
    return Loaded(
        backend, backend.tokenizer, info, encoder, drafts, shared_split(settings, plan.layers)
    )


def _possible(wanted: W | None, flag: str, module: object) -> W | None:
    """Return ``wanted`` if the extension has the ``module`` for it."""
    if wanted is not None and module is None:
        log.error("%s disabled: it requires the extension", flag)
    return wanted if module is not None else None


def _alone(path: Path, settings: ModelSettings) -> ModelSettings:
    """Allow one sequence where an indexer chooses among the cells of a context, so that a reply
    depends on its own, and without the extension, where the cells of others determine bits.
    """
    if extension.core is None:
        return replace(settings, n_seqs=1)
    chooses = (
        any(".indexer" in name for name in tensor_bytes(path))
        and file_head(path).arch != "deepseek4"
    )
    if settings.n_seqs == 1 or not chooses:
        return settings
    log.warning(
        "one request at a time: this model's indexer would choose among the rows of all requests"
    )
    return replace(settings, n_seqs=1)


def _note_blocking_copies(plan: MemoryPlan) -> None:
    """Warn that copies of rows and states block evaluation, if GPUs hold some of them."""
    holders = [place.name for place in plan.places if place.usage.kv or place.usage.states]
    if any(place.usage.kv or place.usage.states for place in plan.gpus):
        log.warning(
            "saving and restoring block evaluation: K, V and states are on %s",
            " and ".join(holders),
        )


class _Source:
    """Creates the same model and context on each call; with the tokenizer of ``vocabulary``, the
    same each time.

    Models have texts of tokens if something ``needs_texts`` from them.
    """

    def __init__(
        self,
        path: Path,
        settings: ModelSettings,
        progress: Callable[[float], bool] | None,
        drafts: DraftSettings,
        n_cells: int,
    ) -> None:
        self._path = path
        self._settings = settings
        self._progress = progress
        self._drafts = drafts
        self._n_cells = n_cells
        self.vocabulary: Future[LlamaTokenizer] = Future()
        self.needs_texts = False

    def __call__(self) -> tuple[Any, Any, LlamaTokenizer]:
        params = ModelParams(
            self._settings, with_head=uses_own_head(self._drafts), with_vocabulary=self.needs_texts
        )
        model = _load_model(self._path, params, self._progress)
        try:
            of_context = context_params(
                self._settings, self._n_cells, layer_bytes(model), self._drafts
            )
            return model, _make_context(model, self._settings, of_context), self.vocabulary.result()
        except BaseException:
            api.llama_model_free(model)
            raise


def _draft_maker(settings: ModelSettings, drafts: DraftSettings) -> MakeDraftModel | None:
    """Return the factory of the draft model or head of ``drafts``, None for none."""
    if drafts.draft_path and drafts.n_draft > 0:
        return lambda model, ctx, attach: _open_draft_file(settings, drafts, model, ctx, attach)
    if not uses_own_head(drafts):
        return None

    def make(model: Any, ctx: Any, attach: Callable[[int], None]) -> DraftModel:
        params = head_params(settings, drafts, ctx, settings.n_ctx, layer_bytes(model))
        head = _make_context(model, drafts.of_context(settings), params)
        try:
            return MtpHead(head, drafts.n_draft, p_min=drafts.draft_p_min, attach=attach)
        except BaseException:
            api.llama_free(head)
            raise

    return make


def _open_draft_file(
    settings: ModelSettings,
    drafts: DraftSettings,
    trunk: Any,
    trunk_ctx: Any,
    attach: Callable[[int], None],
) -> DraftModel | None:
    """Open the draft model or head in the file of ``drafts``; log and return None if its vocabulary
    differs.
    """
    path = Path(drafts.draft_path)
    of_file = drafts.of_file(settings)
    layers = check_target(path, trunk) if drafts.has(*FEATURE_TYPES) else ()
    model = _load_model(path, ModelParams(of_file, with_head=drafts.has("draft-mtp")))
    ctx = None
    try:
        if drafts.has("draft-mtp"):
            check_head(model, trunk, drafts.draft_path)
        if difference := vocabulary_difference(trunk, model):
            log.error("draft model %s disabled: %s", path, difference)
            api.llama_model_free(model)
            return None
        n_bytes = layer_bytes(model)
        if drafts.reads_rows:
            params = head_params(of_file, drafts, trunk_ctx, settings.n_ctx, n_bytes)
        else:
            params = context_params(of_file, draft_cells(settings, drafts, settings.n_ctx), n_bytes)
        ctx = _make_context(model, of_file, params)
        return _draft_model(drafts, model, ctx, trunk, layers, attach)
    except BaseException:
        if ctx is not None:
            api.llama_free(ctx)
        api.llama_model_free(model)
        raise


def _draft_model(
    drafts: DraftSettings,
    model: Any,
    ctx: Any,
    trunk: Any,
    layers: tuple[int, ...],
    attach: Callable[[int], None],
) -> DraftModel:
    path = Path(drafts.draft_path)
    options: dict[str, Any] = {
        "p_min": drafts.draft_p_min,
        "identity": file_digest(path),
        "attach": attach,
    }
    if drafts.has("draft-mtp"):
        return MtpHead(ctx, drafts.n_draft, model=model, **options)
    if drafts.has("draft-eagle3"):
        return Eagle3(ctx, drafts.n_draft, layers, model=model, **options)
    if layers:
        return BlockModel(ctx, drafts.n_draft, layers, block_shape(path), model=model, **options)
    n_vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(trunk)))
    return SeparateModel(model, ctx, n_vocab, **options)


def _load_model(
    path: Path, params: ModelParams, progress: Callable[[float], bool] | None = None
) -> Any:
    if progress is not None:
        params.report(progress)
    model = params.load(str(path))
    if params.stopped:
        if model:
            api.llama_model_free(model)
        raise UnavailableError("loading was stopped")
    return model


def _read_vocabulary(path: Path, settings: ModelSettings) -> Future[LlamaTokenizer]:
    """Load the vocabulary alongside everything else: half a second for 250,000 tokens. The future
    raises ModelError.
    """

    def read() -> LlamaTokenizer:
        params = ModelParams(settings)  # the metadata of the user count here
        params.struct.vocab_only = True
        return LlamaTokenizer(params.load(str(path), "the vocabulary of"), owns=True)

    thread = ThreadPoolExecutor(1, "pyctl-vocabulary")
    try:
        return thread.submit(read)
    finally:
        thread.shutdown(wait=False)


MAX_EMBEDDED = limit(
    8192, "tokens of a text that is ranked, or embedded by its end", "400", "request", "tokens"
)


def _make_embedder(model: Any, settings: ModelSettings) -> Embedder:
    """Create a context for one text at a time. With pooling by the last token, texts may exceed a
    batch.
    """
    n_ctx = max(min(settings.n_ctx or MAX_EMBEDDED, MAX_EMBEDDED), settings.n_ubatch)
    own = metadata_text(model, f"{metadata_text(model, 'general.architecture')}.pooling_type")
    kind = str(POOLING.get(settings.pooling, own))
    if kind not in (str(POOLING["last"]), str(POOLING["rank"])):
        n_ctx = settings.n_ubatch
    params = context_params(replace(settings, n_seqs=1, n_batch=settings.n_ubatch), n_ctx)
    params.n_outputs_max = params.n_outputs_max_per_seq = (
        settings.n_ubatch
    )  # without pooling every token has an output
    params.embeddings = True
    params.pooling_type = POOLING.get(settings.pooling, -1)
    return Embedder(model, _make_context(model, settings, params))


def _make_context(model: Any, settings: ModelSettings, params: Any) -> Any:
    forget_log_errors()
    ctx = api.llama_init_from_model(model, params)
    if not ctx:
        reason = last_log_error("it does not fit into memory")
        raise ModelError(
            f"cannot make the context of {params.n_ctx} tokens: {reason}; try a smaller --ctx-size"
        )
    try:
        _apply_adapters(model, ctx, settings)
    except BaseException:
        api.llama_free(ctx)
        raise
    return ctx


def _apply_adapters(model: Any, ctx: Any, settings: ModelSettings) -> None:
    """Load LoRA adapters, which the model then owns, and apply them to ``ctx``."""
    if not settings.lora:
        return
    forget_log_errors()
    handles = []
    for path, _ in settings.lora:
        handle = api.llama_adapter_lora_init(model, str(Path(path).expanduser()).encode())
        if not handle:
            raise ModelError(
                f"cannot load the adapter {path}: {last_log_error('llama.cpp gave no reason')}"
            )
        handles.append(ctypes.cast(handle, ctypes.c_void_p).value)
    array = (ctypes.c_void_p * len(handles))(*handles)
    scales = (ctypes.c_float * len(handles))(*(scale for _, scale in settings.lora))
    pointer = ctypes.cast(array, ctypes.POINTER(api.llama_adapter_lora_p_ctypes))
    if api.llama_set_adapters_lora(ctx, pointer, len(handles), scales) != 0:
        raise ModelError(f"cannot use the adapters: {last_log_error('llama.cpp gave no reason')}")


def _describe(
    path: Path, backend: LlamaBackend, settings: ModelSettings, plan: MemoryPlan
) -> EngineInfo:
    model = backend.model
    tokenizer = backend.tokenizer
    name = metadata_text(model, "general.name") or path.stem
    return EngineInfo(
        model_path=str(path),
        model_name=name,
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
