"""Grammars on a real vocabulary: replies of a random model are instances of the schema."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.chat.constraint import Constraint, GrammarBuilder, json_constraint, reply_constraint
from pyctl.chat.reasoning import ReasoningLimit
from pyctl.chat.reply import THINK
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Piece
from pyctl.engine.sampling import Sampling
from pyctl.errors import RequestError, UnavailableError
from pyctl.llama.loader import Loaded, load
from pyctl.llama.sampling.grammar import Grammar, GrammarCompiler
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import Prompt, as_tokens
from tests.effort import examples
from tests.unit.engine.drive import Reply, ask, request, run_all


def said(model: Loaded, n: int = 400, **fields: Any) -> Reply:
    prompt = Prompt(as_tokens(model.tokenizer.tokenize("Say:")))
    sampling = Sampling(**{"seed": 1, "temperature": 1.0, **fields})
    return ask(
        Engine(model.backend, RamCache(0, 0), EngineSettings()), prompt, n, sampling=sampling
    )


def bound(constraint: Constraint) -> dict[str, Any]:
    """Return the fields of Sampling that carry ``constraint``."""
    return {
        "grammar": constraint.grammar,
        "grammar_kind": constraint.kind,
        "grammar_lazy": bool(constraint.triggers),
        "grammar_triggers": constraint.triggers,
        "grammar_hidden": constraint.hidden,
        "grammar_prefill": constraint.prefill,
    }


SCHEMAS: list[Any] = [
    {"type": "boolean"},
    {"type": ["null", "boolean"]},
    {"enum": ['a"b', "c\\d", "e\nf", "ü", 1, None, {"x": [1, "y"]}]},
    {"const": {"a": [1, 2.5, "]"]}},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1001},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    {"type": "string", "pattern": '^(a|b"c|\\\\|[^a-z]){1,3}$'},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": False, "minItems": 2},
    {
        "type": "object",
        "properties": {"b": {"type": "boolean"}, "a": {"enum": [1, 2]}, 'c\n"': {"type": "null"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {
        "properties": {"kind": {"const": "x"}, "key": {"const": 1}},
        "required": ["kind"],
        "additionalProperties": {"type": "string", "maxLength": 2},
    },
    {
        "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {"type": "boolean"}}}],
        "required": ["b"],
        "$defs": {
            "a": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        },
    },
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"anyOf": [{"const": 1}, {"type": "boolean"}]}}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_replies_are_instances(model: Loaded, schema: Any) -> None:
    fields = bound(json_constraint(schema))
    ended = 0
    for seed in range(3):
        reply = said(model, seed=seed, **fields)
        assert reply.done is not None, reply.error
        if reply.done.stop_type == "eos":
            ended += 1
            jsonschema.validate(json.loads(reply.text), schema, jsonschema.Draft202012Validator)
    assert ended, "no reply came to its end"


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["one", "two", 3]},
        {"const": '\\"'},
        {"type": "integer", "minimum": -20, "maximum": 1000},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-f]{1,3}$"},
    ]
)


def objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text('ab"\\-', min_size=1, max_size=3)

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        properties = draw(st.dictionaries(keys, schemas, max_size=3))
        required = [key for key in properties if draw(st.booleans())]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return build()


SIMPLE = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner),
        st.builds(lambda *parts: {"anyOf": list(parts)}, inner, inner),
    ),
    max_leaves=5,
)


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(SIMPLE, st.integers(0, 1000))
def test_replies_to_any_simple_schema_are_instances(model: Loaded, schema: Any, seed: int) -> None:
    reply = said(model, 300, seed=seed, **bound(json_constraint(schema)))
    assert reply.done is not None, reply.error
    if reply.done.stop_type == "eos":
        jsonschema.validate(json.loads(reply.text), schema, jsonschema.Draft202012Validator)


def test_a_lazy_grammar_binds_from_its_trigger_on(model: Loaded) -> None:
    """Text before the trigger is that of a free reply, what follows obeys the grammar, and a
    trigger that never appears changes nothing.
    """
    grammar = 'root ::= "e" [0-9]{3}'
    reply = said(
        model, 60, grammar=grammar, grammar_lazy=True, grammar_triggers=("e",), ignore_eos=True
    )
    head, _, tail = reply.text.partition("e")
    assert head
    assert tail[:3].isdigit(), reply.text
    free = said(model, 60, ignore_eos=True).text
    assert free.startswith(head)
    assert (
        said(
            model,
            60,
            grammar=grammar,
            grammar_lazy=True,
            grammar_triggers=("\x07x",),
            ignore_eos=True,
        ).text
        == free
    )


def test_a_lazy_grammar_that_never_wakes_changes_nothing(model: Loaded) -> None:
    lazy = {"grammar": 'root ::= "x"', "grammar_lazy": True, "grammar_triggers": ("\x07x",)}
    for seed in range(3):
        options = {"seed": seed, "ignore_eos": True, "dry_multiplier": 0.8, "repeat_penalty": 1.1}
        assert said(model, 80, **options, **lazy).text == said(model, 80, **options).text


def test_a_lazy_grammar_sleeps_on_where_it_does_not_allow_what_was_found(model: Loaded) -> None:
    grammar = {
        "grammar": 'root ::= "e!" [0-9]{3}',
        "grammar_lazy": True,
        "grammar_triggers": ("(e[x!])",),
    }
    tokens = {letter: model.tokenizer.tokenize(letter)[0] for letter in "e!x"}
    vocab = model.tokenizer.vocab
    woken = Grammar(vocab, Sampling(**grammar), GrammarCompiler(model.tokenizer))
    for letter in "exxe":
        woken.accept(tokens[letter])
        assert woken.is_asleep
    woken.accept(tokens["!"])
    assert not woken.is_asleep
    assert not woken.allows(tokens["x"])


def test_the_texts_of_the_vocabulary_are_kept_once(model: Loaded) -> None:
    """llguidance has its own copy of them; lists of as many objects would take 8 MiB more."""
    compiler = GrammarCompiler(model.tokenizer)
    compiler.matcher(json_constraint({"type": "object"}).grammar)
    gc.collect()
    n_vocab = model.tokenizer.n_vocab
    lists = (each for each in gc.get_objects() if isinstance(each, list) and len(each) == n_vocab)
    assert not [each for each in lists if all(isinstance(one, bytes) for one in each)]


def begun(text: str, prefill: str) -> tuple[dict[str, Any], ...]:
    """Return a grammar and a schema of ``text`` and a digit, of which the prompt holds
    ``prefill``.
    """
    constraint = reply_constraint(
        {"enum": [f"{text}1", f"{text}2"]}, THINK, "content", f'"{prefill}'
    )
    return {"grammar": f'root ::= "{text}" [0-9] "!"', "grammar_prefill": prefill}, bound(
        constraint
    )


def test_a_constraint_reads_what_the_prompt_holds_of_the_reply(model: Loaded) -> None:
    for fields in begun("abc", "abc"):
        assert re.fullmatch('[0-9]!|[12]"', said(model, **fields).text)
    for fields in begun("abc", "x"):
        assert isinstance(said(model, **fields).error, RequestError)


def test_a_constraint_that_allows_nothing_more_ends_the_reply(model: Loaded) -> None:
    for fields, text in (
        ({"grammar": 'root ::= "ab"'}, "ab"),
        (bound(json_constraint({"const": "ab"})), '"ab"'),
    ):
        reply = said(model, **fields, ignore_eos=True)
        assert reply.text == text
        assert reply.done.stop_type == "eos"


def test_any_text_until_a_word(model: Loaded) -> None:
    grammar = GrammarBuilder()
    fields = bound(grammar.constraint(f"{grammar.until('aab')} {grammar.text('!')}"))
    # Likes the letters of the word, so that all their beginnings turn up.
    likes = tuple((model.tokenizer.tokenize(letter)[0], 8.0) for letter in "ab")
    for seed in range(4):
        text = said(model, 200, seed=seed, logit_bias=likes, **fields).text
        if "aab" in text:
            assert text.index("aab") + len("aab!") == len(text), text


def test_a_broken_trigger_is_refused(model: Loaded) -> None:
    fields = {"grammar": 'root ::= "a"', "grammar_lazy": True}
    assert isinstance(said(model, grammar_triggers=("(",), **fields).error, RequestError)
    with pytest.raises(RequestError):
        Sampling(**fields)


def test_the_grammar_changes_nothing_that_it_allows(model: Loaded) -> None:
    free = said(model, 40, ignore_eos=True)
    assert said(model, 40, ignore_eos=True, grammar="root ::= [^\\x00]*").text.startswith(
        free.text[:5]
    )


def test_a_schema_changes_nothing_that_it_allows(model: Loaded) -> None:
    text = json_constraint({"type": "string", "minLength": 30})
    once = said(model, 20, **bound(text))
    assert said(model, 20, **bound(text)).tokens == once.tokens
    assert said(model, 20, seed=2, **bound(text)).tokens != once.tokens


def test_a_lazy_constraint_binds_from_its_trigger_on(model: Loaded) -> None:
    grammar = GrammarBuilder()
    constraint = grammar.constraint(
        f"{grammar.text('e')} {grammar.json({'type': 'boolean'})}", ("e",)
    )
    free = said(model, 60, ignore_eos=True).text
    head, _, tail = said(model, 60, ignore_eos=True, **bound(constraint)).text.partition("e")
    assert tail in ("true", "false")
    assert free.startswith(head)


def test_what_is_forced_is_read_by_the_constraint(model: Loaded) -> None:
    constraint = reply_constraint({"type": "boolean"}, THINK, "reasoning")
    (close,) = model.tokenizer.tokenize("</think>")
    read = tuple(model.tokenizer.tokenize("<think>"))
    texts = {close: b"</think>"}
    limit = ReasoningLimit(
        5, "<think>", ("</think>",), (close,), read, {**texts, read[-1]: b"<think>"}
    )
    prompt = Prompt(as_tokens(model.tokenizer.tokenize("Say:<think>")))
    engine = Engine(model.backend, RamCache(0, 0), EngineSettings())
    sampling = Sampling(seed=1, logit_bias=((close, -1e9),), **bound(constraint))
    reply = ask(engine, prompt, 60, sampling=sampling, reasoning=limit)
    text = model.tokenizer.detokenize(reply.tokens).decode("utf-8", "replace")
    assert reply.tokens[5] == close
    assert text.partition("</think>")[2].strip() in ("true", "false")


def test_a_constraint_is_checked_before_anything_is_evaluated(model: Loaded) -> None:
    for schema in (
        {"$ref": "#"},
        {"allOf": [{"minLength": 3}, {"maxLength": 2}], "type": "string"},
    ):
        with pytest.raises(RequestError):
            model.backend.vocabulary.check(Sampling(**bound(json_constraint(schema))))
    with pytest.raises(RequestError, match="line 1"):
        model.backend.vocabulary.check(Sampling(grammar="unknown"))


def test_a_constraint_can_be_checked_while_the_model_is_freed(
    model_path: Callable[[str], Path],
) -> None:
    sampling = Sampling(**bound(json_constraint({"type": "boolean"})))
    settings = ModelSettings(path=str(model_path("tiny-hybrid")), n_ctx=512, n_threads=1)
    backend = load(settings).backend
    backend.unload()
    backend.vocabulary.check(sampling)
    backend.load()
    backend.vocabulary.check(sampling)
    backend = load(settings).backend
    backend.vocabulary.close()
    with pytest.raises(UnavailableError):
        backend.vocabulary.check(sampling)
    backend.unload()


def test_probabilities_after_sampling(model: Loaded) -> None:
    """Probabilities after sampling cover the candidates that are left and sum to 1; the chosen
    token is among them, and alone if the reply is greedy.
    """
    prompt = Prompt(as_tokens(model.tokenizer.tokenize("Say:")))
    engine = Engine(model.backend, RamCache(0, 0), EngineSettings())
    for sampling in (
        Sampling(seed=1, top_k=5, post_sampling_probs=True, ignore_eos=True),
        Sampling(temperature=0.0, post_sampling_probs=True, ignore_eos=True),
        Sampling(
            seed=1, top_k=5, post_sampling_probs=True, **bound(json_constraint({"const": "x" * 40}))
        ),
    ):
        handle = RequestHandle(request(prompt, 6, sampling=sampling, n_probs=10))
        run_all(engine, handle)
        probs = [
            entry for event in handle.drain() if isinstance(event, Piece) for entry in event.probs
        ]
        assert len(probs) == 6
        for own, *best in probs:
            assert len(best) <= 5
            assert own in best
            assert sum(p for _, p in best) == pytest.approx(1.0, abs=1e-4)
            assert sampling.temperature > 0.0 or best == [own]


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.text('ab\\d.[]()-^$|*+?{1,}"\n ', max_size=12))
def test_what_a_pattern_becomes_can_be_parsed(model: Loaded, pattern: str) -> None:
    try:
        constraint = json_constraint({"type": "string", "pattern": pattern})
    except RequestError:
        return
    reply = said(model, 6, **bound(constraint))
    assert reply.done is not None or "allows no reply" in str(reply.error), (
        constraint,
        reply.error,
    )


@pytest.mark.parametrize(
    ("where", "prefill"), [("start", ""), ("reasoning", ""), ("content", "[tr")]
)
def test_a_whole_reply_ends_in_an_instance(model: Loaded, where: Any, prefill: str) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
    likes = tuple((model.tokenizer.tokenize(text)[0], 16.0) for text in ("<think>", "</think>"))
    reply = said(
        model, 300, **bound(reply_constraint(schema, THINK, where, prefill)), logit_bias=likes
    )
    reasoning, close, content = (
        model.tokenizer.detokenize(reply.tokens).decode().rpartition("</think>")
    )
    assert bool(close) == (where != "content")
    assert reasoning.startswith("<think>") == (where == "start")
    jsonschema.validate(json.loads(prefill + content), schema)
