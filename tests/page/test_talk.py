"""A conversation in the browser, from its first message to its branches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.page.browser import Tab, saying
from tests.unit.files.test_pdf_file import pdf, says

FACTS = "My name is Ada and the code of the north door is 4711."


def manual(of: str, n_rules: int = 80) -> str:
    """Return a system prompt of some 1,000 tokens that shares nothing with those of other tests."""
    return f"You are the keeper of the manual of {of}. " + " ".join(
        f"Rule {i}: valve {i * 7 % 97} of {of} opens at noon." for i in range(1, n_rules)
    )


def test_from_the_first_message_to_the_last_token(tab: Tab) -> None:
    """The figures beside a reply are those of the server, the second turn is restored from the live
    sequence, and the title, list and screen reader follow.
    """
    assert tab.page.get_by_role("heading", name="Start a conversation").is_visible()
    first = tab.say(FACTS)
    assert tab.texts() == [FACTS, "Noted: your name is Ada; the code of the north door is 4711."]
    legend = tab.legend()
    assert f"{first['prompt_n']} evaluated in" in legend
    assert f"{first['predicted_n']} generated in" in legend
    assert "tokens/s" in legend
    line = tab.replies.last.locator(".costs summary")
    assert f"{first['prompt_n']} evaluated" in line.inner_text()
    box = line.bounding_box()
    assert box is not None
    assert box["height"] < 30
    line.click()
    assert not tab.replies.last.locator(".legend").is_visible()
    assert tab.replies.last.locator(".bar").get_attribute("aria-label") == (
        f"0 tokens restored, {first['prompt_n']} evaluated, {first['predicted_n']} generated"
    )
    assert tab.page.title() == f"{FACTS} · pyctl"
    assert tab.page.locator("#list .current .name").text_content() == FACTS
    assert tab.announced() == "Reply complete"
    together = sum(first[name] for name in ("cache_n", "prompt_n", "predicted_n"))
    assert tab.page.locator("#context").inner_text() == f"{together:,} of 16,384 tokens"

    second = tab.say("What is the code of the north door?")
    assert "4711" in tab.texts()[-1]
    legend = tab.legend()
    assert second["cache_n"] > 0
    assert f"{second['cache_n']} restored live" in legend
    assert f"{second['prompt_n']} evaluated in" in legend
    if "draft_n" in second:
        assert f"{second['draft_n_accepted']} of {second['draft_n']}" in legend
    assert tab.page.locator("#text").input_value() == ""


@pytest.mark.parametrize("key", ["Enter", "Escape"])
def test_stop_keeps_what_was_said_and_frees_the_server(tab: Tab, key: str) -> None:
    tab.begin("Say it often.", {"grammar": 'root ::= ("again and " ){1500}', "max_tokens": -1})
    tab.until(lambda: "again and " * 6 in tab.texts()[-1])
    tab.page.get_by_role("button", name="Stop").press(key)
    tab.until_idle()
    said = tab.texts()[-1]
    assert said.startswith("again and again")
    assert tab.replies.last.get_by_text("Stopped.").is_visible()
    tab.until(lambda: not any(slot["is_processing"] for slot in tab.server("slots")))
    assert not tab.page.locator(".message .error").count()
    tab.reload()
    assert tab.texts() == ["Say it often.", said]


def test_an_edited_message_is_a_branch_that_resumes_from_what_both_share(tab: Tab) -> None:
    """An edit makes a branch and keeps the old one; only tokens behind the edit are evaluated, and
    both branches survive a reload.
    """
    tab.configure(system=manual("branches"))
    tab.page.get_by_role("button", name="New chat").click()
    tab.say(FACTS)
    whole = tab.say("What is my name?")
    second = tab.page.locator(".message.user").nth(1)
    second.hover()
    second.get_by_role("button", name="Edit message").click()
    field = second.get_by_role("textbox", name="Message")
    assert field.input_value() == "What is my name?"
    field.fill("What is the code of the north door?")
    with tab.page.expect_response("**/v1/chat/completions") as asked:
        second.get_by_role("button", name="Send in a new branch").click()
    edited = tab.timings(asked.value)
    assert edited["cache_n"] > 1000
    assert edited["prompt_n"] < 40
    assert f"{edited['cache_n']:,} restored" in tab.legend()
    assert "4711" in tab.texts()[-1]
    branch = tab.page.locator(".message.user").nth(1)
    assert "2/2" in branch.locator(".branch").inner_text()
    assert branch.get_by_role("button", name="Next branch").is_disabled()

    branch.get_by_role("button", name="Previous branch").click()
    tab.until(lambda: tab.texts()[2] == "What is my name?")
    assert "Ada" in tab.texts()[3]
    assert f"{whole['predicted_n']} generated" in tab.legend()
    tab.reload()
    tab.until(lambda: tab.texts()[2] == "What is my name?")
    tab.page.locator(".message.user").nth(1).get_by_role("button", name="Next branch").click()
    tab.until(lambda: "4711" in tab.texts()[-1])

    again = tab.act(tab.replies.last.get_by_role("button", name="Regenerate reply"))
    assert again["prompt_n"] < 40
    assert "2/2" in tab.replies.last.locator(".branch").inner_text()
    assert tab.texts()[2] == "What is the code of the north door?"


def test_a_long_prompt_shows_how_far_it_is(tab: Tab) -> None:
    """While a long prompt is evaluated, its progress and the remaining time are visible."""
    long = " ".join(f"The {i * 7919 % 1000}th lamp of hall {i} is lit." for i in range(150))
    tab.page.evaluate(
        """() => {
          // What the server sends comes to the page event by event, and is drawn before the next one. A busy browser
          // has more of them at once, and draws the last one only.
          const real = window.fetch, drawn = () => new Promise((go) => requestAnimationFrame(() =>
            requestAnimationFrame(go)));
          window.fetch = async (path, options) => {
            const answer = await real(path, options);
            if (!path.endsWith("completions")) return answer;
            const events = (await answer.text()).split(/(?<=\\n\\n)/), encoder = new TextEncoder();
            const pull = async (stream) => {
              const event = events.shift();
              if (event === undefined) return stream.close();
              stream.enqueue(encoder.encode(event));
              if (event.includes("prompt_progress")) await drawn();
            };
            return new Response(new ReadableStream({ pull }), { status: answer.status });
          };
          window.seen = [];  // kept in the page: who asks from outside may come too late
          const note = () => {
            const stats = document.querySelector(".message.busy .stats");
            if (stats?.querySelector("progress")?.checkVisibility()) seen.push(stats.innerText);
          };
          new MutationObserver(note).observe(document.querySelector("#messages"), { subtree: true, childList: true });
        }"""
    )
    tab.say(long)
    seen = tab.page.evaluate("seen")
    assert any("to evaluate, about" in text and text.endswith("left") for text in seen), seen
    assert tab.replies.last.locator(".bar").is_visible()


def test_reasoning_is_folded_with_its_time(tab: Tab) -> None:
    tab.configure(thinking="on")
    tab.say("Is it noon?", saying("The clock says twelve.\n</think>\n\nYes, it is noon."))
    assert tab.texts()[-1] == "Yes, it is noon."
    details = tab.replies.last.locator(".think details")
    assert details.get_attribute("open") is None
    assert details.locator("summary").inner_text().startswith("Thought for ")
    assert not details.locator(".thought").is_visible()
    details.locator("summary").click()
    tab.until(lambda: details.locator(".thought").inner_text().strip() == "The clock says twelve.")
    tab.reload()
    assert tab.replies.last.locator(".think summary").inner_text().startswith("Thought for ")


def test_where_a_prompt_differed_is_said_in_words(tab: Tab) -> None:
    rules = manual("misses", 84)
    tab.configure(system=rules.replace("Rule 79:", "Rule 79 (Monday):"))
    tab.page.get_by_role("button", name="New chat").click()
    tab.say(FACTS)
    # What both share is known, but no longer there to resume from.
    assert tab.page.request.delete(f"{tab.url}cache").ok
    tab.configure(system=rules.replace("Rule 79:", "Rule 79 (Tuesday):"))
    tab.page.get_by_role("button", name="New chat").click()
    tab.say(FACTS)
    assert "differs at token" in tab.replies.last.locator(".costs .line").inner_text()
    tab.legend()
    miss = tab.replies.last.locator(".miss")
    assert "(Monday)" in miss.locator("del").inner_text()
    assert "(Tuesday)" in miss.locator("ins").inner_text()


def test_text_files_go_along(tab: Tab) -> None:
    """Files that are attached are sent as text with their names, a PDF as the text in it; one that
    was removed is not sent.
    """
    with tab.page.expect_file_chooser() as choosing:
        tab.page.get_by_role("button", name="Attach").click()
    files = [
        {
            "name": "door.txt",
            "mimeType": "text/plain",
            "buffer": b"The code of the south door is 9317.",
        },
        {"name": "b.md", "mimeType": "text/markdown", "buffer": "# Ümläut".encode()},
        {
            "name": "c.pdf",
            "mimeType": "application/pdf",
            "buffer": pdf(says("The west door is red.")),
        },
    ]
    choosing.value.set_files(files)
    tab.page.get_by_role("button", name="Remove b.md").click()
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.say("What is the code of the south door?")
    sent = json.loads(asked.value.post_data or "")["messages"][-1]["content"]
    assert "9317" in sent
    assert "door.txt" in sent
    assert "c.pdf:\n```\nThe west door is red.\n```" in sent
    assert "mläut" not in sent
    assert "9317" in tab.texts()[-1]
    details = tab.messages.first.locator("details.file")
    assert details.first.locator("summary").inner_text().startswith("door.txt")
    tab.reload()
    tab.until(lambda: tab.messages.first.locator("details.file").count() == 2)


REFUSALS = {"a.png": "no image encoder (--mmproj)", "a.bin": "not a text, PDF or image file"}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_file_that_is_no_text_is_refused_in_words(tab: Tab, name: str) -> None:
    with tab.page.expect_file_chooser() as choosing:
        tab.page.get_by_role("button", name="Attach").click()
    kind = "image/png" if name.endswith("png") else ""
    choosing.value.set_files([{"name": name, "mimeType": kind, "buffer": bytes(range(256))}])
    tab.until(lambda: name in tab.noticed() and REFUSALS[name] in tab.noticed())
    assert not tab.page.locator("#files .chip").count()


def test_fences_that_people_write_are_code_and_the_rest_is_as_it_is(tab: Tab) -> None:
    asked = (
        "Why  *this*?\n\n```python\ndef f(x):\n    return x\n```\n# and "
        "<b>that</b>\n~~~~\n```\n~~~~\n   ```\nopen"
    )
    tab.say(asked, saying("So."))
    body = tab.messages.first.locator(".body")
    tab.until(lambda: body.locator(".code pre").count() == 3)
    codes = [code.strip() for code in body.locator(".code pre").all_inner_texts()]
    assert codes == ["def f(x):\n    return x", "```", "open"]
    assert body.locator(".code .k").first.inner_text() == "def"
    assert body.locator(".plain").all_inner_texts() == ["Why  *this*?", "# and <b>that</b>"]
    assert not body.locator("em, h1, b").count()
    tab.reload()
    tab.until(lambda: body.locator(".code pre").count() == 3)


def test_code_is_copied(tab: Tab) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code = "def f(x):\n    return x < 2\n"
    tab.say("Some code, please.", saying(f"Here:\n\n```python\n{code}```\n\nDone."))
    tab.page.get_by_role("button", name="Copy", exact=True).click()
    tab.until(lambda: tab.page.evaluate("navigator.clipboard.readText()") == code)
    tab.replies.last.get_by_role("button", name="Copy message").click()
    tab.until(
        lambda: tab.page.evaluate("navigator.clipboard.readText()").startswith("Here:\n\n```python")
    )


def test_two_tabs_of_one_browser_lose_nothing(tab: Tab) -> None:
    """A reload shows in one tab the text that another wrote, and neither overwrites the other's."""
    tab.say("First tab.", saying("One."))
    other = tab.context.new_page()
    other.goto(tab.url)
    other.wait_for_selector("body[data-ready]")
    other.get_by_role("button", name="New chat").click()
    other.fill("#text", "Second tab.")
    other.press("#text", "Enter")
    other.wait_for_selector(".message.assistant .bar")
    tab.say("First tab again.", saying("Two."))
    tab.reload()
    titles = tab.page.locator("#list .name").all_text_contents()
    assert {"First tab.", "Second tab."} <= set(titles)


def test_a_reply_goes_on_through_a_reload(tab: Tab) -> None:
    """A page that is reloaded during a reply shows all of it, and can stop it: the reply belongs to
    the server, not to the tab.
    """
    numbers = ", ".join(str(number) for number in range(300))
    tab.begin("Count.", saying(numbers))
    tab.page.wait_for_selector(".message.busy .tail:not(:empty)")
    tab.reload()
    tab.until_idle()
    assert tab.texts()[-1] == numbers
    assert not tab.page.locator(".message .error").count()
    assert tab.replies.last.locator(".costs").count() == 1
    ids = [
        request.headers["x-conversation-id"]
        for request in tab.requests
        if request.headers.get("x-conversation-id")
    ]
    tab.until(lambda: tab.context.request.get(f"{tab.url}v1/stream?conv_id={ids[0]}").status == 404)

    # Long enough for a browser that is much slower than the engine: it has to come back before the
    # end.
    tab.begin(
        "On and on.",
        {"grammar": 'root ::= ("on and on and on and on and " ){1500}', "max_tokens": -1},
    )
    tab.page.wait_for_selector(".message.busy .tail:not(:empty)")
    tab.reload()
    tab.page.get_by_role("button", name="Stop").click()
    tab.until_idle()
    tab.until(lambda: not any(slot["is_processing"] for slot in tab.server("slots")))
    assert tab.replies.last.get_by_text("Stopped.").is_visible()


def test_the_model_gives_a_conversation_its_title(tab: Tab) -> None:
    """The title comes from the model once, after the first reply, and only while the server is
    idle: it must not delay a reply.
    """
    title = {"choices": [{"message": {"content": '"Lamps at the Door".\n\nand more'}}]}
    asked: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        if route.request.post_data_json.get("stream"):
            return route.continue_()
        asked.append(route.request.post_data_json)
        return route.fulfill(json=title)

    # What is made ready after a reply takes a slot, too.
    slots = [{"is_processing": False}]
    tab.page.route("**/slots", lambda route: route.fulfill(json=slots))
    tab.configure(titles="yes")
    tab.page.route("**/v1/chat/completions", answer)
    tab.say("Which lamp is at the door?", saying("The blue one."))
    tab.until(lambda: tab.page.locator("#list .name").first.inner_text() == "Lamps at the Door")
    assert [message["content"] for message in asked[0]["messages"][:2]] == tab.texts()
    tab.say("And at the window?", saying("None."))
    tab.page.unroute("**/v1/chat/completions")
    tab.page.get_by_role("button", name="New chat").click()
    slots[0]["is_processing"] = True
    with tab.page.expect_response("**/slots"):
        tab.say("Is the server busy?", saying("Yes."))
    tab.page.get_by_role("button", name="New chat").click()
    slots[0]["is_processing"] = False
    real = tab.say("Who asks for a title?", saying("The page."))
    assert real["prompt_n"]
    tab.until(
        lambda: tab.page.locator("#list .name").first.inner_text() == "The page"
    )  # the grammar's words
    assert len(asked) == 1
    assert "Is the server busy?" in tab.page.locator("#list .name").all_inner_texts()


def test_a_reply_is_edited_and_continued(tab: Tab) -> None:
    tab.configure(system=manual("continuing", 20))
    tab.page.get_by_role("button", name="New chat").click()
    tab.say("How many valves are there?", saying("There are seven of them."))
    reply = tab.replies.last
    reply.hover()
    reply.get_by_role("button", name="Edit message").click()
    reply.get_by_role("textbox", name="Message").fill("There are nine")
    reply.get_by_role("button", name="Save in a new branch").click()
    tab.until(lambda: tab.texts()[-1] == "There are nine")
    assert tab.replies.last.locator(".branch").inner_text().count("2/2")
    tab.configure(json=json.dumps(saying(" valves, all of brass.")))
    timings = tab.act(tab.replies.last.get_by_role("button", name="Continue reply"))
    assert timings["cache_n"] > 0
    assert tab.texts() == ["How many valves are there?", "There are nine valves, all of brass."]
    tab.reload()
    assert tab.texts()[-1] == "There are nine valves, all of brass."
