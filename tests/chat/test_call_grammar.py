from __future__ import annotations

import json
from typing import Any

import pytest

from pyctl.chat.call_formats.call_format import CallFormat
from pyctl.chat.call_formats.hermes import HermesFormat
from pyctl.chat.call_formats.qwen import QwenFormat
from pyctl.chat.call_formats.registry import FALLBACK, find_call_format
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.replay import Replay
from pyctl.chat.template import Template, TemplateCapabilities
from pyctl.chat.tools import Tools
from pyctl.errors import RequestError
from tests.chat import toy
from tests.chat.conftest import unpacked

DAYS = {"type": "integer"}
CITY = {"type": "string"}
PARAMETERS = {"type": "object", "properties": {"city": CITY, "days": DAYS, "how": {"enum": ["a", "b"]}}}


def tools(parallel: bool = True, forced: bool = True, **parameters: Any) -> Tools:
    function = {"name": "look_up", "parameters": {**PARAMETERS, **parameters}}
    return Tools.of([{"type": "function", "function": function}], parallel, forced)


def accepts(grammar: str, text: str) -> bool:
    """Whether llama.cpp takes ``text`` as a whole, one letter after the other."""
    api = pytest.importorskip("llama_cpp.llama_cpp")
    from pyctl.engine.llama.grammar import LlamaGrammar
    from pyctl.engine.sampling import Sampling

    bound = LlamaGrammar(vocab(api), Sampling(grammar=grammar))
    try:
        for token in [*tokens(api, text), api.llama_vocab_eos(vocab(api))]:
            if not bound.allows(token):
                return False
            bound.accept(token)
        return True
    finally:
        bound.close()


_models: list[Any] = []


def vocab(api: Any) -> Any:
    if not _models:
        params = api.llama_model_default_params()
        params.vocab_only = True
        path = unpacked("ggml-vocab-qwen35.gguf")
        _models.append(api.llama_model_load_from_file(str(path).encode(), params))
    return api.llama_model_get_vocab(_models[0])


def tokens(api: Any, text: str) -> list[int]:
    data = text.encode()
    buffer = (api.llama_token * (len(data) + 8))()
    return list(buffer[: api.llama_tokenize(vocab(api), data, len(data), buffer, len(buffer), False, True)])


def xml(*arguments: str) -> str:
    return f"<tool_call>\n<function=look_up>\n{''.join(arguments)}</function>\n</tool_call>"


PARIS = "<parameter=city>\nParis <3\n</para>\n</parameter>\n"
THREE = "<parameter=days>\n3\n</parameter>\n"
HOW = "<parameter=how>\na\n</parameter>\n"


@pytest.mark.parametrize(
    ("required", "text", "accepted"),
    [
        ([], xml(), True),
        ([], xml(THREE, PARIS), True),
        (["city", "days"], xml(THREE, PARIS), True),
        (["city", "days"], xml(PARIS, HOW, THREE, HOW), True),
        (["city", "days"], xml(PARIS), False),
        (["city", "days"], xml(), False),
        ([], xml(THREE.replace("3", "three")), False),
        ([], xml(HOW.replace("\na", "\nc")), False),
        ([], xml().replace("look_up", "other"), False),
        ([], "Well. " + xml(), False),
        ([], "", False),
        ([], "\n" + xml() + "\n" + xml(), True),
    ],
)
def test_calls_between_tags(required: list[str], text: str, accepted: bool) -> None:
    assert accepts(QwenFormat().call_grammar(tools(required=required)), text) is accepted


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [({"city": "P", "days": 3}, True), ({"days": 3}, False), ({"city": "P", "days": "x"}, False)],
)
def test_calls_as_json(arguments: Any, accepted: bool) -> None:
    grammar = HermesFormat().call_grammar(tools(required=["city"]))
    call = json.dumps({"name": "look_up", "arguments": arguments})
    assert accepts(grammar, f"<tool_call>\n{call}\n</tool_call>") is accepted


def test_one_call_and_no_more() -> None:
    grammar = QwenFormat().call_grammar(tools(parallel=False))
    assert accepts(grammar, xml())
    assert not accepts(grammar, xml() + "\n" + xml())


def test_reasoning_first() -> None:
    always = QwenFormat().call_grammar(tools(), think_close="</think>")
    assert accepts(always, f"So </thin\n</think>\n\n{xml()}")
    assert not accepts(always, xml())
    maybe = QwenFormat().call_grammar(tools(), think_open="<think>", think_close="</think>")
    assert accepts(maybe, f"<think>So</think>\n\n{xml()}")
    assert accepts(maybe, xml())


def test_many_required_arguments_come_in_the_order_of_the_schema() -> None:
    many = {f"a{i}": DAYS for i in range(7)}
    grammar = QwenFormat().call_grammar(tools(properties=many, required=list(many)))
    values = [f"<parameter={key}>\n1\n</parameter>\n" for key in many]
    assert accepts(grammar, xml(*values))
    assert not accepts(grammar, xml(*reversed(values)))


def test_a_tool_without_a_schema_takes_what_it_says() -> None:
    none = Tools.of([{"type": "function", "function": {"name": "look_up"}}])
    assert accepts(QwenFormat().call_grammar(none), xml())
    assert not accepts(QwenFormat().call_grammar(none), xml(THREE))
    assert accepts(QwenFormat().call_grammar(tools(properties={}, additionalProperties=True)), xml(THREE, PARIS))
    assert accepts(
        HermesFormat().call_grammar(none), '<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>'
    )


def test_a_schema_that_cannot_be_converted_is_refused() -> None:
    with pytest.raises(RequestError):
        HermesFormat().call_grammar(tools(properties={"a": {"$ref": "https://example.org"}}, required=["a"]))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Qwen3.5-4B", QwenFormat),
        ("Qwen3-Coder", QwenFormat),
        ("Qwen-Qwen3-0.6B", HermesFormat),
        ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", HermesFormat),
    ],
)
def test_the_form_is_found_by_rendering(name: str, form: type[CallFormat]) -> None:
    template = Template(unpacked(f"templates/{name}.jinja").read_text())
    assert type(find_call_format(template, TemplateCapabilities.of(template))) is form
    plain = Template(toy.LLAMA3)
    assert find_call_format(plain, TemplateCapabilities.of(plain)) is FALLBACK


def test_only_what_needs_a_grammar_gets_one(qwen_template: str) -> None:
    chat = ChatFormat(Template(qwen_template), toy.chatml_tokenizer(), replay=Replay("off"))
    hi = [{"role": "user", "content": "Hi"}]

    def grammar(callable_tools: Tools | None, **kwargs: Any) -> tuple[str, tuple[str, ...]]:
        return chat.call_grammar(chat.turn(hi, callable_tools=callable_tools, kwargs=kwargs))

    assert grammar(None) == grammar(tools(forced=False)) == ("", ())
    assert "thought" in grammar(tools())[0]
    assert "thought" not in grammar(tools(), enable_thinking=False)[0]
    strict = Tools.of([{"type": "function", "function": {"name": "f", "strict": True}}])
    for lazy in (tools(parallel=False, forced=False), strict):
        text, triggers = grammar(lazy)
        assert "thought" not in text
        assert triggers == ("(<tool_call>)",)
