"""Models by name, from a server on this machine that answers as huggingface.co does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.web_server import Handler, web_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "README.md": b"words",
    "mmproj-model-F16.gguf": b"GGUF eyes",
    "model-BF16-00001-of-00002.gguf": b"GGUF one",
    "model-BF16-00002-of-00002.gguf": b"GGUF two",
    "model-Q4_K_M.gguf": b"GGUF small",
    "model-Q8_0.gguf": b"GGUF large",
}
REPOS = {
    "org/model-GGUF": FILES,
    "org/large": {"x-IQ2_M.gguf": b"GGUF", "x-q8_0.gguf": b"GGUF 8"},
    "org/odd": {
        "mmproj.gguf": b"-",
        "sub/first.gguf": b"GGUF first",
        "sub/second.gguf": b"GGUF second",
    },
    "org/seeing": {
        "m-Q4_K_M.gguf": b"GGUF 4",
        "m-Q8_0.gguf": b"GGUF 8",
        "mmproj-F16.gguf": b"GGUF eyes 16",
        "mmproj-Q8_0.gguf": b"GGUF eyes 8",
        "other/mmproj-Q4_0.gguf": b"GGUF eyes 4",
        "sub/m-BF16.gguf": b"GGUF 16",
        "sub/mmproj-x-F32.gguf": b"GGUF eyes 32",
    },
    "org/none": {"README.md": b"words"},
    "org/secret": {"s-Q8_0.gguf": b"GGUF secret"},
}


class Hub(Handler):
    """The list of files, their sizes and their contents; ``seen`` counts requests, ``broken``
    answers 503.
    """

    seen: list[str]
    broken = False

    def do_HEAD(self) -> None:
        status, body, headers = self._answer()
        self.send(status, b"", len(body), **headers)

    def do_GET(self) -> None:
        status, body, headers = self._answer()
        self.send(status, body, **headers)

    def _answer(self) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers for the path of the request."""
        Hub.seen.append(self.path)
        if Hub.broken:
            return 503, b"", {}
        if (match := re.fullmatch(r"/api/models/([^/]+/[^/?]+).*", self.path)) and match[
            1
        ] in REPOS:
            if match[1] == "org/secret" and self.headers.get("Authorization") != "Bearer t0ken":
                return 401, b"", {"X-Error-Code": "GatedRepo"}
            names = [{"rfilename": name} for name in REPOS[match[1]]]
            body = json.dumps({"id": match[1], "sha": COMMIT, "siblings": names}).encode()
            return 200, body, {"Content-Type": "application/json"}
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path):
            if (found := REPOS.get(match[1], {}).get(match[2])) is None:
                return 404, b"", {"X-Error-Code": "EntryNotFound"}
            return (
                200,
                found,
                {"ETag": f'"{hashlib.sha256(found).hexdigest()}"', "X-Repo-Commit": COMMIT},
            )
        return 401, b"", {"X-Error-Code": "RepoNotFound"}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    Hub.seen = []
    with web_server(Hub) as url:
        yield url


CHILD = """
import json, sys
from pyctl.model_files import HubSettings
from pyctl.errors import ConfigError
from pyctl.model_files.hub import fetch, fetch_companion
from pyctl.model_files.hub_cache import cached_files
if sys.argv[2:]:
    import logging
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='"%(message)s"')
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
for settings in json.loads(sys.argv[1]):
    try:
        sees = settings.pop("sees", False)
        path = fetch(HubSettings(**settings)) if settings else None
        if sees:
            eyes = fetch_companion(HubSettings(**settings), path)
            print(json.dumps(eyes and eyes.name))
        else:
            print(json.dumps([path.name, path.read_text()] if path else list(cached_files())))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""
Run = Callable[..., list[object]]


@pytest.fixture
def run(hub: str, tmp_path: Path) -> Run:
    """run({settings}, ...) -> [name, content] of the file, or the text of the error, for each.

    In a process of its own: the library reads its variables when it is imported. No settings mean
    the list of models.
    """

    def child(
        *settings: dict[str, object], endpoint: str = hub, logs: bool = False, **variables: str
    ) -> list[object]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environ |= {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "XDG_CACHE_HOME": str(tmp_path),
        }
        environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environ |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60", **variables}
        command = [sys.executable, "-c", CHILD, json.dumps(settings), *["logs"] * logs]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return child


def test_the_quant_is_chosen_as_llama_server_does(run: Run) -> None:
    """Q4_K_M comes before Q8_0, and Q8_0 before the first file; a quant in the name, a file or a
    token is respected. Another choice than llama-server's would fetch gigabytes in vain.
    """
    model = {"hf_repo": "org/model-GGUF"}
    assert run(
        model,
        {"hf_repo": "org/model-GGUF:q8_0"},
        {"hf_repo": "org/model-GGUF:bf16"},
        {**model, "hf_file": "mmproj-model-F16.gguf"},
        {"hf_repo": "org/large"},
        {"hf_repo": "org/odd"},
        {"hf_repo": "org/secret", "hf_token": "t0ken"},
        {},
    ) == [
        ["model-Q4_K_M.gguf", "GGUF small"],
        ["model-Q8_0.gguf", "GGUF large"],
        ["model-BF16-00001-of-00002.gguf", "GGUF one"],
        ["mmproj-model-F16.gguf", "GGUF eyes"],
        ["x-q8_0.gguf", "GGUF 8"],
        ["first.gguf", "GGUF first"],
        ["s-Q8_0.gguf", "GGUF secret"],
        [
            *(
                "org/large:Q8_0",
                "org/model-GGUF:BF16",
                "org/model-GGUF:Q4_K_M",
                "org/model-GGUF:Q8_0",
                "org/odd",
            ),
            "org/secret:Q8_0",
        ],
    ]


def test_a_download_into_a_log_has_a_line(run: Run) -> None:
    found = run({"hf_repo": "org/model-GGUF"}, {"hf_repo": "org/model-GGUF"}, logs=True)
    assert found == [
        "downloading model-Q4_K_M.gguf: 0 MiB",
        ["model-Q4_K_M.gguf", "GGUF small"],
        ["model-Q4_K_M.gguf", "GGUF small"],  # it is here
    ]


def test_the_vision_encoder_beside_a_model_comes_with_it(run: Run, hub: str) -> None:
    """The nearest one, then the one whose quant is most like the model's, as llama-server has
    it.
    """
    one = {"hf_repo": "org/model-GGUF", "sees": True}
    many = {"hf_repo": "org/seeing", "sees": True}
    assert run(
        one,
        {**many, "hf_file": "m-Q4_K_M.gguf"},
        {**many, "hf_file": "m-Q8_0.gguf"},
        {**many, "hf_file": "sub/m-BF16.gguf"},
        {"hf_repo": "org/large", "sees": True},
    ) == [
        "mmproj-model-F16.gguf",
        "mmproj-Q8_0.gguf",
        "mmproj-Q8_0.gguf",
        "mmproj-x-F32.gguf",
        None,
    ]
    n_seen = len(Hub.seen)
    assert run({**one, "offline": True}, {**many, "hf_file": "m-Q8_0.gguf", "offline": True}) == [
        "mmproj-model-F16.gguf",
        "mmproj-Q8_0.gguf",
    ]
    assert len(Hub.seen) == n_seen
    assert run(one, endpoint="http://127.0.0.1:9") == ["mmproj-model-F16.gguf"]


def test_a_vision_encoder_that_is_none(run: Run) -> None:
    (message,) = run({"hf_repo": "org/odd", "sees": True})
    assert str(message).startswith("mmproj.gguf of org/odd is not a GGUF file")


def test_what_was_fetched_is_found_without_a_network(run: Run, hub: str) -> None:
    """A fetched model needs no network again: not with --offline, and not where the hub cannot be
    reached or fails; --offline sends no request at all.
    """
    split = {"hf_repo": "org/model-GGUF:BF16"}
    small = {"hf_repo": "org/model-GGUF"}
    fetched = run(split, small)
    n_seen = len(Hub.seen)
    assert run({**split, "offline": True}, {**small, "offline": True}) == fetched
    assert len(Hub.seen) == n_seen
    assert run(split, small, endpoint="http://127.0.0.1:9") == fetched
    assert run(split, HF_HUB_OFFLINE="1") == fetched[:1]
    Hub.broken = True
    try:
        assert run(split) == fetched[:1]
    finally:
        Hub.broken = False
    (missing,) = run({"hf_repo": "org/model-GGUF:Q8_0", "offline": True})
    assert missing == (
        "no GGUF file of quant Q8_0 in the downloaded part of org/model-GGUF; found "
        "model-BF16-00001-of-00002.gguf,"
        " model-Q4_K_M.gguf"
    )


def test_a_split_model_of_which_a_part_is_missing(run: Run, tmp_path: Path) -> None:
    run({"hf_repo": "org/model-GGUF:BF16"})
    (part,) = tmp_path.rglob("model-BF16-00002-of-00002.gguf")
    part.unlink()
    (message,) = run({"hf_repo": "org/model-GGUF:BF16", "offline": True})
    part = "model-BF16-00002-of-00002.gguf"
    assert message == (f"{part} of org/model-GGUF is not downloaded yet, and --offline forbids it")


def test_what_the_hub_does_not_have(run: Run, hub: str) -> None:
    """Each error names the cause and the remedy: a missing model, quant or file with those that
    exist, terms that have to be accepted, and --offline without a download.
    """
    assert run(
        {"hf_repo": "org/nothing"},
        {"hf_repo": "org/model-GGUF:Q5_K_M"},
        {"hf_repo": "org/model-GGUF", "hf_file": "x.gguf"},
        {"hf_repo": "org/none"},
        {"hf_repo": "org/secret"},
        {"hf_repo": "org/model-GGUF", "offline": True},
        {},
    ) == [
        f"there is no model org/nothing at {hub}, or it needs --hf-token",
        "no GGUF file of quant Q5_K_M in org/model-GGUF; found model-BF16-00001-of-00002.gguf, "
        "model-Q4_K_M.gguf,"
        " model-Q8_0.gguf",
        (
            "no file x.gguf in org/model-GGUF; found model-BF16-00001-of-00002.gguf, "
            "model-Q4_K_M.gguf, model-Q8_0.gguf"
        ),
        "no GGUF file in org/none; found none",
        "org/secret requires that you accept its terms; then pass --hf-token",
        "org/model-GGUF is not downloaded yet, and --offline forbids it",
        [],
    ]


def test_no_network_and_nothing_fetched(run: Run) -> None:
    (message,) = run({"hf_repo": "org/model-GGUF"}, endpoint="http://127.0.0.1:9")
    assert str(message).startswith(
        "org/model-GGUF is not downloaded yet, and http://127.0.0.1:9 cannot be reached ("
    )
