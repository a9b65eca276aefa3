"""Data in the browser: conversations, their export, presets and settings; and many messages at
once.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.page.browser import Tab, saying


def trees(dump: str) -> list[dict[str, Any]]:
    """Return the conversations of an export, in an order of their own."""
    found: list[dict[str, Any]] = json.loads(dump)["conversations"]
    return sorted(found, key=lambda each: str(each["id"]))


def exported(tab: Tab) -> str:
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename.endswith(".json")
    return download.value.path().read_text(encoding="utf-8")


def test_one_conversation_is_exported_for_people(tab: Tab) -> None:
    """The Markdown of one conversation is readable and complete, its JSON can be imported, and both
    have a file name of its title.
    """
    tab.say("Which fence holds ```?", saying("This one:\n\n- it"))
    entry = tab.page.locator("#list li").first
    for verb, name in (
        ("Export as Markdown", "Which-fence-holds-.md"),
        ("Export as JSON", "Which-fence-holds-.json"),
    ):
        entry.hover()
        entry.get_by_role("button", name="Conversation options").click()
        with tab.page.expect_download() as download:
            tab.page.locator("#dialog").get_by_role("button", name=verb).click()
        tab.until_closed()
        assert download.value.suggested_filename == name
        text = download.value.path().read_text(encoding="utf-8")
        if name.endswith("json"):
            assert len(trees(text)) == 1
        else:
            title = "Which fence holds ```?"
            assert text == f"# {title}\n\n## You\n\n{title}\n\n## Reply\n\nThis one:\n\n- it\n"


def import_text(tab: Tab, text: str) -> None:
    with tab.page.expect_file_chooser() as choosing:
        tab.page.get_by_role("button", name="Import").click()
    choosing.value.set_files(
        [{"name": "a.json", "mimeType": "application/json", "buffer": text.encode()}]
    )


def names(tab: Tab) -> list[str]:
    return tab.page.locator("#list .name").all_text_contents()


def wipe(tab: Tab) -> None:
    """Delete all conversations."""
    while tab.page.locator("#list li").count() > 1 or tab.messages.count():
        item = tab.page.locator("#list li").first
        item.hover()
        item.get_by_role("button", name="Delete").click()
        tab.page.locator("#dialog").get_by_role("button", name="Delete").click()
        tab.until_closed()


def test_export_wipe_and_import_give_the_same_trees(tab: Tab) -> None:
    """An export restores every conversation with all branches after all were deleted; a second
    import makes copies and overwrites nothing.
    """
    tab.say("One", saying("First ä✓."))
    tab.say("Two", saying("Second."))
    tab.act(tab.replies.last.get_by_role("button", name="Regenerate reply"))
    first = tab.page.locator(".message.user").first
    first.hover()
    first.get_by_role("button", name="Edit message").click()
    first.get_by_role("textbox", name="Message").fill("Another one")
    tab.act(first.get_by_role("button", name="Send in a new branch"))
    tab.page.get_by_role("button", name="New chat").click()
    tab.say("A second conversation", saying("Yes."))
    before = exported(tab)
    assert [len(each["messages"]) for each in trees(before)] == [7, 2]

    wipe(tab)
    assert tab.page.get_by_role("heading", name="Start a conversation").is_visible()
    tab.reload()
    assert not any("One" in name or "second" in name for name in names(tab))
    import_text(tab, before)
    tab.until(lambda: "A second conversation" in names(tab))
    assert trees(exported(tab)) == trees(before)
    tab.page.locator("#list").get_by_role("button", name="One").click()
    tab.until(lambda: tab.texts() == ["Another one", "Second."])
    tab.page.get_by_role("button", name="Previous branch").click()
    tab.until(lambda: tab.texts() == ["One", "First ä✓.", "Two", "Second."])
    seen = exported(tab)
    tab.reload()
    assert trees(exported(tab)) == trees(seen)

    import_text(tab, before)  # once more: copies beside what is there
    tab.until(lambda: len(trees(exported(tab))) == 4)


CIRCLE = {
    "a": {"id": "a", "parent": "b", "role": "user", "content": "x"},
    "b": {"id": "b", "parent": "a", "role": "assistant", "content": "y"},
}
WRONG: tuple[Any, ...] = (
    {},
    [],
    None,
    {"format": "pyctl-conversations", "version": 1, "conversations": [None]},
    {"format": "pyctl-conversations", "version": 1, "conversations": [{"messages": CIRCLE}]},
    {"format": "pyctl-conversations", "version": 1, "conversations": [{"messages": {"a": None}}]},
    {
        "format": "pyctl-conversations",
        "version": 1,
        "conversations": [{"messages": {"a": {"role": "root"}}}],
    },
)


def test_a_file_that_is_no_export_is_refused_whole(tab: Tab) -> None:
    tab.say("One", saying("First."))
    before = trees(exported(tab))
    for text in ["no json", *(json.dumps(wrong) for wrong in WRONG)]:
        import_text(tab, text)
        tab.until(lambda: "Import failed" in tab.noticed())
        tab.page.evaluate("document.querySelector('#live').textContent = ''")
        assert trees(exported(tab)) == before, text
    tab.reload()
    assert trees(exported(tab)) == before


def test_a_hostile_export_is_text(tab: Tab) -> None:
    """Names of prototypes, fields of other types and HTML in every field: shown as text, and
    nothing breaks.
    """
    evil = '<img src=x onerror="document.title=1"><script>1</script>'
    message = {
        "id": "m",
        "parent": None,
        "role": "assistant",
        "content": evil,
        "reasoning": evil,
        "error": evil,
    }
    message |= {
        "stats": {
            "cache_n": evil,
            "prompt_n": 1,
            "predicted_n": 1,
            "cache": {"source": evil, "saved": [evil]},
        },
        "calls": [{"name": evil, "arguments": evil}],
        "files": [{"name": evil, "text": evil}],
    }
    first = {
        "id": "u",
        "parent": "__proto__",
        "role": "user",
        "content": {"a": evil},
        "files": evil,
        "stats": 7,
    }
    tree = {
        "id": "__proto__",
        "title": evil,
        "system": evil,
        "messages": {"m": message, "__proto__": first},
    }
    text = json.dumps({"format": "pyctl-conversations", "version": 1, "conversations": [tree]})
    text = text.replace('"__proto__": {', '"__proto__":{')  # as JSON has it, a field of its own
    import_text(tab, text)
    tab.until(tab.noticed)
    assert tab.page.title() != "1"
    assert not tab.page.locator("#messages img, #messages script, #list img").count()
    tab.reload()
    tab.page.get_by_role("button", name="New chat").click()
    tab.say("Still there?", saying("Yes."))
    assert tab.texts()[-1] == "Yes."


def test_a_branch_of_no_message_opens_the_last_one(tab: Tab) -> None:
    """Imported branches may name no message, or a member of every JavaScript object: the
    conversation opens, or the import fails, and the page works on.
    """
    message = {"parent": None, "role": "user", "content": "Am I here?", "created": 1}
    tree = {
        "messages": {"m": message},
        "leaf": "constructor",
        "pick": {"": "constructor", "m": "toString"},
    }
    import_text(
        tab, json.dumps({"format": "pyctl-conversations", "version": 1, "conversations": [tree]})
    )
    tab.until(tab.noticed)
    tab.page.locator("#list").get_by_text("Am I here?").click()
    tab.until(lambda: tab.texts() == ["Am I here?"])
    named = json.dumps(
        {"format": "pyctl-conversations", "conversations": [{"messages": {"constructor": message}}]}
    )
    tab.page.evaluate("document.querySelector('#live').textContent = ''")
    import_text(tab, named)
    tab.until(lambda: "Import failed" in tab.noticed())


def test_a_preset_is_kept_and_sent(tab: Tab) -> None:
    """Only the fields that a preset sets are sent, the others show the server's defaults; each chat
    keeps its preset, also after a reload.
    """
    params = tab.server("props")["default_generation_settings"]["params"]
    tab.page.keyboard.press("Control+,")
    for name in ("temperature", "top_p", "top_k", "min_p"):
        shown = tab.page.locator(f'#dialog [name="{name}"]').get_attribute("placeholder") or ""
        assert float(shown) == pytest.approx(params[name], abs=0.001), name
    tab.page.keyboard.press("Escape")
    tab.until_closed()
    tab.configure(
        name="Keeper", system="You keep the valves.", temperature="0.25", top_k="7", max_tokens="5"
    )
    tab.page.get_by_role("button", name="New chat").click()
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        timings = tab.say("Hello")
    body = json.loads(asked.value.post_data or "")
    assert body["messages"][0] == {"role": "system", "content": "You keep the valves."}
    assert {"temperature": 0.25, "top_k": 7, "max_tokens": 5}.items() <= body.items()
    assert "top_p" not in body
    assert timings["predicted_n"] <= 5
    tab.reload()
    assert tab.page.locator("#preset").input_value() == "Keeper"
    tab.page.locator("#preset").select_option("")
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.say("Hello again")
    assert "top_k" not in json.loads(asked.value.post_data or "")
    tab.page.get_by_role("button", name="New chat").click()
    tab.page.locator("#preset").select_option("Keeper")
    tab.say("A chat of its own")
    tab.page.locator("#list .name", has_text="Hello").click()
    assert tab.page.locator("#preset").input_value() == "", "a chat keeps its preset"
    tab.page.locator("#list .name", has_text="A chat of its own").click()
    assert tab.page.locator("#preset").input_value() == "Keeper"
    tab.page.keyboard.press("Control+,")
    tab.page.locator("#dialog").get_by_role("button", name="Delete preset").click()
    tab.until_closed()
    assert tab.page.locator("#preset option").count() == 1


def test_a_dialog_that_follows_another_at_once_is_not_ended_by_it(tab: Tab) -> None:
    """The browser says that a dialog was closed some time after it was."""
    tab.page.keyboard.press("Control+,")
    tab.page.locator("#dialog").wait_for()
    tab.page.evaluate(
        """() => {
          document.querySelector("#dialog").close();
          dispatchEvent(new KeyboardEvent("keydown", { key: ",", ctrlKey: true }));
        }"""
    )
    tab.settle()
    dialog = tab.page.locator("#dialog")
    dialog.locator('[name="name"]').fill("Kept")
    dialog.get_by_role("button", name="Save").click()
    tab.until_closed()
    tab.until(lambda: tab.page.locator("#preset").input_value() == "Kept")


def test_what_the_server_refuses_is_said_under_the_message(tab: Tab) -> None:
    tab.expected.append("status of 400")
    tab.begin("Hello", {"grammar": "root ::= nonsense"})
    tab.page.get_by_role("alert").filter(has_text="grammar").wait_for()
    tab.until_idle()
    tab.configure(json="")
    tab.act(tab.replies.last.get_by_role("button", name="Try again"))
    assert tab.texts()[-1]


MANY = 500


def many() -> str:
    """Return an export with one conversation of many messages."""
    messages = {}
    parent = None
    for i in range(MANY):
        content = f"*{i}*"
        role = "assistant" if i % 2 else "user"
        messages[f"m{i}"] = {
            "id": f"m{i}",
            "parent": parent,
            "role": role,
            "content": content,
            "created": i + 1,
        }
        parent = f"m{i}"
    tree = {
        "id": "many",
        "title": "Many",
        "messages": messages,
        "leaf": parent,
        "created": 1,
        "updated": 2**41,
    }
    return json.dumps({"format": "pyctl-conversations", "version": 1, "conversations": [tree]})


def test_500_messages_stay_smooth(tab: Tab) -> None:
    """Only what can be seen is rendered, and a reply that streams touches nothing but itself."""
    import_text(tab, many())
    tab.until(lambda: tab.replies.last.locator("em").count())
    assert tab.texts()[-1] == "499"
    rendered = [
        json.loads(r.post_data or "")["texts"] for r in tab.requests if "page/markdown" in r.url
    ]
    assert 1 <= sum(len(texts) for texts in rendered) < 60
    assert tab.messages.count() == MANY
    tab.page.evaluate("document.querySelector('#messages').firstChild.scrollIntoView()")
    tab.until(lambda: tab.replies.first.locator("em").count())
    rendered = [
        json.loads(r.post_data or "")["texts"] for r in tab.requests if "page/markdown" in r.url
    ]
    assert sum(len(texts) for texts in rendered) < 120

    tab.page.evaluate(
        """() => {
          window.touched = new Map();
          const note = (changes) => {
            for (const { target } of changes) {
              const element = target.nodeType === 1 ? target : target.parentElement;
              const message = element?.closest(".message");
              if (message) touched.set(message.dataset.key, (touched.get(message.dataset.key) ?? 0) + 1);
            }
          };
          const options = { subtree: true, childList: true, characterData: true, attributes: true };
          new MutationObserver(note).observe(document.querySelector("#messages"), options);
        }"""
    )
    tab.say("And now?", {"grammar": 'root ::= ("more and " ){40}', "max_tokens": -1})
    touched = tab.page.evaluate("Object.fromEntries(touched)")
    old = {key: n for key, n in touched.items() if key.startswith("m") and key[1:].isdigit()}
    assert tab.replies.last.get_attribute("data-key") in touched  # as it streamed
    assert max(old.values(), default=0) <= 8, (
        old
    )  # drawn anew when a reply begins and ends, if at all
    tab.reload()
    assert tab.messages.count() == MANY + 2


def test_search_rename_and_delete(tab: Tab) -> None:
    """Search finds titles and texts, a new title is kept as plain text, and a deletion that is
    cancelled deletes nothing.
    """
    tab.say("About lamps", saying("They are lit."))
    tab.page.get_by_role("button", name="New chat").click()
    tab.say("About doors", saying("They are shut, says Zoe."))
    tab.page.keyboard.press("Control+k")
    tab.page.keyboard.type("zoe")
    assert names(tab) == ["About doors… shut, says Zoe."]
    tab.page.fill("#search", "nothing like it")
    assert names(tab) == []
    tab.page.fill("#search", "")
    assert names(tab) == ["About doors", "About lamps"]
    item = tab.page.locator("#list li").nth(1)
    item.hover()
    item.get_by_role("button", name="Conversation options").click()
    tab.page.get_by_role("textbox", name="Title").fill("All <b>lamps</b>")
    tab.page.keyboard.press("Enter")
    tab.until(lambda: "All <b>lamps</b>" in names(tab))
    tab.reload()
    assert "All <b>lamps</b>" in names(tab)
    item = tab.page.locator("#list li").filter(has_text="About doors")
    item.hover()
    item.get_by_role("button", name="Delete").click()
    tab.page.locator("#dialog").get_by_role("button", name="Cancel").click()
    assert "About doors" in names(tab)
    item.hover()
    item.get_by_role("button", name="Delete").click()
    tab.page.locator("#dialog").get_by_role("button", name="Delete").click()
    tab.until(lambda: "About doors" not in names(tab))
    tab.reload()
    assert names(tab) == ["All <b>lamps</b>"]


def groups(tab: Tab) -> dict[str, list[str]]:
    """Return the titles at the left, by the headings over them."""
    found = (
        "l => l.map((s) => [s.firstChild.innerText, [...s.querySelectorAll('.name')].map((n) "
        "=> n.innerText)])"
    )
    return dict(tab.page.locator("#list section").evaluate_all(found))


def test_a_conversation_is_listed_under_its_day(tab: Tab) -> None:
    days = {
        "Today": ["2026-03-10T00:00", "2026-03-10T23:59"],
        "Yesterday": ["2026-03-09T00:00", "2026-03-09T23:59"],
        "Previous 7 days": ["2026-03-08T23:59", "2026-03-03T00:00"],
        "Previous 30 days": ["2026-03-02T23:59", "2026-02-08T00:00"],
        "February 2026": ["2026-02-07T23:59", "2026-02-01T00:00"],
        "December 2025": ["2025-12-24T12:00"],
    }
    named = """async (times) => {
      const { groupOf } = await import("./page/sidebar.js"), now = +new Date("2026-03-10T12:00");
      return times.map((time) => groupOf({ updated: +new Date(time) }, now));
    }"""
    for day, times in days.items():
        assert tab.page.evaluate(named, times) == [day] * len(times)


def test_a_pinned_conversation_stays_on_top(tab: Tab) -> None:
    """A pin moves a conversation to the top, survives reload, export and import, and its button
    keeps the focus.
    """
    for title in ("Lamps", "Doors"):
        put_conversation(tab, title)
    pin = tab.page.get_by_role("button", name="Pin conversation", exact=True)
    item = tab.page.locator("#list li").filter(has_text="Lamps")
    item.hover()
    item.get_by_role("button", name="Pin conversation", exact=True).click()
    pinned = {"Pinned": ["Lamps"], "January 2020": ["Doors"]}
    tab.until(lambda: {**groups(tab), "Today": []} == {**pinned, "Today": []})
    assert tab.page.evaluate("document.activeElement.ariaLabel") == "Unpin conversation", (
        "it keeps the focus"
    )
    tab.reload()
    assert groups(tab)["Pinned"] == ["Lamps"]
    dump = exported(tab)
    assert [each.get("pinned", False) for each in trees(dump)] == [False, True]
    item.hover()
    item.get_by_role("button", name="Unpin conversation").click()
    tab.until(lambda: groups(tab)["January 2020"] == ["Doors", "Lamps"])
    import_text(tab, dump)  # copies
    tab.until(lambda: groups(tab).get("Pinned") == ["Lamps"])
    assert pin.count() == tab.page.locator("#list li").count() - 1


def put_conversation(tab: Tab, title: str) -> None:
    """Put a conversation of January 2020 into the page, the later in the alphabet the older."""
    message = {"id": "m", "parent": None, "role": "user", "content": title, "created": 1}
    updated = 1_578_000_000_000 - 1000 * ord(title[0])
    tree = {
        "id": title,
        "title": title,
        "messages": {"m": message},
        "leaf": "m",
        "created": 1,
        "updated": updated,
    }
    import_text(
        tab, json.dumps({"format": "pyctl-conversations", "version": 1, "conversations": [tree]})
    )
    tab.page.locator("#list li").filter(has_text=title).wait_for()


def test_titles_have_room_and_no_button_covers_them(tab: Tab) -> None:
    title = "What is known about the lamps of the north hall?"
    put_conversation(tab, title)
    item = tab.page.locator("#list li").filter(has_text="What is known")
    name = item.locator(".name")
    edges = """e => {
      const { left, right } = e.getBoundingClientRect(), { paddingLeft, paddingRight } = getComputedStyle(e);
      return [left + parseFloat(paddingLeft), right - parseFloat(paddingRight)];
    }"""
    tab.page.locator("#text").hover()
    left, right = name.evaluate(edges)
    assert right - left > 215
    item.hover()
    _, right = name.evaluate(edges)
    buttons = item.locator(".acts").bounding_box()
    assert buttons is not None
    assert right <= buttons["x"] + 1


IN_VIEW = (
    "e => { const b = e.getBoundingClientRect(); return b.top > 0 && b.bottom < innerHeight; }"
)


def test_search_opens_the_place_also_in_another_branch(tab: Tab) -> None:
    """A hit opens its conversation in the branch of the found message, with that message in view
    and focused.
    """
    day = 86_400_000
    now = tab.page.evaluate("Date.now()")
    messages: dict[str, Any] = {}
    for i in range(60):
        role, text = ("assistant", f"Lamp {i} is lit.") if i % 2 else ("user", f"And lamp {i}?")
        messages[f"m{i}"] = {
            "id": f"m{i}",
            "parent": f"m{i - 1}" if i else None,
            "role": role,
            "content": text,
        }
    messages["x"] = {"id": "x", "parent": "m0", "role": "assistant", "content": "The red boat."}
    tree = {"title": "Lamps", "messages": messages, "leaf": "m59", "updated": now - 3 * day - 1000}
    import_text(
        tab, json.dumps({"format": "pyctl-conversations", "version": 1, "conversations": [tree]})
    )
    tab.until(tab.noticed)
    assert (
        tab.page.get_by_role("list", name="Previous 7 days").locator(".name").inner_text()
        == "Lamps"
    )
    for wanted, key in (("LAMP 7 is", "m7"), ("red boat", "x"), ("lamp 40", "m40")):
        tab.page.get_by_role("button", name="New chat").click()
        tab.page.fill("#search", wanted)
        tab.page.locator("#list").get_by_role("button", name=re.compile("^Lamps")).click()
        tab.until(lambda key=key: tab.page.evaluate("document.activeElement.dataset.key") == key)
        tab.until(lambda: tab.page.locator(":focus").evaluate(IN_VIEW))
        assert len(tab.texts()) == (2 if key == "x" else 60)


def test_what_was_said_is_kept_though_the_page_goes_at_once(tab: Tab) -> None:
    """The tab is closed before the browser confirms the write."""
    tab.say("One", saying("First."))
    tab.page.evaluate(
        """() => {
          const put = IDBObjectStore.prototype.put;
          IDBObjectStore.prototype.put = function (conversation) {
            const request = put.call(this, conversation);
            // Before the end it is kept when the reply begins, and every other second.
            if (Object.values(conversation.messages).some((each) => each.content === "Second." && each.finish))
              setTimeout(() => { console.log("hangs"); for (;;); });
            return request;
          };
        }"""
    )
    tab.configure(json=json.dumps(saying("Second.")))
    with tab.page.expect_console_message(lambda message: message.text == "hangs"):
        tab.page.fill("#text", "Two")
        tab.page.evaluate("document.querySelector('#ask').requestSubmit()")
    tab.page.close()
    tab.page = tab.context.new_page()
    tab.open()
    tab.page.locator("#list").get_by_role("button", name="One").click()
    tab.until(lambda: tab.texts() == ["One", "First.", "Two", "Second."])
