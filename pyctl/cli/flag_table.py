"""Every flag once: those that do something, by group, and those of llama-server that are taken without effect."""

from __future__ import annotations

from collections.abc import Mapping

from pyctl.cli.convert import (
    KV_TYPES,
    LOAD_MODES,
    adapters,
    address,
    bias,
    breaker,
    cpu_experts,
    cpu_ffn,
    directory,
    disk_policy,
    hub_name,
    key_lines,
    letters,
    metadata,
    numbers,
    on_off,
    placements,
    prefix,
    proportions,
    samplers,
    scaled_adapters,
    schema,
    schema_file,
    seed,
    sendable,
    sleep,
    temperature,
    template,
    url,
)
from pyctl.cli.flags import Flag, choice, file_text, integer, json_object, number, on_off_auto, words
from pyctl.engine.llama.model_settings import CPU_EXPERTS

__all__ = [
    "CACHE",
    "CONTEXT",
    "DISK",
    "FORMAT",
    "GENERAL",
    "HUB",
    "IGNORED",
    "LOG",
    "MODEL",
    "NO_OP",
    "REJECTED",
    "SAMPLING",
    "SERVER",
    "SPECULATIVE",
    "TERMINAL",
]


def _names(bare: str, with_value: str = "", with_two: str = "") -> dict[str, int]:
    return {name: n for n, names in enumerate((bare, with_value, with_two)) for name in names.split()}


NO_OP: Mapping[str, int] = _names(
    """
--no-perf -e --escape --no-escape -kvu --kv-unified -cb --cont-batching --no-context-shift --cache-idle-slots
--warmup --no-warmup --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload --log-prefix --no-log-prefix
--no-log-jsonl --no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag --no-agent --no-models-autoload --no-skip-chat-parsing
--no-spec-draft-backend-sampling --no-webui --no-ui --prefill-assistant
""",
    """
--log-colors --threads-http
""",
)

"""What asks for the way pyctl works anyway, or for something that nobody can see: no word about it."""

SPECULATIVE: Mapping[str, int] = _names(
    """
--fim-qwen-7b-spec --fim-qwen-14b-spec --spec-default --spec-draft-cpu-moe -cmoed --cpu-moe-draft
--spec-draft-backend-sampling
""",
    """
--spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft -lcs
--lookup-cache-static -lcd --lookup-cache-dynamic --spec-draft-hf -hfd -hfrd --hf-repo-draft --spec-draft-threads
-td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft
--spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio
--prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft
--spec-draft-poll-batch --poll-batch-draft --spec-draft-override-tensor -otd --override-tensor-draft
--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-n-max --spec-draft-n-min
--spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min
--spec-draft-device -devd --device-draft --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
--spec-draft-model -md --model-draft --spec-type --spec-ngram-mod-n-min --spec-ngram-mod-n-max
--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --draft --draft-n --draft-max --draft-min --draft-n-min
--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits
""",
)

"""Speculative decoding, which pyctl does not have."""

IGNORED: Mapping[str, int] = _names(
    """
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-30b-default
--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default --perf --log-jsonl
-bs --backend-sampling -no-kvu --no-kv-unified --no-cache-idle-slots --context-shift -sp --special
-nocb --no-cont-batching --mmproj-auto --reuse-port --ui-mcp-proxy --webui-mcp-proxy -ag --agent --rerank
--reranking --models-autoload --skip-chat-parsing --webui --ui --no-prefill-assistant
""",
    """
-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch
--cpu-strict-batch --prio-batch --poll-batch --keep -dt --defrag-thold --rpc --control-vector
--control-vector-scaled -ctxcp
--ctx-checkpoints --swa-checkpoints -r --reverse-prompt -mm --mmproj -mmu --mmproj-url -mmdev --mmproj-device
--image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps --video-timestamp-interval
--video-ffmpeg-dir --tags --path --ui-config --webui-config --ui-config-file --webui-config-file
--tools --tools-runtime --mcp-servers-config --mcp-servers-json --cache-reuse --media-path --models-dir
--models-preset --models-max -sps --slot-prompt-similarity --log-prompts-dir -to --timeout
""",
    """
--control-vector-layer-range
""",
)

"""What is taken with a warning."""

REJECTED: Mapping[str, int] = _names(
    """
--completion-bash
""",
    """
-dr --docker-repo
""",
)

"""What would end llama-server after an answer that pyctl does not have, or fetch a model from where pyctl cannot."""

GENERAL = (
    Flag("help", "-h --help --usage", "show this and exit"),
    Flag("version", "--version", "show the version and exit"),
    Flag("list_devices", "--list-devices", "show the devices that can hold a model and exit"),
    Flag("list_models", "-cl --cache-list", "show the models that -hf has fetched and exit"),
)

MODEL = (
    Flag("path", "-m --model", "GGUF file to load", str, "LLAMA_ARG_MODEL", "FILE"),
    Flag("alias", "-a --alias", "names for clients, comma-separated", words, "LLAMA_ARG_ALIAS", "NAMES"),
    Flag(
        "n_gpu_layers",
        "-ngl --gpu-layers --n-gpu-layers",
        "layers on the GPU: a number, auto (-1) or all (-2)",
        integer(-2, auto=-1, all=-2),
        "LLAMA_ARG_N_GPU_LAYERS",
    ),
    Flag(
        "split_mode",
        "-sm --split-mode",
        "how GPUs share the model: none, layer, row or tensor",
        choice("none", "layer", "row", "tensor"),
        "LLAMA_ARG_SPLIT_MODE",
        "MODE",
    ),
    Flag("tensor_split", "-ts --tensor-split", "share of each GPU", proportions, "LLAMA_ARG_TENSOR_SPLIT", "N,N,..."),
    Flag("main_gpu", "-mg --main-gpu", "the GPU of split modes none and row", integer(0), "LLAMA_ARG_MAIN_GPU"),
    Flag(
        "load_mode",
        "-lm --load-mode",
        f"how the file is read: {', '.join(LOAD_MODES)}",
        choice(*LOAD_MODES),
        "LLAMA_ARG_LOAD_MODE",
        "MODE",
    ),
    Flag("mmap", "--mmap", "map the file into memory; older form of -lm", None, "LLAMA_ARG_MMAP", off="--no-mmap"),
    Flag("mlock", "--mlock", "keep the model in RAM; older form of -lm", None, "LLAMA_ARG_MLOCK"),
    Flag(
        "lazy_mode",
        "-lzm --lazy-mode",
        "read some large tensors on demand: on, off or auto",
        on_off_auto,
        "LLAMA_ARG_LAZY_MODE",
        "WHEN",
    ),
    Flag(
        "devices",
        "-dev --device",
        "devices to use, comma-separated, none = only the CPU; --list-devices names them",
        words,
        "LLAMA_ARG_DEVICE",
        "NAMES",
    ),
    Flag(
        "placements",
        "-ot --override-tensor",
        "where tensors go whose names match; may be repeated",
        placements,
        "LLAMA_ARG_OVERRIDE_TENSOR",
        "PATTERN=BUFFER,...",
        many=True,
    ),
    Flag(
        "placements",
        "-cmoe --cpu-moe",
        "keep all experts on the CPU",
        None,
        "LLAMA_ARG_CPU_MOE",
        const=((CPU_EXPERTS, "CPU"),),
        many=True,
    ),
    Flag(
        "placements",
        "-ncmoe --n-cpu-moe",
        "keep the experts of the first N layers on the CPU",
        cpu_experts,
        "LLAMA_ARG_N_CPU_MOE",
        many=True,
    ),
    Flag(
        "placements",
        "-ncffn --n-cpu-ffn",
        "keep the dense feed-forward weights of the first N layers on the CPU",
        cpu_ffn,
        "LLAMA_ARG_N_CPU_FFN",
        many=True,
    ),
    Flag("fit", "-fit --fit", "fit what was not given into memory: on or off", on_off, "LLAMA_ARG_FIT", "WHEN"),
    Flag(
        "fit_target", "-fitt --fit-target", "MiB to leave free on each GPU", numbers, "LLAMA_ARG_FIT_TARGET", "MiB,..."
    ),
    Flag("fit_ctx", "-fitc --fit-ctx", "context that fitting leaves at least", integer(1), "LLAMA_ARG_FIT_CTX"),
    Flag(
        "metadata",
        "--override-kv",
        "metadata in place of the file's; types int, float, bool, str; may be repeated",
        metadata,
        metavar="KEY=TYPE:VALUE,...",
        many=True,
    ),
    Flag("check_tensors", "--check-tensors", "look for invalid values in the weights"),
    Flag(
        "repack",
        "--repack",
        "rearrange weights for the CPU",
        None,
        "LLAMA_ARG_REPACK",
        off="-nr --no-repack",
    ),
    Flag("no_host", "--no-host", "no host buffers, which leaves room for extra ones", None, "LLAMA_ARG_NO_HOST"),
    Flag(
        "numa",
        "--numa",
        "distribute, isolate or numactl",
        choice("distribute", "isolate", "numactl"),
        "LLAMA_ARG_NUMA",
        "TYPE",
    ),
    Flag("lora", "--lora", "LoRA adapters, comma-separated; may be repeated", adapters, metavar="FILES", many=True),
    Flag("lora", "--lora-scaled", "the same with scales", scaled_adapters, metavar="FILE:SCALE,...", many=True),
    Flag("lora_unapplied", "--lora-init-without-apply", "load adapters at scale 0"),
)

HUB = (
    Flag(
        "hf_repo",
        "-hf -hfr --hf-repo",
        "model from huggingface.co, kept in its cache; Q4_K_M or Q8_0 where no QUANT is given, else the first file",
        hub_name,
        "LLAMA_ARG_HF_REPO",
        "USER/MODEL[:QUANT]",
    ),
    Flag("hf_file", "-hff --hf-file", "this file of it", str, "LLAMA_ARG_HF_FILE", "FILE"),
    Flag("hf_token", "-hft --hf-token", "access token", sendable, "HF_TOKEN", "TOKEN"),
    Flag("model_url", "-mu --model-url", "model from this address", url, "LLAMA_ARG_MODEL_URL", "URL"),
    Flag("offline", "--offline", "only what has been fetched before", None, "LLAMA_ARG_OFFLINE"),
)

CONTEXT = (
    Flag("n_ctx", "-c --ctx-size", "tokens of context, 0 = what the model has", integer(0), "LLAMA_ARG_CTX_SIZE"),
    Flag("n_seqs", "-np --parallel", "live sequences", integer(1, **{"-1": 1}), "LLAMA_ARG_N_PARALLEL"),
    Flag("n_batch", "-b --batch-size", "tokens in one call of llama.cpp", integer(1), "LLAMA_ARG_BATCH"),
    Flag("n_ubatch", "-ub --ubatch-size", "tokens in one evaluation", integer(1), "LLAMA_ARG_UBATCH"),
    Flag("n_threads", "-t --threads", "CPU threads for generation, -1 = chosen", integer(), "LLAMA_ARG_THREADS"),
    Flag("n_threads_batch", "-tb --threads-batch", "CPU threads for prompts, 0 = as many as -t", integer()),
    Flag(
        "flash_attn",
        "-fa --flash-attn",
        "flash attention: on, off or auto",
        on_off_auto,
        "LLAMA_ARG_FLASH_ATTN",
        "WHEN",
        bare="on",
    ),
    Flag(
        "type_k",
        "-ctk --cache-type-k",
        f"type of K in the KV cache: {', '.join(KV_TYPES)}",
        choice(*KV_TYPES),
        "LLAMA_ARG_CACHE_TYPE_K",
        "TYPE",
    ),
    Flag("type_v", "-ctv --cache-type-v", "type of V, likewise", choice(*KV_TYPES), "LLAMA_ARG_CACHE_TYPE_V", "TYPE"),
    Flag(
        "offload_kqv",
        "-kvo --kv-offload",
        "keep the KV cache on the GPU",
        None,
        "LLAMA_ARG_KV_OFFLOAD",
        off="-nkvo --no-kv-offload",
    ),
    Flag("op_offload", "--op-offload", "host operations on the GPU for large batches", off="--no-op-offload"),
    Flag("swa_full", "--swa-full", "sliding windows keep all tokens", None, "LLAMA_ARG_SWA_FULL"),
    Flag(
        "n_ctx_per_seq",
        "--kv-unified-per-slot",
        "tokens of each live sequence; without -c, the context is N for each",
        integer(1),
        "LLAMA_ARG_KV_UNIFIED_PER_SLOT",
    ),
    Flag(
        "rope_scaling",
        "--rope-scaling",
        "none, linear or yarn",
        choice("none", "linear", "yarn"),
        "LLAMA_ARG_ROPE_SCALING_TYPE",
        "TYPE",
    ),
    Flag("rope_scale", "--rope-scale", "the context grows by N", number(1e-9), "LLAMA_ARG_ROPE_SCALE"),
    Flag("rope_freq_base", "--rope-freq-base", "base frequency", number(0.0), "LLAMA_ARG_ROPE_FREQ_BASE"),
    Flag("rope_freq_scale", "--rope-freq-scale", "the context grows by 1/N", number(0.0), "LLAMA_ARG_ROPE_FREQ_SCALE"),
    Flag("yarn_orig_ctx", "--yarn-orig-ctx", "context before YaRN", integer(0), "LLAMA_ARG_YARN_ORIG_CTX"),
    Flag("yarn_ext_factor", "--yarn-ext-factor", "extrapolation mix", number(), "LLAMA_ARG_YARN_EXT_FACTOR"),
    Flag("yarn_attn_factor", "--yarn-attn-factor", "attention scale", number(), "LLAMA_ARG_YARN_ATTN_FACTOR"),
    Flag("yarn_beta_slow", "--yarn-beta-slow", "high correction dimension", number(), "LLAMA_ARG_YARN_BETA_SLOW"),
    Flag("yarn_beta_fast", "--yarn-beta-fast", "low correction dimension", number(), "LLAMA_ARG_YARN_BETA_FAST"),
)

CACHE = (
    Flag("n_slots", "--prefix-cache-slots", "snapshots kept, 0 = none", integer(0), "PYCTL_PREFIX_CACHE_SLOTS"),
    Flag(
        "ram_mib", "-cram --cache-ram", "MiB of snapshots, -1 = no limit, 0 = none", integer(-1), "LLAMA_ARG_CACHE_RAM"
    ),
    Flag(
        "cache_prompt",
        "--cache-prompt",
        "reuse earlier prompts",
        None,
        "LLAMA_ARG_CACHE_PROMPT",
        off="--no-cache-prompt",
    ),
    Flag(
        "checkpoint_min_step",
        "-cms --checkpoint-min-step",
        "tokens between snapshots within a long stretch",
        integer(0),
        "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
    ),
    Flag("exact", "--exact", "never reuse generated text unevaluated", None, "PYCTL_EXACT", off="--no-exact"),
)

DISK = (
    Flag(
        "cache_dir",
        "--kv-cache-dir",
        "directory in which prompt prefixes survive a restart, made if missing; none without it",
        directory,
        "PYCTL_KV_CACHE_DIR",
        "DIR",
    ),
    Flag("disk_mib", "--kv-cache-budget", "MiB in that directory, 0 = no limit", integer(0), "PYCTL_KV_CACHE_BUDGET"),
    Flag(
        "min_tokens",
        "--kv-cache-min-tokens",
        "shorter prefixes are not written",
        integer(0),
        "PYCTL_KV_CACHE_MIN_TOKENS",
    ),
    Flag(
        "cold_max",
        "--kv-cache-cold-max",
        "policy full also writes the beginning of longer prompts, at most N tokens, 0 = never",
        integer(0),
        "PYCTL_KV_CACHE_COLD_MAX",
    ),
    Flag(
        "disk_policy",
        "--disk-prefix-cache",
        "what is written: off, full (where a prompt ends), auto:N (what it shares with the newest N prompts, and what "
        "the next ones will), auto (auto:30) or N (its first N tokens)",
        disk_policy,
        "PYCTL_DISK_PREFIX_CACHE",
        "POLICY",
    ),
    Flag(
        "daily_mib",
        "--kv-cache-daily-writes",
        "MiB written within a day at most, 0 = no limit",
        integer(0),
        "PYCTL_KV_CACHE_DAILY_WRITES",
    ),
)

SAMPLING = (
    Flag(
        "n_predict", "-n --predict --n-predict", "tokens of a reply, -1 = no limit", integer(-1), "LLAMA_ARG_N_PREDICT"
    ),
    Flag("seed", "-s --seed", "-1 = random", seed, metavar="SEED"),
    Flag("samplers", "--samplers", "samplers in order, separated by ';'", samplers, metavar="NAMES"),
    Flag("samplers", "--sampler-seq --sampling-seq", "the same by letters", letters, metavar="LETTERS"),
    Flag("ignore_eos", "--ignore-eos", "do not end at the end-of-text token"),
    Flag("temperature", "--temp --temperature", "0 = always the likeliest", temperature, "LLAMA_ARG_TEMPERATURE"),
    Flag("dynatemp_range", "--dynatemp-range", "dynamic temperature, 0 = off", number()),
    Flag("dynatemp_exponent", "--dynatemp-exp", "its exponent", number()),
    Flag("top_k", "--top-k", "0 = off", integer(-1), "LLAMA_ARG_TOP_K"),
    Flag("top_p", "--top-p", "1 = off", number(), "LLAMA_ARG_TOP_P"),
    Flag("min_p", "--min-p", "0 = off", number(), "LLAMA_ARG_MIN_P"),
    Flag("top_n_sigma", "--top-nsigma --top-n-sigma", "-1 = off", number()),
    Flag("typical_p", "--typical --typical-p", "1 = off", number()),
    Flag("xtc_probability", "--xtc-probability", "0 = off", number()),
    Flag("xtc_threshold", "--xtc-threshold", "1 = off", number()),
    Flag("repeat_last_n", "--repeat-last-n", "tokens looked at by the penalties, 0 = off", integer(0)),
    Flag("repeat_penalty", "--repeat-penalty", "1 = off", number(), "LLAMA_ARG_REPEAT_PENALTY"),
    Flag("presence_penalty", "--presence-penalty", "0 = off", number(), "LLAMA_ARG_PRESENCE_PENALTY"),
    Flag("frequency_penalty", "--frequency-penalty", "0 = off", number(), "LLAMA_ARG_FREQUENCY_PENALTY"),
    Flag("dry_multiplier", "--dry-multiplier", "0 = off", number()),
    Flag("dry_base", "--dry-base", "at least 1", number(1.0)),
    Flag("dry_allowed_length", "--dry-allowed-length", "repetition that costs nothing", integer(0)),
    Flag("dry_penalty_last_n", "--dry-penalty-last-n", "tokens looked at, 0 = off", integer(0)),
    Flag(
        "dry_sequence_breakers",
        "--dry-sequence-breaker",
        "replaces the usual ones, none = no breakers; may be repeated",
        breaker,
        metavar="TEXT",
        many=True,
    ),
    Flag(
        "adaptive_target", "--adaptive-target", "probability that tokens should have; below 0 = off", number(high=1.0)
    ),
    Flag("adaptive_decay", "--adaptive-decay", "how slowly that adapts", number(0.0, 0.99)),
    Flag("mirostat", "--mirostat", "0 = off, 1 or 2 = its version", integer(0, 2)),
    Flag("mirostat_eta", "--mirostat-lr", "learning rate", number()),
    Flag("mirostat_tau", "--mirostat-ent", "target entropy", number()),
    Flag(
        "logit_bias",
        "-l --logit-bias",
        "make a token likelier or less likely: 15043+1, 15043-1; may be repeated",
        bias,
        metavar="ID+BIAS",
        many=True,
    ),
    Flag("grammar", "--grammar", "GBNF that replies must follow", str, metavar="GBNF"),
    Flag("grammar", "--grammar-file", "the same from a file", file_text, metavar="FILE"),
    Flag("grammar", "-j --json-schema", "JSON schema that replies must follow", schema, metavar="SCHEMA"),
    Flag("grammar", "-jf --json-schema-file", "the same from a file", schema_file, metavar="FILE"),
)

FORMAT = (
    Flag(
        "chat_template",
        "--chat-template",
        "Jinja text instead of the model's",
        template,
        "LLAMA_ARG_CHAT_TEMPLATE",
        "TEXT",
    ),
    Flag(
        "template_file",
        "--chat-template-file",
        "the same from a file",
        file_text,
        "LLAMA_ARG_CHAT_TEMPLATE_FILE",
        "FILE",
    ),
    Flag(
        "template_kwargs",
        "--chat-template-kwargs",
        "further values for the template",
        json_object,
        "LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        "JSON",
    ),
    Flag(
        "reasoning",
        "-rea --reasoning",
        "thinking: on, off or auto (the template decides)",
        on_off_auto,
        "LLAMA_ARG_REASONING",
        "WHEN",
    ),
    Flag(
        "reasoning_format",
        "--reasoning-format",
        "where thoughts go: auto, none, deepseek or deepseek-legacy",
        choice("auto", "none", "deepseek", "deepseek-legacy"),
        "LLAMA_ARG_THINK",
        "FORMAT",
    ),
    Flag(
        "prompt_replay",
        "--prompt-replay",
        "own replies go into later prompts as they were sampled: equal (if the message that the client returns means"
        " the same), full (also if it lacks the reasoning) or off",
        choice("equal", "full", "off"),
        "PYCTL_PROMPT_REPLAY",
        "MODE",
    ),
    Flag(
        "reasoning_effort",
        "--reasoning-effort",
        "effort for the template, such as low or high; default = its own",
        str,
        "LLAMA_ARG_REASONING_EFFORT",
        "LEVEL",
    ),
    Flag(
        "reasoning_preserve",
        "--reasoning-preserve",
        "tell the template to keep the thoughts of earlier replies, or not to",
        None,
        "LLAMA_ARG_REASONING_PRESERVE",
        off="--no-reasoning-preserve",
    ),
    Flag(
        "reasoning_budget",
        "--reasoning-budget",
        "tokens of thinking, -1 = no limit, 0 = none",
        integer(-1),
        "LLAMA_ARG_THINK_BUDGET",
    ),
    Flag(
        "reasoning_budget_message",
        "--reasoning-budget-message",
        "what the model is made to say when that is used up",
        str,
        "LLAMA_ARG_THINK_BUDGET_MESSAGE",
        "TEXT",
    ),
    Flag("jinja", "--jinja", "templates are always rendered as Jinja", None, "LLAMA_ARG_JINJA", off="--no-jinja"),
)

SERVER = (
    Flag("host", "--host", "address to listen on, or a path ending in .sock", address, "LLAMA_ARG_HOST", "HOST"),
    Flag("port", "--port", "port to listen on, 0 = any free one", integer(0, 65535), "LLAMA_ARG_PORT"),
    Flag(
        "api_keys", "--api-key", "keys that clients may use, comma-separated", words, "LLAMA_API_KEY", "KEYS", many=True
    ),
    Flag("key_file", "--api-key-file", "file with one key a line", key_lines, "LLAMA_ARG_API_KEY_FILE", "FILE"),
    Flag("ssl_key_file", "--ssl-key-file", "private key (PEM)", str, "LLAMA_ARG_SSL_KEY_FILE", "FILE"),
    Flag("ssl_cert_file", "--ssl-cert-file", "certificate (PEM)", str, "LLAMA_ARG_SSL_CERT_FILE", "FILE"),
    Flag(
        "sse_ping_interval",
        "--sse-ping-interval",
        "seconds of silence before a stream sends a comment, -1 = never",
        integer(-1),
        "LLAMA_ARG_SSE_PING_INTERVAL",
    ),
    Flag("metrics", "--metrics", "serve /metrics", None, "LLAMA_ARG_ENDPOINT_METRICS"),
    Flag("props", "--props", "allow POST /props", None, "LLAMA_ARG_ENDPOINT_PROPS"),
    Flag("slots", "--slots", "serve /slots", None, "LLAMA_ARG_ENDPOINT_SLOTS", off="--no-slots"),
    Flag("slot_save_path", "--slot-save-path", "directory for saved sequences", directory, metavar="DIR"),
    Flag("api_prefix", "--api-prefix", "path before all others", prefix, "LLAMA_ARG_API_PREFIX", "PATH"),
    Flag("cors_origins", "--cors-origins", "pages that may ask, or localhost", str, "LLAMA_ARG_CORS_ORIGINS", "LIST"),
    Flag("cors_methods", "--cors-methods", "how they may ask", str, "LLAMA_ARG_CORS_METHODS", "LIST"),
    Flag("cors_headers", "--cors-headers", "headers they may send", str, "LLAMA_ARG_CORS_HEADERS", "LIST"),
    Flag(
        "cors_credentials",
        "--cors-credentials",
        "with credentials",
        None,
        "LLAMA_ARG_CORS_CREDENTIALS",
        off="--no-cors-credentials",
    ),
    Flag(
        "sleep_idle_seconds",
        "--sleep-idle-seconds",
        "unload the model after this long without a request, -1 = never",
        sleep,
        metavar="SECONDS",
    ),
    Flag("embeddings", "--embedding --embeddings", "serve embeddings", None, "LLAMA_ARG_EMBEDDINGS"),
    Flag(
        "pooling",
        "--pooling",
        "how embeddings are pooled: none, mean, cls, last or rank",
        choice("none", "mean", "cls", "last", "rank"),
        "LLAMA_ARG_POOLING",
        "TYPE",
    ),
    Flag(
        "embd_normalize",
        "--embd-normalize",
        "norm of embeddings: -1 none, 0 int16 range, 1 taxicab, 2 Euclidean, p the p-norm",
        integer(-1),
    ),
    Flag("spm_infill", "--spm-infill", "/infill puts what comes after the gap first"),
)

LOG = (
    Flag("verbosity", "-v --verbose --log-verbose", "log everything", const=5),
    Flag("verbosity", "--log-disable", "log nothing", const=-1),
    Flag(
        "verbosity",
        "-lv --verbosity --log-verbosity",
        "1 errors, 2 warnings, 3 information, 4 trace, 5 all",
        integer(-1),
        "LLAMA_ARG_LOG_VERBOSITY",
    ),
    Flag("log_file", "--log-file", "log to this file, too", str, "LLAMA_ARG_LOG_FILE", "FILE"),
    Flag(
        "timestamps",
        "--log-timestamps",
        "begin each line with the time",
        None,
        "LLAMA_ARG_LOG_TIMESTAMPS",
        off="--no-log-timestamps",
    ),
)

TERMINAL = (
    Flag("url", "--url", "talk to this server instead of loading a model", url, "PYCTL_URL", "URL"),
    Flag("api_key", "--api-key", "key for that server", sendable, "LLAMA_API_KEY", "KEY"),
    Flag("prompt", "-p --prompt", "send this, print the reply and exit", str, metavar="TEXT"),
    Flag("system_prompt", "-sys --system-prompt", "system message", str, "PYCTL_SYSTEM_PROMPT", "TEXT"),
    Flag("stats", "--stats", "a line of numbers after each reply", None, "PYCTL_STATS", off="--no-stats"),
)
