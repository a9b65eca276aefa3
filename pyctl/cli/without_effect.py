"""Names of llama-server that have no effect here: each once, with what may be said about it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["IGNORED", "NO_OP", "REJECTED", "REMOVED"]


def _names(bare: str, with_value: str = "", with_two: str = "") -> dict[str, int]:
    """Each name, and how many values follow it."""
    return {name: n for n, names in enumerate((bare, with_value, with_two)) for name in names.split()}


NO_OP: Mapping[str, int] = _names(
    """
--no-perf -e --escape --no-escape -cb --cont-batching --no-context-shift
--warmup --no-warmup --log-prefix --no-log-prefix
--no-log-jsonl --no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag --no-agent --no-models-autoload --no-skip-chat-parsing
--spec-draft-backend-sampling --no-spec-draft-backend-sampling
""",
    """
--log-colors --threads-http
""",
)

"""What asks for the way pyctl works anyway, or for something that nobody can see: no word about it."""

IGNORED: Mapping[str, int] = _names(
    """
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-30b-default
--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default --perf --log-jsonl
-bs --backend-sampling --context-shift -sp --special
-nocb --no-cont-batching --reuse-port --ui-mcp-proxy --webui-mcp-proxy -ag --agent
--models-autoload --skip-chat-parsing --fim-qwen-7b-spec --fim-qwen-14b-spec
""",
    """
-C --cpu-mask -Cr --cpu-range --cpu-strict --prio -Cb --cpu-mask-batch -Crb --cpu-range-batch
--cpu-strict-batch --prio-batch --poll-batch --keep -dt --defrag-thold --rpc --control-vector
--control-vector-scaled -ctxcp
--ctx-checkpoints --swa-checkpoints -r --reverse-prompt
--mtmd-batch-max-tokens --video-fps --video-timestamp-interval
--video-ffmpeg-dir --ui-config --webui-config --ui-config-file --webui-config-file
--tools --tools-runtime --mcp-servers-config --mcp-servers-json --cache-reuse --models-dir
--models-preset --models-max -sps --slot-prompt-similarity --log-prompts-dir -to --timeout
-lcs --lookup-cache-static -lcd --lookup-cache-dynamic
--spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict
--cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd
--cpu-mask-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch
--prio-batch-draft --spec-draft-poll-batch --poll-batch-draft --spec-draft-p-split --draft-p-split
--spec-ngram-simple-min-hits --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-min-hits
--spec-ngram-mod-n-min
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

REMOVED: Mapping[str, str] = {
    **dict.fromkeys(("--draft", "--draft-n", "--draft-max"), "--spec-draft-n-max or --spec-ngram-mod-n-max"),
    **dict.fromkeys(("--draft-min", "--draft-n-min"), "--spec-draft-n-min"),
    "--spec-ngram-size-n": "the respective --spec-ngram-*-size-n",
    "--spec-ngram-size-m": "the respective --spec-ngram-*-size-m",
    "--spec-ngram-min-hits": "the respective --spec-ngram-*-min-hits",
}

"""What ends llama-server with a word about what is there instead."""
