"""The bodies that the contract tests send: each documented field with valid, extreme and invalid
values.

Sources: tools/server/README.md of the pinned llama.cpp release, and what its tests send.
"""

from __future__ import annotations

from typing import Any

from tests.functions import function

__all__ = [
    "CALLING",
    "CHAT",
    "COMPLETION",
    "HI",
    "INFILL",
    "MESSAGES",
    "OAI_COMPLETION",
    "REASONING",
    "RESPONSES",
    "SCHEMA",
    "SHARED",
    "TEMPLATE",
    "TOOL",
    "TOOL_TURN",
]

TOOL = function(
    "weather",
    description="The weather of a day",
    required=["tomorrow"],
    tomorrow={"type": "boolean"},
)
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"tomorrow": true}'},
}
HI = [{"role": "user", "content": "Hello"}]
TOOL_TURN = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
CALLING = {"<tool_call>": 100}
"""Makes the model, whose words are random, call a tool at once; the grammar does the rest."""
REASONING = 'root ::= "hm\\n</think>\\n\\nyes"'
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAA"
PIXEL += "DUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

# Fields of every endpoint that generates: a valid value first, then values at and over the edge.
SHARED: dict[str, tuple[Any, ...]] = {
    "temperature": (0.5, -1, "hot", None),
    "dynatemp_range": (0.2, "x"),
    "dynatemp_exponent": (1.5, "x"),
    "top_k": (5, -3, "x"),
    "top_p": (0.5, 7, "x"),
    "min_p": (0.1, -1, "x"),
    "top_n_sigma": (1.0, "x"),
    "xtc_probability": (0.5, 3, "x"),
    "xtc_threshold": (0.2, 3, "x"),
    "typical_p": (0.9, "x"),
    "repeat_last_n": (8, -1, "x"),
    "repeat_penalty": (1.2, "x"),
    "presence_penalty": (0.5, "x"),
    "frequency_penalty": (0.5, "x"),
    "dry_multiplier": (0.8, "x"),
    "dry_base": (2.0, 0.5, "x"),
    "dry_allowed_length": (3, -1, "x"),
    "dry_penalty_last_n": (16, -1, "x"),
    "dry_sequence_breakers": (["\n", "*"], [], "x", [1]),
    "mirostat": (1, 2, 7, "x"),
    "mirostat_tau": (3.0, "x"),
    "mirostat_eta": (0.2, "x"),
    "adaptive_target": (0.4, 3, "x"),
    "adaptive_decay": (0.5, 2, "x"),
    "min_keep": (2, -1, "x"),
    "seed": (7, -1, "x"),
    "ignore_eos": (True, "x"),
    "logit_bias": (
        [[40, 2.5]],
        [[40, False]],
        [["ab", -1.0]],
        {"40": 1.5},
        {"ab": -2},
        [[10**6, 1]],
        "x",
        [[1]],
    ),
    "stop": (["e"], "e", [], 7, [7]),
    "grammar": ('root ::= "yes"', "root ::= nowhere", "root ::= (", 7),
    "json_schema": ({"enum": ["a"]}, {}, {"type": "wizard"}, 7),
    "samplers": (["top_k", "temperature"], ["nowhere"], "kt", [], 7),
    "n_predict": (3, 0, -1, -2, "x"),
    "max_tokens": (3, 0, "x"),
    "n_keep": (4, -1, -2, "x"),
    "n_discard": (4, -1, "x"),
    "n_indent": (2, -1, "x"),
    "n_cache_reuse": (16, -1, "x"),
    "t_max_predict_ms": (1000, -2, "x"),
    "id_slot": (1, 0, -1, 9, "x"),
    "cache_prompt": (False, "x"),
    "return_tokens": (True, "x"),
    "timings_per_token": (True, "x"),
    "return_progress": (True, "x"),
    "sse_ping_interval": (5, -1, -2, "x"),
    "n_probs": (3, 0, -1, "x"),
    "post_sampling_probs": (True, "x"),
    "backend_sampling": (False, "x"),
    "response_fields": (["content", "generation_settings/n_predict"], ["nowhere"], "content", [7]),
    "lora": ([], [{"id": 0, "scale": 0.5}], "x"),
    "verbose": (True, "x"),
    "stream_options": ({"include_usage": True}, {}, "x", {"include_usage": "x"}),
    "stream": ("x", None),
    "model": ("other", 7),
    "unknown_field": ("x",),
}

COMPLETION: dict[str, tuple[Any, ...]] = {
    "prompt": (
        "",
        [],
        [40, 41],
        [40, "ab", 41],
        ["ab", "cd"],
        [[40, 41], "ab"],
        [[40, "ab"], [41], "cd", {"prompt_string": "x"}],
        {"prompt_string": "ab"},
        {"prompt_string": "ab", "multimodal_data": [PIXEL]},
        {"prompt": "ab"},
        [10**6],
        [-1],
        7,
        None,
        [None],
        [1.5],
        "x" * 20000,
    ),
    "n_cmpl": (2, 0, 99, "x"),
    "n": (2, 0),
}

OAI_COMPLETION: dict[str, tuple[Any, ...]] = {
    "n": (2, 0, 99),
    "logprobs": (2, 0, True, "x"),
    "echo": (False, True),
    "suffix": ("x",),
    "best_of": (1, 2),
    "user": ("x",),
}

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
CHAT: dict[str, tuple[Any, ...]] = {
    "messages": (
        [],
        "Hello",
        None,
        [7],
        [{}],
        [{"role": "user"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": []}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "wizard", "text": "a"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}],
        [
            {
                "role": "user",
                "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
            }
        ],
        [{"role": "system", "content": "Be brief"}, *HI],
        [{"role": "developer", "content": "Be brief"}, *HI],
        [*HI, {"role": "system", "content": "Be brief"}, *HI],
        [*HI, {"role": "assistant"}],
        [*HI, {"role": "assistant", "content": "Hel"}],
        [*HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [*HI, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, *HI],
        [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        TOOL_TURN,
        [*HI, {"role": "assistant", "tool_calls": [CALL]}, TOOL_TURN[2]],
        [
            *HI,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**CALL, "function": {"name": "weather"}}],
            },
        ],
        [*HI, {"role": "assistant", "content": "", "tool_calls": "x"}],
        [{"role": "user", "content": "x" * 20000}],
    ),
    "n": (2, 0, 99, "x"),
    "logprobs": (True, False, "x"),
    "top_logprobs": (2, 99, "x"),
    "max_completion_tokens": (3, "x"),
    "response_format": (
        {"type": "text"},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema"},
        {"type": "wizard"},
        "json",
        {},
    ),
    "tools": ([], [TOOL], "x", [{}], [{"type": "wizard"}], [{"type": "function"}]),
    "tool_choice": (
        "auto",
        "none",
        "required",
        "wizard",
        {"type": "function", "function": {"name": "weather"}},
    ),
    "parallel_tool_calls": (True, "x"),
    "parse_tool_calls": (False, "x"),
    "chat_template_kwargs": ({"enable_thinking": False}, {"enable_thinking": "x"}, {}, "x", []),
    "reasoning_effort": ("none", "low", "wizard", 7),
    "reasoning_format": ("none", "auto", "deepseek", "deepseek-legacy", "wizard", 7),
    "reasoning_control": (True, "x"),
    "reasoning_budget_tokens": (2, 0, -1, -2, "x"),
    "thinking_budget_tokens": (2,),
    "add_generation_prompt": (False, "x"),
    "continue_final_message": (True, False, "content", "x"),
    "generation_prompt": ("x", 7),
    "store": (True,),
    "user": ("x",),
    "service_tier": ("auto",),
}

MESSAGES: dict[str, tuple[Any, ...]] = {
    "system": ("Be brief", [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}], 7),
    "messages": (
        [],
        "x",
        None,
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "data": ""}}],
            }
        ],
        [*HI, {"role": "assistant", "content": "Hel"}],
        [
            *HI,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
            },
            *HI,
        ],
        [
            *HI,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "rain"}],
            },
        ],
    ),
    "max_tokens": (3, "x"),
    "temperature": (0, "x"),
    "top_p": (0.5,),
    "top_k": (5,),
    "stop_sequences": (["e"], "e"),
    "metadata": ({"user_id": "x"},),
    "thinking": (
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "disabled"},
        {"type": "adaptive"},
        "x",
    ),
    "tools": ([{"name": "weather", "inputSCHEMA": TOOL["function"]["parameters"]}], [{}], "x"),
    "tool_choice": (
        {"type": "auto"},
        {"type": "any"},
        {"type": "tool", "name": "weather"},
        {"type": "none"},
        "x",
    ),
    "grammar": (REASONING,),
}

RESPONSES: dict[str, tuple[Any, ...]] = {
    "input": (
        "Hello",
        [],
        7,
        None,
        HI,
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}],
        [{"role": "user", "content": [{"type": "wizard"}]}],
        [
            *HI,
            {
                "type": "function_call",
                "call_id": "c",
                "name": "weather",
                "arguments": '{"tomorrow": true}',
            },
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ],
        [
            *HI,
            {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
        ],
    ),
    "instructions": ("Be brief", 7),
    "max_output_tokens": (3, "x"),
    "previous_response_id": ("resp_nowhere", None),
    "conversation": ("conv_nowhere", None),
    "reasoning": ({"effort": "low"}, {"effort": "none"}, "x"),
    "text": (
        {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        {"format": {"type": "text"}},
    ),
    "tools": ([{"type": "function", **TOOL["function"]}], [{"type": "web_search"}], "x"),
    "tool_choice": ("required", "none"),
    "store": (True, False),
    "grammar": (REASONING,),
}

INFILL: dict[str, tuple[Any, ...]] = {
    "input_prefix": ("def f(", None, 7),
    "input_suffix": (")", None, 7),
    "input_extra": (
        [{"filename": "a.py", "text": "x = 1"}],
        [{"text": "x"}],
        [{}],
        [{"text": 7}],
        "x",
    ),
    "prompt": ("a", 7),
}

TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools or (messages and messages[0].role == 'system') -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if tools -%}
    {{- '# Tools\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}{{- '\\n</tools>\\n' -}}
  {%- endif -%}
  {%- if messages[0].role == 'system' -%}{{- text(messages[0].content) -}}{%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {%- if not loop.first -%}{{- raise_exception('System message must be at the beginning.') -}}{%- endif -%}
  {%- elif message.role == 'user' -%}
    {{- '<|im_start|>user\\n' + text(message.content) + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' -}}
    {{- text(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function -%}
      {{- '\\n\\n' if loop.first and message.content else ('' if loop.first else '\\n') -}}
      {{- '<tool_call>\\n<function=' + function.name + '>\\n' -}}
      {%- for name, value in function.arguments | items -%}
        {{- '<parameter=' + name + '>\\n' -}}
        {{- value if value is string else value | tojson -}}
        {{- '\\n</parameter>\\n' -}}
      {%- endfor -%}
      {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- raise_exception('Unexpected message role.') -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' -}}
{%- endif -%}
"""
"""A chat template as Qwen's models have: a reasoning block, tool calls in XML, no system message
inside.
"""
