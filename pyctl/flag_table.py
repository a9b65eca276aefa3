"""The flags of pyctl by group, and the names of llama-server's that pyctl takes without using them.

Names, defaults and variables are llama-server's wherever it has them; the variables of our own begin with PYCTL_.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pyctl.engine.sampling import DEFAULT_SAMPLERS, RANDOM_SEED
from pyctl.flags import Flag, choice, file_text, integer, json_object, number, on_off_auto, words

__all__ = [
    "CACHE",
    "CONTEXT",
    "DISK",
    "FORMAT",
    "GENERAL",
    "LOG",
    "MODEL",
    "REFUSED",
    "SAMPLING",
    "SERVER",
    "TERMINAL",
    "UNUSED",
]

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
SAMPLER_LETTERS = dict(zip("edskypmxt", DEFAULT_SAMPLERS, strict=True))
SAMPLER_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}


def _samplers(text: str) -> tuple[str, ...]:
    plain = {name.replace("_", ""): name for name in DEFAULT_SAMPLERS}
    given = (part.strip().lower() for part in text.split(";") if part.strip())
    return tuple(SAMPLER_ALIASES.get(name) or plain.get(re.sub("[_-]", "", name), name) for name in given)


def _letters(text: str) -> tuple[str, ...]:
    unknown = [letter for letter in text if letter not in SAMPLER_LETTERS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of the letters {''.join(SAMPLER_LETTERS)}")
    return tuple(SAMPLER_LETTERS[letter] for letter in text)


def _seed(text: str) -> int:
    value = int(integer(-1, RANDOM_SEED)(text))
    return RANDOM_SEED if value == -1 else value


def _temperature(text: str) -> float:
    return max(float(number()(text)), 0.0)


def _bias(text: str) -> tuple[tuple[int, float], ...]:
    match = re.fullmatch(r"([0-9]+)([+-][0-9]*\.?[0-9]+|-inf)", text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form TOKEN_ID+BIAS or TOKEN_ID-BIAS")
    return ((int(match[1]), float(match[2])),)


def _breaker(text: str) -> tuple[str, ...]:
    escapes = {"n": "\n", "r": "\r", "t": "\t"}
    return () if text == "none" else (re.sub(r"\\([nrt'\"\\])", lambda m: escapes.get(m[1], m[1]), text),)


def _proportions(text: str) -> tuple[float, ...]:
    values = tuple(float(number(0.0)(part)) for part in re.split("[,/]+", text))
    if not any(values):
        raise ValueError("at least one proportion must be above 0")
    return values


def _directory(text: str) -> str:
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text!r} names a home that does not exist") from None
    if path.exists() and not path.is_dir():
        raise ValueError(f"{text!r} is not a directory")
    return str(path)


def _disk_policy(text: str) -> str:
    """In lower case, if it is a form that pyctl.cache.policy takes; flags come before the cache and cannot ask it."""
    match = re.fullmatch("off|none|disabled|full|full-prefix|auto|(?:auto:)?([0-9]{1,9})", text.lower())
    if match is None or (match[1] and not 1 <= int(match[1]) <= 1_000_000):
        raise ValueError(f"{text!r} is none of off, full, auto, auto:N, N, with N from 1 to 1000000")
    return text.lower()


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(line for line in file_text(text).splitlines() if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"no key in {text!r}")
    return keys


def _sendable(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise ValueError("a key can only hold printable ASCII characters")
    return text


def _template(text: str) -> str:
    if "{" not in text:
        raise ValueError(f"{text!r} is not a Jinja template; llama.cpp's built-in templates cannot be named here")
    return text


def _address(text: str) -> str:
    if len(addresses := words(text)) != 1:
        raise ValueError(f"{text!r} is not one address")
    return addresses[0]


def _url(text: str) -> str:
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise ValueError(f"{text!r} is not an http or https address")
    return url


GENERAL = (
    Flag("help", "-h --help --usage", "show this and exit"),
    Flag("version", "--version", "show the version and exit"),
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
    Flag("tensor_split", "-ts --tensor-split", "share of each GPU", _proportions, "LLAMA_ARG_TENSOR_SPLIT", "N,N,..."),
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
        _directory,
        "PYCTL_KV_CACHE_DIR",
        "DIR",
    ),
    Flag("disk_mib", "--kv-cache-budget", "MiB in that directory", integer(1), "PYCTL_KV_CACHE_BUDGET"),
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
        _disk_policy,
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
    Flag("seed", "-s --seed", "-1 = random", _seed, metavar="SEED"),
    Flag("samplers", "--samplers", "samplers in order, separated by ';'", _samplers, metavar="NAMES"),
    Flag("samplers", "--sampler-seq --sampling-seq", "the same by letters", _letters, metavar="LETTERS"),
    Flag("ignore_eos", "--ignore-eos", "do not end at the end-of-text token"),
    Flag("temperature", "--temp --temperature", "0 = always the likeliest", _temperature, "LLAMA_ARG_TEMPERATURE"),
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
        _breaker,
        metavar="TEXT",
        many=True,
    ),
    Flag("mirostat", "--mirostat", "0 = off, 1 or 2 = its version", integer(0, 2)),
    Flag("mirostat_eta", "--mirostat-lr", "learning rate", number()),
    Flag("mirostat_tau", "--mirostat-ent", "target entropy", number()),
    Flag(
        "logit_bias",
        "-l --logit-bias",
        "make a token likelier or less likely: 15043+1, 15043-1; may be repeated",
        _bias,
        metavar="ID+BIAS",
        many=True,
    ),
    Flag("grammar", "--grammar", "GBNF that replies must follow", str, metavar="GBNF"),
    Flag("grammar", "--grammar-file", "the same from a file", file_text, metavar="FILE"),
)
FORMAT = (
    Flag(
        "chat_template",
        "--chat-template",
        "Jinja text instead of the model's",
        _template,
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
    Flag("jinja", "--jinja", "templates are always rendered as Jinja", None, "LLAMA_ARG_JINJA", off="--no-jinja"),
)
SERVER = (
    Flag("host", "--host", "address to listen on, or a path ending in .sock", _address, "LLAMA_ARG_HOST", "HOST"),
    Flag("port", "--port", "port to listen on, 0 = any free one", integer(0, 65535), "LLAMA_ARG_PORT"),
    Flag(
        "api_keys", "--api-key", "keys that clients may use, comma-separated", words, "LLAMA_API_KEY", "KEYS", many=True
    ),
    Flag("key_file", "--api-key-file", "file with one key a line", _keys, "LLAMA_ARG_API_KEY_FILE", "FILE"),
    Flag("ssl_key_file", "--ssl-key-file", "private key (PEM)", str, "LLAMA_ARG_SSL_KEY_FILE", "FILE"),
    Flag("ssl_cert_file", "--ssl-cert-file", "certificate (PEM)", str, "LLAMA_ARG_SSL_CERT_FILE", "FILE"),
    Flag("timeout", "-to --timeout", "seconds a connection may stand still", integer(1), "LLAMA_ARG_TIMEOUT"),
    Flag(
        "sse_ping_interval",
        "--sse-ping-interval",
        "seconds of silence before a stream sends a comment, -1 = never",
        integer(-1),
        "LLAMA_ARG_SSE_PING_INTERVAL",
    ),
    Flag("webui", "--webui --ui", "serve the web page", None, "LLAMA_ARG_UI", off="--no-webui --no-ui"),
    Flag("metrics", "--metrics", "serve /metrics", None, "LLAMA_ARG_ENDPOINT_METRICS"),
    Flag("props", "--props", "allow POST /props", None, "LLAMA_ARG_ENDPOINT_PROPS"),
    Flag("slots", "--slots", "serve /slots", None, "LLAMA_ARG_ENDPOINT_SLOTS", off="--no-slots"),
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
)
TERMINAL = (
    Flag("url", "--url", "talk to this server instead of loading a model", _url, "PYCTL_URL", "URL"),
    Flag("api_key", "--api-key", "key for that server", _sendable, "LLAMA_API_KEY", "KEY"),
    Flag("prompt", "-p --prompt", "send this, print the reply and exit", str, metavar="TEXT"),
    Flag("system_prompt", "-sys --system-prompt", "system message", str, "PYCTL_SYSTEM_PROMPT", "TEXT"),
    Flag("stats", "--stats", "a line of numbers after each reply", None, "PYCTL_STATS", off="--no-stats"),
)
REFUSED = (
    Flag("refused", "-cl --cache-list --list-devices --completion-bash", "ask llama-server and exit"),
    Flag("download", "-hf -hfr --hf-repo -mu --model-url -dr --docker-repo", "fetch a model", str),
)
"""What would end llama-server after an answer that pyctl does not have, and what would fetch a model."""

_NO_VALUE = """
--no-host --embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec
--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default
--vision-gemma-12b-default --spec-default --swa-full --perf --no-perf -e --escape --no-escape --repack -nr --no-repack
-cmoe --cpu-moe --check-tensors --op-offload --no-op-offload --log-jsonl --no-log-jsonl --offline --log-prefix
--no-log-prefix --log-timestamps --no-log-timestamps -bs --backend-sampling -kvu --kv-unified -no-kvu --no-kv-unified
--cache-idle-slots --no-cache-idle-slots --context-shift --no-context-shift -sp --special --warmup --no-warmup
--spm-infill -cb --cont-batching -nocb --no-cont-batching --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload
--no-mmproj-offload --reuse-port --cors-credentials --no-cors-credentials --ui-mcp-proxy --webui-mcp-proxy
--no-ui-mcp-proxy --no-webui-mcp-proxy -ag --agent -no-ag --no-agent --embedding --embeddings --rerank --reranking
--models-autoload --no-models-autoload --reasoning-preserve --no-reasoning-preserve --skip-chat-parsing
--no-skip-chat-parsing --prefill-assistant --no-prefill-assistant --lora-init-without-apply --spec-draft-cpu-moe -cmoed
--cpu-moe-draft --spec-draft-backend-sampling --no-spec-draft-backend-sampling
"""
_ONE_VALUE = """
-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch
--prio-batch --poll-batch --keep -dt --defrag-thold --rpc -lzm --lazy-mode --numa -dev --device -ot --override-tensor
-ncmoe --n-cpu-moe -ncffn --n-cpu-ffn -fit --fit -fitt --fit-target -fitc --fit-ctx --override-kv --lora --lora-scaled
--control-vector --control-vector-scaled -hff --hf-file -hft
--hf-token --log-file --log-colors --spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd
--cache-type-v-draft --adaptive-target --adaptive-decay -j --json-schema -jf --json-schema-file -lcs
--lookup-cache-static -lcd --lookup-cache-dynamic --kv-unified-per-slot -ctxcp --ctx-checkpoints --swa-checkpoints -r
--reverse-prompt --pooling -mm --mmproj -mmu --mmproj-url -mmdev --mmproj-device --image-min-tokens --image-max-tokens
--mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir --tags --embd-normalize --path
--cors-origins --cors-methods --cors-headers --api-prefix --ui-config --webui-config --ui-config-file
--webui-config-file --tools --tools-runtime --mcp-servers-config --mcp-servers-json --threads-http
--cache-reuse --slot-save-path --media-path --models-dir --models-preset --models-max --reasoning-effort
--reasoning-budget --reasoning-budget-message -sps --slot-prompt-similarity --sleep-idle-seconds --log-prompts-dir
--spec-draft-hf -hfd -hfrd --hf-repo-draft --spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd
--threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft
--spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll --poll-draft
--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft
--spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft --spec-draft-override-tensor -otd
--override-tensor-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-n-max
--spec-draft-n-min --spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split --spec-draft-p-min
--draft-p-min --spec-draft-device -devd --device-draft --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
--spec-draft-model -md --model-draft --spec-type --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match
--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n
--spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m
--spec-ngram-map-k4v-min-hits --draft --draft-n --draft-max --draft-min --draft-n-min --spec-ngram-size-n
--spec-ngram-size-m --spec-ngram-min-hits
"""
UNUSED: Mapping[str, int] = {
    **dict.fromkeys(_NO_VALUE.split(), 0),
    **dict.fromkeys(_ONE_VALUE.split(), 1),
    "--control-vector-layer-range": 2,
}
"""How many values follow each flag of llama-server that has no effect here."""
