from __future__ import annotations

import json
import logging
from datetime import datetime

import pytest

from pyctl.chat.template import Template
from pyctl.errors import ModelError, RequestError
from tests.unit.chat.conftest import unpacked

USER = {"role": "user", "content": "Hi <b> ü"}


def render(source: str, **kwargs: object) -> str:
    return Template(source, "<s>", "</s>").render([USER], **kwargs)  # type: ignore[arg-type]


def test_block_lines_leave_no_blanks() -> None:
    assert render("  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\n") == "user\n"


def test_tojson_escapes_neither_html_nor_letters() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b> ü"}'
    assert (
        render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}")
        == '{\n "a": 2,\n "b": 1\n}'
    )


def test_variables_of_the_template() -> None:
    assert (
        render("{{ bos_token }}{{ eos_token }}{{ x }}{{ add_generation_prompt }}", x=7)
        == "<s></s>7True"
    )
    assert render("{{ tools is none }}") == "True"
    before = datetime.now()
    assert render("{{ strftime_now('%Y') }}") in [str(day.year) for day in (before, datetime.now())]


def test_the_day_and_the_tools_as_text_are_given_as_llama_server_gives_them() -> None:
    before = datetime.now()
    found = render("{{ date_string }}|{{ datetime }}").split("|")
    assert found in [
        [day.strftime("%d %b %Y"), day.strftime("%b %d %Y")] for day in (before, datetime.now())
    ]
    assert render("{{ date_string }}", date_string="26 Jul 2024") == "26 Jul 2024"
    tools = [{"type": "function", "function": {"name": "ü"}}]
    assert json.loads(render("{{ functions }}", tools=tools)) == tools
    assert render("{{ functions }}") == ""
    assert render("{{ functions is defined }}|{{ messages | length }}") == "True|1"


def test_loop_controls_and_generation_blocks() -> None:
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}!") == "user!"


def test_what_the_template_objects_to_is_the_clients_error() -> None:
    with pytest.raises(RequestError, match="no thanks"):
        render("{{ raise_exception('no thanks') }}")
    with pytest.raises(RequestError, match="chat template"):
        render("{{ messages[0].content + 1 }}")
    with pytest.raises(RequestError, match="nothing"):
        render("{{ nothing.at_all() }}")


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("nothing.at_all", ""),
        ("'a' + m.x", "a"),
        ("m.x + 'a'", "a"),
        ("'a' + m.x.y.z + 'b'", "ab"),
        ("'a' + none", "a"),
        ("none + 'a'", "a"),
        ("m['x']['y'][0] ~ 'a'", "a"),
        ("m.content.x + 'a'", "a"),
        ("m.x.strip().upper() + m.x.replace('a', 'b')", ""),
        ("m.x.items() | list | length", "0"),
        ("m.x is defined or m.x.y is defined", "False"),
        ("m.x | default('d') + m.x.y | default('e')", "de"),
        ("'a' in m.x or m.x.y", ""),
        ("{'a': m.x} | tojson", '{"a": null}'),
        ("m.x + m.x", None),
        ("m.x + 1", None),
        ("m.x.split('a')", None),
        ("none + 1", None),
        ("[m] + none", None),
    ],
)
def test_a_missing_member_is_nothing_as_in_llama_server(expression: str, text: str | None) -> None:
    source = f"{{% set m = messages[0] %}}{{{{ {expression} }}}}"
    if text is None:
        with pytest.raises(RequestError):
            render(source)
    else:
        assert render(source) == text


def test_a_tool_whose_parameter_is_not_described() -> None:
    source = unpacked("templates/CohereForAI-c4ai-command-r-plus-tool_use.jinja").read_text()
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": ["x"]}, "b": {"type": "string", "description": None}},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": parameters},
    }
    assert "a (" in Template(source).render([USER], tools=[tool])


def test_a_broken_source_is_an_error_of_the_model() -> None:
    with pytest.raises(ModelError, match="line 2"):
        Template("fine\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].__class__ }}",
        "{% for x in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{{ messages[0].role.__class__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    def outcome() -> str:
        try:
            return Template(source).render([USER])
        except RequestError as error:
            return str(error)

    said = outcome()
    assert said == "" or "unsafe" in said or "not safely callable" in said


def test_a_key_named_like_a_method_is_found_by_index() -> None:
    call = {"role": "user", "content": "", "items": [1], "keys": 2}
    assert Template("{{ messages[0]['keys'] }}{{ messages[0]['items'][0] }}").render([call]) == "21"
    assert (
        Template("{% for k, v in messages[0].items() %}{{ k }} {% endfor %}").render([USER])
        == "role content "
    )


def test_no_template_means_chatml(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        template = Template("")
    assert "ChatML" in caplog.text
    messages = [{"role": "system", "content": "S"}, USER]
    expected = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi <b> "
        "ü<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(messages) == expected
    assert template.render(messages, add_generation_prompt=False) == expected.removesuffix(
        "<|im_start|>assistant\n"
    )


def test_a_byte_order_mark_is_no_part_of_a_prompt() -> None:
    """A byte order mark of a file, or of metadata made from one, is no part of a prompt."""
    template = Template("\ufeff{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": "\ufeffhi"}]) == "\ufeffhi"
