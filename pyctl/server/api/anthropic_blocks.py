"""Blocks of Anthropic's messages as texts and images.

A block is read as the text that it holds. One that holds none, or of an unknown type, raises
RequestError: the model would answer a conversation without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pyctl.errors import RequestError
from pyctl.requests.body_reader import Body, Names, json_object
from pyctl.requests.image_sources import ImagePart

__all__ = [
    "MessageBlock",
    "Part",
    "content_parts",
    "has_image",
    "joined",
    "parse_block",
    "parse_blocks",
    "parse_result",
    "parse_server_result",
]

Part = dict[str, Any]
"""A text part of a chat completion, or an `ImagePart`."""

Reader = Callable[["MessageBlock", str], list[Part]]
"""Makes parts of a block, which stands at the place in the request that the text names."""


class MessageBlock(Body, frozen=True):
    """A block of a message or of the system text; its type determines its fields."""

    type: Any = None
    text: str = ""
    thinking: str = ""
    id: Annotated[str, Names("id", "file_id")] = ""
    name: Annotated[str, Names("name", "tool_name")] = ""
    input: Any = None
    tool_use_id: str = ""
    content: Any = None
    source: Any = None
    title: str = ""
    context: str = ""
    tool: Any = None
    tool_changes: list[Any] | None = None


class _Source(Body, frozen=True):
    type: Any = None
    data: str = ""
    url: str = ""
    content: Any = None


def parse_block(value: Any, where: str) -> MessageBlock:
    """Return the block at ``where``. Raises RequestError if it is not an object."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object")
    return MessageBlock.from_json(value)


def parse_blocks(content: list[Any], where: str) -> list[tuple[str, MessageBlock]]:
    """Return the blocks of the list at ``where``, each with its place."""
    return [
        (f"{where}[{index}]", parse_block(value, f"{where}[{index}]"))
        for index, value in enumerate(content)
    ]


def content_parts(block: MessageBlock, where: str) -> list[Part]:
    """Return the texts and images of a block. Raises RequestError if it has none that can be
    read.
    """
    reader = _READERS.get(block.type) if isinstance(block.type, str) else None
    if reader is None:
        raise RequestError(f"{where}: blocks of type {str(block.type)[:80]!r} cannot be read here")
    return reader(block, where)


def parse_result(content: Any, where: str) -> str | list[Part]:
    """Return the result of a tool: a text, or parts if images are among them."""
    parts = _parts_in(content, where)
    return parts if has_image(parts) else joined(parts)


def parse_server_result(content: Any, where: str) -> str:
    """Return the result of a tool that ran at Anthropic's servers, as text with one line for each
    member.
    """
    if content is None or isinstance(content, str):
        return content or ""
    results = content if isinstance(content, list) else [content]
    lines: list[str] = []
    for index, result in enumerate(results):
        lines += _result_lines(result, f"{where}[{index}]" if isinstance(content, list) else where)
    return "\n".join(line for line in lines if line)


def has_image(parts: list[Part]) -> bool:
    """Return whether an image is among ``parts``."""
    return any(isinstance(part, ImagePart) for part in parts)


def joined(parts: list[Part]) -> str:
    """Return ``parts``, which are texts, as one."""
    return "".join(part["text"] for part in parts)


# -- blocks by their type --------------------------------------------------------------------------


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _of_text(block: MessageBlock, where: str) -> list[Part]:
    return [_text(block.text)]


def _of_image(block: MessageBlock, where: str) -> list[Part]:
    source = _source(block)
    if source.type not in ("base64", "url"):
        raise RequestError(f"{where}: the source of an image must be of type base64 or url")
    return [ImagePart(source.url if source.type == "url" else source.data, where)]


def _of_document(block: MessageBlock, where: str) -> list[Part]:
    source = _source(block)
    if source.type == "text":
        parts = [_text(source.data)]
    elif source.type == "content":
        parts = _parts_in(source.content, f"{where}.source.content", ("text", "image"))
    else:
        raise RequestError(
            f"{where}: a document must be plain text: its source must have type text or content"
        )
    return _below([block.title, block.context], parts)


def _of_search_result(block: MessageBlock, where: str) -> list[Part]:
    source = block.source if isinstance(block.source, str) else ""
    return _below([block.title, source], _parts_in(block.content, f"{where}.content", ("text",)))


def _of_compaction(block: MessageBlock, where: str) -> list[Part]:
    if block.content is None:  # a compaction that failed: the messages before it are still there
        return []
    if not isinstance(block.content, str):
        raise RequestError(f"{where}.content must be a string")
    return [_text(block.content)]


def _of_tool_reference(block: MessageBlock, where: str) -> list[Part]:
    return [_text(block.name)]


def _of_output_file(block: MessageBlock, where: str) -> list[Part]:
    return [_text(block.id)]


def _of_nothing(block: MessageBlock, where: str) -> list[Part]:
    return []


_READERS: dict[str, Reader] = {
    "text": _of_text,
    "image": _of_image,
    "document": _of_document,
    "search_result": _of_search_result,
    "compaction": _of_compaction,
    "tool_reference": _of_tool_reference,
    "bash_code_execution_output": _of_output_file,
    "code_execution_output": _of_output_file,
    # Reasoning that only Anthropic can read, and the mark where another model went on: both are no
    # text to any other model.
    "redacted_thinking": _of_nothing,
    "fallback": _of_nothing,
}


def _below(heading: list[str], parts: list[Part]) -> list[Part]:
    """Return ``parts`` after the lines of ``heading`` that are not empty; as one text if they are
    texts.
    """
    lines = [line for line in heading if line]
    if not lines:
        return parts
    if has_image(parts):
        return [_text("\n".join(lines)), *parts]
    return [_text("\n".join([*lines, joined(parts)]))]


def _source(block: MessageBlock) -> _Source:
    return _Source.from_json({} if block.source is None else json_object(block.source, "source"))


def _parts_in(content: Any, where: str, kinds: tuple[str, ...] = ()) -> list[Part]:
    """Return the parts of a content, which may be a text; with ``kinds``, of blocks of these types
    only.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [_text(content)]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of blocks")
    parts: list[Part] = []
    for block_where, block in parse_blocks(content, where):
        if kinds and block.type not in kinds:
            raise RequestError(f"{block_where} must be of type {' or '.join(kinds)}")
        parts += content_parts(block, block_where)
    return parts


# -- results of tools that ran at Anthropic's servers ----------------------------------------------

_RESULT_MEMBERS: dict[str, tuple[str, ...]] = {
    "advisor_result": ("text",),
    "bash_code_execution_result": ("stdout", "stderr", "content"),
    "code_execution_result": ("stdout", "stderr", "content"),
    "text_editor_code_execution_create_result": (),
    "text_editor_code_execution_str_replace_result": ("lines",),
    "text_editor_code_execution_view_result": ("content",),
    "tool_search_tool_search_result": ("tool_references",),
    "web_fetch_result": ("url", "content"),
    "web_search_result": ("title", "url"),
}
"""The readable members of a result by its type. The text of a page that was found is sealed."""


def _result_lines(result: Any, where: str) -> list[str]:
    if not isinstance(result, dict):
        raise RequestError(f"{where} must be an object")
    kind = str(result.get("type"))
    if kind == "text":
        return [joined(content_parts(parse_block(result, where), where))]
    members = ("error_code",) if kind.endswith("_tool_result_error") else _RESULT_MEMBERS.get(kind)
    if members is None:
        raise RequestError(f"{where}: results of type {kind[:80]!r} cannot be read here")
    return [_result_line(result.get(name), f"{where}.{name}") for name in members]


def _result_line(value: Any, where: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    parts = _parts_in([value] if isinstance(value, dict) else value, where)
    if has_image(parts):
        raise RequestError(
            f"{where}: an image within the result of a server's tool cannot be read here"
        )
    return joined(parts)
