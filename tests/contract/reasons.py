"""Why pyctl answers differently from llama-server where it does; a difference without a reason is a
mistake.

A reply is compared by status, content type, members with their types, the values that clients
branch on, and for a stream the sequence of its events. Wording of messages, ids, times and the
number of chunks do not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.contract.probes import Probe
from tests.contract.shape import Reduced, differences

__all__ = ["REASONS", "Verdict", "document", "judge", "summary"]

WRONG = "a value of the wrong kind is refused, where llama-server silently takes the default"
REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "",
        r"^status: 500 / 4\d\d$",
        "bad input is the client's mistake: 4xx where llama-server fails with 500",
    ),
    ("", r"extra (\S+\.)?timings\.\w+_ms$", "says what the cache did"),
    (
        "",
        r"extra (\S+\.)?(generation_settings|params)\.cache_prompt$",
        "shows whether the cache may be used",
    ),
    ("/props", r"extra (full_cache|prefix_cache)$", "shows the cache's policy and size"),
    (
        "/props",
        r"extra model_memory$",
        "says which memory the model has, and where it can be resumed",
    ),
    ("/props", r"extra tool_call_format$", "says which tool calls are parsed"),
    (
        "/props",
        r"extra (cache_type_[kv]|n_gpu_layers|n_layers|n_placement_rules|resolved_settings)$",
        "shows the settings in use, and the reason for each that was chosen automatically",
    ),
    (
        "^/props",
        r"value of bos_token",
        "the model has no such token; llama-server shows what its id would be",
    ),
    ("^/metrics", r"extra pyctl_", "the cache's own metrics"),
    ("^/metrics", r"extra gen_ai_server_", "times by the names of OpenTelemetry's conventions"),
    (
        "",
        r"extra (\S+\.)?usage\.prompt_tokens_details\.cache_write_tokens$",
        "the field of OpenAI for tokens that the cache has taken",
    ),
    ("", r"^status: 500 / 200$", "taken, where llama-server fails with 500"),
    (
        (
            r"(='x'|=7|=\[7\]|kwargs=\[\]|='json'|messages=None|wrong add_special|fraction)(, "
            r"streamed)?$"
        ),
        r"^status: 200 / 400$",
        WRONG,
    ),
    (
        r"(repeat|penalty)_last_n=-1",
        r"^status: 400 / 200$",
        "-1 is the whole context, as earlier releases had it",
    ),
    ("", r"value of .*n_ctx: 4096 / 8192$", "each sequence may use the whole context"),
    (
        "marker in the text",
        "",
        "text that a user types is text, where llama-server counts it as an image",
    ),
    ("image, WebP$", r"^status: 400 / 200$", "WebP is read, too"),
    ("/props", r"value of modalities.video", "nothing is made of videos"),
    (
        "^/ ",
        "^(status: 404 / 200|type: application/json / text/html)$",
        "the page; the llama-server that was asked was built without its own",
    ),
    (
        "/props",
        r"value of chat_template_caps.supports_typed_content",
        "found by rendering; llama-server misses a loop",
    ),
    ("/props", r"value of chat_template: ", "ends as the file does"),
    ("", "header access-control-", "headers that browsers need to send a key from another origin"),
    ("(messages|input)=\\[\\]", "", "a conversation without messages is a mistake, as for OpenAI"),
    (
        "^/apply-template messages=list number 10$",
        "value of prompt",
        "the template itself joins parts of content",
    ),
    ("", r"^(status: 0|type: RemoteProtocolError) / ", "llama-server ends"),
    (
        "json_schema=",
        "value of generation_settings.grammar",
        "a schema becomes another grammar for the same texts",
    ),
    ("ignore_eos", r"logit_bias\[\]", "logit_bias is shown as it was asked for"),
    ("return_progress=True, streamed", r"tokens\[\]: 1 / 0", "progress comes without tokens"),
    ("n_probs=-1", "value of generation_settings.n_probs", "shown as what it means"),
    (
        "^/infill prompt='a'",
        "value of prompt",
        "it begins the reply, as llama-server's README says of it",
    ),
    (
        "(n|n_cmpl)=99",
        r"^status: 400 / 200$",
        "taken one after another when there are fewer sequences",
    ),
    (
        r"(n|n_cmpl)=2, streamed",
        "value of (choices.*)?index",
        "two replies at a time come in any order",
    ),
    (
        "^/v1/completions best_of=2",
        r"^status: 200 / 501$",
        "known and not done: refused, where it asks for something",
    ),
    (
        "^/v1/completions n(_cmpl)?=2, streamed",
        r"missing (\S+\.)?usage",
        "a sum of all, if asked for",
    ),
    (
        "verbose=True",
        "(__verbose|preserved_tokens)",
        "what only developers of llama-server look at, in whole replies",
    ),
    ("(max_tokens|n_predict)=0", "missing .*reasoning_content", "no token is made"),
    (
        "add_generation_prompt=False",
        "reasoning_content|content",
        "without a header the reply opens no reasoning block",
    ),
    (
        "tool_choice=('required'|{'type': '(function|any|tool)')",
        r"^(status: 200 / 400|type: text/event-stream / application/json)$",
        "a call cannot be required of no tool, as for OpenAI",
    ),
    (r"^/v1/messages(/count_tokens)? tools=\[{}\]", r"^status: 200 / 400$", "a tool has a name"),
    (
        "^/v1/completions logprobs=0",
        "logprobs",
        "0 is no alternatives to the tokens of the reply, as in OpenAI's API",
    ),
    ("tools and response_format", "", "the reply follows the schema, or is a call"),
    (
        "^/(completion|v1/(chat/)?completions) (drafting|n-grams), logprobs",
        "logprobs",
        "drafted tokens have them, too",
    ),
    (
        "(drafting|n-grams), (stop|logprobs), streamed",
        "event",
        "llama-server sends drafted tokens one by one",
    ),
    (
        "n-grams",
        "(missing|extra) timings.draft_n",
        "drafts of this conversation's own n-grams, where they pay",
    ),
    (
        "(drafting|n-grams), timings_per_token, streamed",
        "event",
        "counts of drafts before the end are those of now",
    ),
    (
        "(drafting|n-grams), ",
        'speculative.types: "none[^/]*/ "(ngram-mod|draft-mtp)"',
        "what drafts, without none",
    ),
    ("^/v1/embeddings", "value of model", "the model's name, not its path"),
    ("^/ ", r"^status: 404 / 401$", "only health is public"),
    (
        "^/(v1/)?chat/completions",
        r"extra usage\.completion_tokens_details$",
        "tokens of reasoning, as in OpenAI's API",
    ),
    (
        "^/v1/models/",
        r"^status: 404 / 200$",
        "one model, as libraries of OpenAI and Anthropic ask for it",
    ),
    ("responses", r"extra ", "members of OpenAI's API that llama-server leaves out"),
    (
        "responses",
        r'status: "completed" / "incomplete"',
        "as OpenAI says it when the limit of tokens was reached",
    ),
    (
        "conversation='conv_nowhere'",
        "",
        "a stored conversation is refused, where llama-server answers without it",
    ),
    (
        "^/v1/messages.* tools, any",
        "",
        "the reply begins with the call; llama-server lets the model talk before it",
    ),
    ("^/v1/messages.*thinking={'type': 'disabled'}", "", "thinking is off when it is switched off"),
    (
        "^/v1/messages thinking",
        "",
        "the grammar is kept; llama-server drops it from requests of this API",
    ),
    (
        "^/v1/messages stop sequence",
        'stop_reason: "end_turn" / "stop_sequence"',
        "as Anthropic's API says it",
    ),
    (
        "^/v1/messages",
        r"(extra type|value of error\.type: .*)$",
        "errors in the form of Anthropic's API",
    ),
    (
        "^/v1/messages",
        r"extra (\S+\.)?usage\.",
        "counts of Anthropic's API that llama-server leaves out",
    ),
)
"""Deliberate differences: what matches (endpoint and probe; one line of the difference), and why it
is so.
"""


KINDS = (
    (r"^status: 2\d\d / ", "refused by pyctl only"),
    (r"^status: \d+ / 2", "answered by pyctl only"),
    (r"^status: ", "refused with another status"),
    (r"(^|: )(missing|no event) ", "lack a member"),
    (r"^(?!(event[^:]*: )?extra |header access-control-)", "show another value"),
    ("", "add members"),
)
"""Kinds of differences by the pattern of a line, the gravest first."""


@dataclass(frozen=True)
class Verdict:
    """The differences in the replies to ``probe``: lines without a reason, and (line, reason) for
    the others.
    """

    probe: Probe
    new: tuple[str, ...]
    explained: tuple[tuple[str, str], ...]

    @property
    def kind(self) -> str:
        """The gravest of `KINDS` in the differences, or "same"."""
        lines = [*self.new, *(line for line, _ in self.explained)]
        return next(
            (kind for pattern, kind in KINDS if any(re.search(pattern, line) for line in lines)),
            "same",
        )


def judge(probe: Probe, theirs: Reduced, ours: Reduced) -> Verdict:
    """Compare llama-server's reply with ours."""
    where = f"{probe.endpoint} {probe.what}"
    new = []
    explained = []
    for line in differences(theirs, ours, probe.show):
        why = next(
            (
                why
                for place, what, why in REASONS
                if re.search(place, where) and re.search(what, line)
            ),
            None,
        )
        if why is None:
            new.append(line)
        else:
            explained.append((line, why))
    return Verdict(probe, tuple(new), tuple(explained))


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return in words the number of requests answered alike, and the kinds of differences of the
    others.
    """
    counted = Counter(verdict.kind for verdict in verdicts)
    kinds = (f"{counted[kind]} {kind}" for kind in ("same", *(kind for _, kind in reversed(KINDS))))
    n_new = sum(bool(verdict.new) for verdict in verdicts)
    return f"{len(verdicts):,} requests: {', '.join(kinds)}; {n_new} without a reason"


INTRODUCTION = """
Both servers get the same model and the same requests (tests/contract/probes.py). Status, content
type, members with their types, values that clients branch on, and the sequence of a stream's
events are compared. With `KEEP=1` the test writes this file.
"""


def document(verdicts: Sequence[Verdict], head: str) -> str:
    """Return all differences by their reasons, as Markdown; ``head`` says where, when and how they
    were found.
    """
    lines = [
        f"# Answers of llama-server and of pyctl\n{head}",
        INTRODUCTION,
        f"{summary(verdicts)}.",
    ]
    for why in dict.fromkeys(why for _, _, why in REASONS):
        if rows := list(_rows(verdicts, why)):
            title = why[:1].upper() + why[1:]
            lines += [
                "",
                f"## {title}",
                "",
                "| endpoint | requests | for example | llama-server / pyctl |",
            ]
            lines += ["|---|---:|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _rows(verdicts: Sequence[Verdict], why: str) -> Iterator[str]:
    """Yield a row per endpoint: the number of requests that differ for this reason, and the first
    of them.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for verdict in verdicts:
        matching = [line for line, reason in verdict.explained if reason == why]
        if matching:
            line = re.sub(r'"/\S*/', '"/.../', matching[0])  # a path of the machine that asked
            found.setdefault(f"{verdict.probe.method} {verdict.probe.endpoint}", []).append(
                (verdict.probe.what, line)
            )
    for name, examples in found.items():
        what, line = examples[0]
        yield f"| {name} | {len(examples)} | {_cell(what)} | {_cell(line)} |"


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return text if len(text) <= 120 else f"{text[:117]}..."
