"""Digests of the sections of a chat request."""

from __future__ import annotations

from pyctl.chat.json_object import JsonDict
from pyctl.chat.sections import digest_sections

SYSTEM: JsonDict = {"role": "system", "content": "Be brief."}
HELLO: JsonDict = {"role": "user", "content": "Hello"}
REPLY: JsonDict = {"role": "assistant", "content": "Hi"}
TOOLS: list[JsonDict] = [{"name": "a"}, {"name": "b"}]


def test_equal_requests_have_equal_digests() -> None:
    assert digest_sections([SYSTEM, HELLO], TOOLS, {}) == digest_sections(
        [SYSTEM, dict(HELLO)], [*TOOLS], {}
    )


def test_each_section_has_its_own_digest() -> None:
    """A change of one section changes its digest, and no other one."""
    given = digest_sections([SYSTEM, HELLO], TOOLS, {})
    reordered = digest_sections([SYSTEM, HELLO], TOOLS[::-1], {})
    assert reordered.tools != given.tools
    assert reordered.system == given.system
    thinking = digest_sections([SYSTEM, HELLO], TOOLS, {"enable_thinking": False})
    assert thinking.variables != given.variables
    assert thinking.messages == given.messages
    bare = digest_sections([HELLO], None, {})
    assert bare.tools == b""
    assert bare.system == b""
    assert bare.messages == given.messages


def test_messages_are_counted_after_the_system_message() -> None:
    sections = digest_sections([SYSTEM, HELLO, REPLY, HELLO], None, {})
    assert sections.n_messages == 3
    assert sections.n_replies == 1
    assert sections.first_message == digest_sections([HELLO], None, {}).messages


def test_equal_leading_messages_are_counted() -> None:
    given = digest_sections([HELLO, REPLY, HELLO], None, {})
    assert given.n_equal_messages(given) == 3
    assert given.n_equal_messages(digest_sections([HELLO, HELLO, HELLO], None, {})) == 1
    assert given.n_equal_messages(digest_sections([HELLO], None, {})) == 1
