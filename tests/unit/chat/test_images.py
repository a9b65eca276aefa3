"""Images from messages to the tokens of a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyctl.chat.cached_tokenizer import readable
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.images import MEDIA_MARKER, image_mark, joined_parts
from pyctl.chat.replay import Replay, conversation_keys
from pyctl.chat.template import Template
from pyctl.errors import RequestError
from pyctl.files.image_file import ImageFile
from tests.pictures import GridReader, image_bytes
from tests.unit.chat import toy

ONE, OTHER = (ImageFile.parse(image_bytes(70, 31, seed=seed)) for seed in (1, 2))
BEFORE, BEHIND = (int(tokens[0]) for tokens in GridReader.around)


def chat_format(template: str = toy.CHATML, **options: Any) -> ChatFormat:
    return ChatFormat(
        Template(template, eos_token="<|im_end|>"),
        toy.chatml_tokenizer(),
        images=GridReader(),
        **options,
    )


def said(*parts: str | ImageFile, role: str = "user") -> dict[str, Any]:
    return {
        "role": role,
        "content": [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
        ],
    }


def test_an_image_is_where_its_part_was() -> None:
    prompt = toy.prepare(
        chat_format(), [said("look: ", ONE, "what?"), said("a", OTHER, ONE)]
    ).prompt
    first, second, third = prompt.pictures
    assert [picture.source for picture in prompt.pictures] == [ONE, OTHER, ONE]
    assert first.columns == 3
    assert first.lines == 1
    assert first.n_tokens == 3
    assert prompt.tokens[: first.start].tolist() == [256, *b"user\nlook: ", BEFORE]
    assert prompt.tokens[first.end : second.start].tolist() == [
        *(BEHIND, *b"what?", 257, 10, 256, *b"user\na", BEFORE)
    ]
    assert prompt.tokens[second.end : third.start].tolist() == [BEHIND, BEFORE]
    assert (prompt.tokens[second.start : second.end] == second.tokens).all()
    assert (first.tokens == third.tokens).all()
    assert prompt.boundaries == tuple(np.flatnonzero(prompt.tokens == 256)[1:].tolist())


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("a", "b"), "a\nb"),
        ((ONE,), "I"),
        (("a", ONE, "b"), "aIb"),
        (("a", "b", ONE, "c", "d"), "a\nbIc\nd"),
        ((ONE, ONE, "c"), "IIc"),
        (("", ONE), "I"),
        (("", "a", ONE), "aI"),
    ],
)
def test_lines_are_llama_servers(parts: tuple[str | ImageFile, ...], text: str) -> None:
    """Parts are joined as `common_chat_msg` of llama.cpp joins them when there is an image among
    them.
    """
    assert joined_parts(parts).replace(image_mark(ONE), "I") == text


def test_the_real_template_writes_the_same(qwen_template: str) -> None:
    """The tokens around an image are those of the template's own text for it."""
    vision = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    tokenizer = toy.ByteTokenizer((*toy.CHATML_SPECIALS, *vision), eos="<|im_end|>")
    start, pad, end = (tokenizer.special_tokens()[text] for text in vision)

    class Reader(GridReader):
        around = np.array([start], np.int32), np.array([end], np.int32)

    template = Template(qwen_template, eos_token="<|im_end|>")
    chat = ChatFormat(template, tokenizer, images=Reader())
    function = {"name": "shot", "arguments": {}}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    ours = [said("a\n", ONE, "b"), called, said("here", OTHER, role="tool")]
    its = [
        {
            **each,
            "content": [
                {"type": "image"} if isinstance(p, ImageFile) else p for p in each["content"]
            ],
        }
        for each in ours
    ]
    tokens = toy.prepare(chat, ours).prompt.tokens.tolist()
    as_pads = [
        pad if token < 0 else token
        for index, token in enumerate(tokens)
        if token >= 0 or tokens[index - 1] >= 0
    ]
    assert as_pads == tokenizer.tokenize(
        template.render(its, enable_thinking=True, add_generation_prompt=True)
    )


def test_what_anybody_writes_is_no_image() -> None:
    chat = chat_format()
    for text in (
        MEDIA_MARKER,
        "<|image_pad|>",
        image_mark(OTHER),
        image_mark(ONE)[:-3],
        "<__image_",
    ):
        prompt = toy.prepare(chat, [said("x", ONE), said(text)]).prompt
        assert len(prompt.pictures) == 1
        assert text in readable(
            toy.chatml_tokenizer(), prompt.tokens[prompt.pictures[0].end + 1 :].tolist()
        )


def test_the_text_of_a_prompt_keeps_its_marks_to_itself() -> None:
    prepared = toy.prepare(chat_format(), [said("look: ", ONE)])
    assert (
        prepared.text
        == f"<|im_start|>user\nlook: {MEDIA_MARKER}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prepared.n_tokens == len(prepared.prompt)


def test_people_read_how_much_an_image_takes() -> None:
    tokens = [*b"ab", *[-7] * 300, *b"c", -9]
    assert readable(toy.chatml_tokenizer(), tokens) == "ab[image: 300 tokens]c[image: 1 tokens]"


def test_prompts_of_text_have_images_at_the_marker() -> None:
    chat = chat_format()
    prompt = chat.prompt_from_text(f"a{MEDIA_MARKER}b{MEDIA_MARKER}", [ONE, OTHER])
    assert [picture.source for picture in prompt.pictures] == [ONE, OTHER]
    assert prompt.tokens[: prompt.pictures[0].start].tolist() == [*b"a", BEFORE]
    assert chat.prompt_from_text(MEDIA_MARKER).tokens.tolist() == list(MEDIA_MARKER.encode())
    for text in ("a", f"{MEDIA_MARKER}{MEDIA_MARKER}"):
        with pytest.raises(RequestError, match="media_marker"):
            chat.prompt_from_text(text, [ONE])


def test_raw_text_goes_on_behind_an_image() -> None:
    prompt = chat_format().prompt_from_text(f"a\n{MEDIA_MARKER}\nb\n", [ONE])
    assert prompt.n_raw == len(prompt)


def test_a_template_without_a_place_for_an_image() -> None:
    chat = chat_format("{%- for m in messages if m.role == 'user' -%}{{ m.content }}{%- endfor -%}")
    assert toy.prepare(chat, [said(ONE)]).prompt.pictures
    with pytest.raises(RequestError, match="leaves out 1 of 2 images"):
        toy.prepare(chat, [said(ONE), said("x", OTHER, role="tool")])


def test_no_images_without_a_reader() -> None:
    chat = ChatFormat(Template(toy.CHATML), toy.chatml_tokenizer())
    with pytest.raises(RequestError, match="may need to provide the mmproj"):
        _ = toy.prepare(chat, [said(ONE)]).prompt


def test_replies_are_found_again_in_a_conversation_with_images() -> None:
    """And in no other: the image is part of what was said before."""
    chat = chat_format(replay=Replay("equal"))
    asked = toy.prepare(chat, [said("who? ", ONE)])
    answer = toy.told(asked, "It is  him.")
    assert toy.prepare(chat, [said("who? ", ONE), answer, said("why?")]).rendered.parts
    again = ImageFile.parse(ONE.data)
    later = toy.prepare(chat, [said("who? ", again), answer, said("why?", OTHER)])
    assert later.rendered.parts
    assert [picture.source for picture in later.prompt.pictures] == [again, OTHER]
    assert not toy.prepare(chat, [said("who? ", OTHER), answer, said("why?")]).rendered.parts


def test_a_conversation_is_told_from_others_in_every_process() -> None:
    """Marks are made anew in each process; what is remembered on disk must not depend on them."""
    mark = image_mark(ONE)
    (_, place) = conversation_keys([{"role": "user", "content": f"who? {mark}"}])
    (_, same) = conversation_keys(
        [{"role": "user", "content": f"who? <__image_{ONE.digest.hex()}__>"}]
    )
    assert place == same


def test_the_next_prompt_begins_with_the_image() -> None:
    asked = toy.prepare(chat_format(), [said("who? ", ONE)])
    prompt = asked.next_prompt({"role": "assistant", "content": "Him."})
    assert [picture.source for picture in prompt.pictures] == [ONE]
    assert len(prompt) > len(asked.prompt)
