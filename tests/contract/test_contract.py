"""pyctl answers every request of `probes` as llama-server does, except for the differences listed
in `reasons`.

Runs where LLAMA_SERVER names the binary: `make contract LLAMA_SERVER=/path/to/llama-server`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyctl.llama.library.extension import build_version
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tests.contract.fields import TEMPLATE
from tests.contract.probes import GROUPS, MARKER, OWN, WITH_HEAD, Probe, probes
from tests.contract.reasons import Verdict, document, judge, summary
from tests.contract.shape import Reduced, reduced
from tests.pictures import image_bytes
from tools.generator import TINY_HYBRID, VISION_SHAPES, cached_model

LLAMA_SERVER = os.environ.get("LLAMA_SERVER", "")
ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results" / "contract.md"
FLAGS = ("-c", "8192", "-t", "1", "-ub", "128")


def head() -> str:
    """Return the first lines of a page of results."""
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
    ).strip()
    lines = (
        f"commit: {commit}",
        f"date: {date.today()}",
        f"machine: {os.cpu_count()} cores; {build_version()}",
    )
    return "\n- ".join(
        (
            "",
            *lines,
            "command: `make contract LLAMA_SERVER=PATH`",
            "weights: random, of a tiny hybrid model",
        )
    )


class Subject:
    """A server that is started when it is first asked, and again after it has ended by itself."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self._client = httpx.Client(timeout=30, headers={"accept-encoding": "identity"})

    def ask(self, probe: Probe) -> Reduced:
        """Return the reduced reply; status 0 if the server ended or sent no whole reply."""
        content = (
            probe.body
            if isinstance(probe.body, bytes) or probe.body is None
            else json.dumps(probe.body)
        )
        headers = (
            {"content-type": "application/json", **probe.headers}
            if content is not None
            else probe.headers
        )
        if not self._process.is_running:
            self._process.start()
        url = self._process.url + (probe.path or probe.endpoint)
        try:
            response = self._client.request(probe.method, url, content=content, headers=headers)
        except httpx.TransportError as error:
            return {"status": 0, "type": type(error).__name__, "headers": {}, "body": None}
        return reduced(response, response.content, cors="Origin" in probe.headers)

    def close(self) -> None:
        self._client.close()
        self._process.stop()


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Verdict]]:
    """Yield the verdicts on all probes, which are sent to a pair of servers for each group of
    flags.
    """
    if not LLAMA_SERVER:
        pytest.skip("LLAMA_SERVER does not name a llama-server to compare with")
    directory = tmp_path_factory.mktemp("contract")
    (directory / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    bare, headed = (
        str(cached_model(shape, directory)) for shape in (TINY_HYBRID, TINY_HYBRID.with_nextn())
    )
    eyes = str(cached_model(VISION_SHAPES["tiny-vision"], directory))
    media = directory / "media"
    (media / "inside").mkdir(parents=True)
    (media / "inside" / "a.png").write_bytes(image_bytes(200, 150, seed=1))
    flags = [*FLAGS, "--chat-template-file", str(directory / "template.jinja")]
    with ExitStack() as opened:

        def subject(name: str, command: tuple[str, ...], group: str) -> Subject:
            """Return a server with the flags of ``group``, which starts with its first request."""
            slots = directory / f"slots-{name}"
            slots.mkdir(exist_ok=True)
            own = [
                flag.format(directory=f"{slots}/", mmproj=eyes, media=media)
                for flag in GROUPS[group]
            ]
            own += [
                "-m",
                headed if group in WITH_HEAD else bare,
                *(OWN.get(group, ()) if name == "pyctl" else ()),
            ]
            prefix = own[own.index("--api-prefix") + 1] if "--api-prefix" in own else ""
            log = directory / f"{name}-{group}.log"
            marker = {"LLAMA_MEDIA_MARKER": MARKER}
            found = Subject(
                ServerProcess([*command, *flags, *own], log, prefix=prefix, environment=marker)
            )
            opened.callback(found.close)
            return found

        theirs = {group: subject("llama-server", (LLAMA_SERVER,), group) for group in GROUPS}
        ours = {group: subject("pyctl", PYCTL_SERVE, group) for group in GROUPS}
        only = os.environ.get("ONLY")  # one group of flags
        asked = [probe for probe in probes() if only in (None, probe.group)]
        found = [
            judge(probe, theirs[probe.group].ask(probe), ours[probe.group].ask(probe))
            for probe in asked
        ]
        print(f"\n{summary(found)}")
        if os.environ.get("KEEP"):
            KEPT.write_text(document(found, head()), encoding="utf-8")
        yield found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("endpoint", list(dict.fromkeys(probe.endpoint for probe in probes())))
def test_no_new_difference(verdicts: list[Verdict], endpoint: str) -> None:
    new = {
        f"{v.probe.method} {v.probe.what}": v.new
        for v in verdicts
        if v.probe.endpoint == endpoint and v.new
    }
    assert not new


def reply(status: int = 200, **body: Any) -> Reduced:
    return {"status": status, "type": "application/json", "headers": {}, "body": body}


def test_a_difference_without_a_reason_is_new() -> None:
    probe = Probe("/completion", "plain")
    assert judge(probe, reply(content="a"), reply(content="b")).kind == "same"
    assert judge(probe, reply(content="a"), reply()).new
    assert judge(probe, reply(content="a"), reply(content=1)).new
    assert judge(probe, reply(200), reply(500)).new


def test_an_event_is_compared_with_the_most_alike() -> None:
    def verdict(*streams: list[dict[str, Any]]) -> Verdict:
        bodies = ({"body": [["", event] for event in stream]} for stream in streams)
        return judge(
            Probe("/completion", ""),
            *({**reply(), "type": "text/event-stream", **body} for body in bodies),
        )

    piece = {"content": "a"}
    counted = {"content": "a", "n": 1}
    end = {"stop": True}
    assert verdict([piece, counted, end], [counted, end]).new == ("event: extra n",)
    assert (
        verdict([piece, end], [piece]).kind == verdict([counted], [piece]).kind == "lack a member"
    )


def test_a_known_difference_is_told_by_its_reason() -> None:
    verdict = judge(Probe("/tokenize", "number"), reply(500), reply(400))
    assert not verdict.new
    text = document([verdict], "")
    assert (
        "1 requests: 0 same, 0 add members, 0 show another value, 0 lack a member, 1 refused with "
        "another"
    ) in text
    assert "| POST /tokenize | 1 | number | status: 500 / 400 |" in text


def test_the_page_has_the_counts_that_were_kept() -> None:
    (counts,) = re.findall(r"^[\d,]+ requests: .*$", KEPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert counts in " ".join((ROOT / "docs" / "migration.md").read_text(encoding="utf-8").split())
