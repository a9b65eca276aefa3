"""A tab of a real browser with the page in it: a user's actions, and a record of every problem."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import (
        Browser,
        BrowserContext,
        ConsoleMessage,
        Locator,
        Page,
        Request,
        Response,
    )

__all__ = ["PATIENCE_MS", "Tab", "browser_path", "saying"]

PATIENCE_MS = 60_000
"""For what happens at once unless the machine is busy."""


def browser_path() -> str | None:
    """Return the chromium to use: $CHROMIUM, or the first one on the path."""
    names = (os.environ.get("CHROMIUM") or "", "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def saying(text: str) -> dict[str, object]:
    """Return fields of a request by which the model replies with ``text`` and nothing else."""
    return {"grammar": f"root ::= {json.dumps(text, ensure_ascii=False)}", "max_tokens": -1}


TOASTS = """addEventListener("DOMContentLoaded", () => {
  const live = document.querySelector("#live");
  const note = () => {
    const { width, height } = live.getBoundingClientRect();
    if (width > 10 && height > 10) window.noticed = live.innerText;
  };
  if (live) new MutationObserver(note).observe(live, { attributes: true, characterData: true, childList: true });
})"""
"""Keeps in the page what everybody could see last: it goes by itself, and who asks from outside may
come too late.
"""


class Tab:
    """The page of the server at ``url``, with storage of its own; ``options`` are those of a
    browser context.

    ``problems`` collects errors and warnings of the console, refusals by the page's policy, and
    requests to other hosts. ``expected`` holds regular expressions of the problems that a test
    allows.
    """

    def __init__(
        self, browser: Browser, url: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Open an empty page with the scripts that record its problems and announcements."""
        self.context: BrowserContext = browser.new_context(
            **{
                "viewport": {"width": 1400, "height": 900},
                "reduced_motion": "reduce",
                **(options or {}),
            }
        )
        self.context.set_default_timeout(PATIENCE_MS)
        self.expected: list[str] = []
        self.problems: list[str] = []
        self.requests: list[Request] = []
        self.url = url.rstrip("/") + "/"
        self.context.add_init_script(
            "addEventListener('securitypolicyviolation', (e) => console.error('policy: ' + "
            "e.violatedDirective))"
        )
        self.context.add_init_script(TOASTS)
        # Titles by the model are other requests at times of their own; a test that wants them says
        # so.
        self.context.add_init_script("try { localStorage.titles ??= false; } catch {}")
        self.page: Page = self.context.new_page()
        self._watch(self.page)

    def _watch(self, page: Page) -> None:
        def said(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.problems.append(f"{message.type}: {message.text}")

        def asked(request: Request) -> None:
            self.requests.append(request)
            if not request.url.startswith((self.url, "data:", "blob:")):
                self.problems.append(f"request to {request.url}")

        page.on("console", said)
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("request", asked)
        page.on("popup", self._watch)

    def check(self) -> None:
        """Check that nothing happened that should not, besides what was expected."""
        odd = [
            p for p in self.problems if not any(re.search(pattern, p) for pattern in self.expected)
        ]
        assert not odd, odd

    def close(self) -> None:
        """May be called again. Who serves the page has to outlive it: it asks once a second."""
        for page in self.context.pages:
            page.unroute_all(
                behavior="ignoreErrors"
            )  # what is on its way through a handler ends here
        self.context.close()

    # -- what a user does
    # ----------------------------------------------------------------------------------

    def open(self) -> Tab:
        """Load the page, and wait until it can be used."""
        self.page.goto(self.url)
        return self.until_ready()

    def beside(self) -> Tab:
        """Open another tab of the same browser: one storage, and one list of problems."""
        other = copy.copy(self)
        other.page = self.context.new_page()
        self._watch(other.page)
        return other.open()

    def reload(self) -> Tab:
        self.page.reload()
        return self.until_ready()

    def until_ready(self) -> Tab:
        self.page.wait_for_selector("body[data-ready]")
        self.settle()
        return self

    def settle(self) -> None:
        """Wait until what was drawn has been laid out and what came into view is filled: before, it
        has no text.
        """
        frames = "(go) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(go)))"
        self.page.evaluate(f"new Promise({frames})")

    def say(self, text: str, extra: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Send a message, wait for the end of its reply: the reply's timings. ``extra`` goes into
        this request.
        """
        with self.page.expect_response(completions) as asked:
            self.begin(text, extra)
        return self.timings(asked.value)

    def begin(self, text: str, extra: Mapping[str, object] | None = None) -> None:
        """Send a message."""
        if extra is not None:
            self.configure(json=json.dumps(extra))
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def act(self, button: Locator) -> dict[str, Any]:
        """Click what makes a reply, wait for its end: its timings."""
        with self.page.expect_response(completions) as asked:
            button.click()
        return self.timings(asked.value)

    def timings(self, response: Response) -> dict[str, Any]:
        """Return the timings at the end of the stream of ``response``, when the page has drawn it
        as well.
        """
        response.finished()
        self.until_idle()
        events = [
            json.loads(line[6:])
            for line in response.text().split("\n\n")
            if line.startswith("data: {")
        ]
        found: dict[str, Any] = next(
            event["timings"] for event in reversed(events) if "timings" in event
        )
        return found

    def until_idle(self) -> None:
        """Wait until no reply is on its way, and the last one has been drawn."""
        self.page.wait_for_selector("#send:not(.stop)")
        self.page.wait_for_selector(".message.assistant:last-child .tools button")
        self.settle()

    def configure(self, **fields: str) -> None:
        """Fill in fields of the settings by their names."""
        self.page.keyboard.press("Control+,")
        dialog = self.page.locator("#dialog")
        dialog.wait_for()
        for name, value in fields.items():
            field = dialog.locator(f'[name="{name}"]')
            if field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
        dialog.locator('button[value="save"]').click()
        self.until_closed()

    def until_closed(self) -> None:
        """Wait until no dialog is open, and the page has heard what the last one said: it is empty
        then.
        """
        self.page.wait_for_selector("#dialog:not([open]):empty", state="attached")

    # -- what a user sees
    # ----------------------------------------------------------------------------------

    @property
    def messages(self) -> Locator:
        return self.page.locator("#messages .message")

    @property
    def replies(self) -> Locator:
        return self.page.locator("#messages .message.assistant")

    def legend(self) -> str:
        """Return the unfolded figures of the last reply."""
        self.replies.last.locator(".costs").evaluate("details => { details.open = true }")
        return self.replies.last.locator(".legend").inner_text()

    def texts(self) -> list[str]:
        """Return the text of each message that is shown."""
        self.settle()
        return [text.strip() for text in self.messages.locator(".body").all_inner_texts()]

    def announced(self) -> str:
        """Return the last announcement to screen readers."""
        return self.page.locator("#live").inner_text()

    def noticed(self) -> str:
        """Return the last visible announcement, for as long as the page shows it."""
        return str(self.page.evaluate("window.noticed ?? ''"))

    def until(self, found: Callable[[], object]) -> None:
        """Wait until ``found`` returns something true."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not found():
            assert time.monotonic() < deadline, "waited in vain"
            if self.page.is_closed():
                time.sleep(0.02)
            else:
                self.page.wait_for_timeout(20)  # hears meanwhile what the browser tells by itself

    def server(self, path: str) -> Any:
        """Return the answer to a GET of ``path``, as a program gets it."""
        answer = httpx.get(self.url + path, timeout=PATIENCE_MS / 1000)
        answer.raise_for_status()
        return answer.json()


def completions(response: Response) -> bool:
    return response.url.endswith("v1/chat/completions")
