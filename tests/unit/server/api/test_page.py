"""Endpoints of the page: Markdown as safe HTML, and files of a directory."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from pyctl import page as assets
from pyctl.page.markdown import to_html
from pyctl.server.server_settings import ServerSettings
from tests.unit.files.test_pdf_file import pdf, says
from tests.unit.server.fake import Bench, play


def test_the_endpoint() -> None:
    """The endpoint renders up to 64 texts, refuses anything else, and needs the key like the rest
    of the API.
    """
    bench = Bench(play("x"))
    bench.service.shared.markdown.seconds = 60.0
    bench.service.shared.markdown.all_seconds = 600.0
    texts = ["**a**", "<script>", ""]
    try:
        answer = bench.post("/page/markdown", {"texts": texts})
        assert answer.json() == {"html": [to_html(text) for text in texts]}
        for wrong in ({}, {"texts": "a"}, {"texts": [1]}, {"texts": ["a"] * 65}):
            assert bench.post("/page/markdown", wrong).status_code == 400
    finally:
        bench.service.shared.markdown.close()
    assert (
        Bench(play("x"), settings=ServerSettings(api_keys=("k",)))
        .post("/page/markdown", {})
        .status_code
        == 401
    )


def test_pdf_files_are_read_for_pages_of_this_server_only() -> None:
    client = Bench(play("x"), settings=ServerSettings()).client
    answer = client.post("/page/pdf", content=pdf(says("A lamp")))
    assert answer.json() == {"text": "A lamp"}
    assert client.post("/page/pdf", content=b"x").status_code == 400
    assert (
        client.post("/page/pdf", content=b"x", headers={"Origin": "http://other"}).status_code
        == 403
    )
    assert (
        Bench(play("x"), settings=ServerSettings(api_keys=("k",))).post("/page/pdf", {}).status_code
        == 401
    )


def test_a_directory_is_served_beside_the_api(tmp_path: Path) -> None:
    """A directory is served below the prefix beside the API. No path or link leads out of it, and
    with a key its files need it, however their path is written.
    """
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text("mine")
    (site / "a.css").write_text("p{}")
    (tmp_path / "secret").write_text("no")
    (site / "link").symlink_to(tmp_path / "secret")
    client = Bench(
        play("x"), settings=ServerSettings(static_path=str(site), api_prefix="/llm")
    ).client
    assert client.get("/llm/").text == "mine"
    assert client.get("/llm/a.css").headers["content-type"].startswith("text/css")
    assert client.get("/llm/health").json() == {"status": "ok"}
    for path in ("/", "/a.css", "/llm/none", "/llm/../secret", "/llm/%2e%2e/secret", "/llm/link"):
        assert client.get(path).status_code == 404, path
        assert client.get(path).text != "no", path
    assert (
        Bench(play("x"), settings=ServerSettings(show_page=False)).client.get("/").status_code
        == 404
    )
    keyed = Bench(play("x"), settings=ServerSettings(static_path=str(site), api_keys=("k",))).client
    assert [keyed.get("/a.css", headers=h).status_code for h in ({}, {"X-Api-Key": "k"})] == [
        401,
        200,
    ]
    for path in (
        "/page/../a.css",
        "/page/%2e%2e/a.css",
        "/page/..%2fa.css",
        "/page/x/../../a.css",
        "/page/app.js",
    ):
        assert keyed.get(path).status_code == 401, path


def test_the_page_is_small_public_and_held_to_its_policy() -> None:
    """The page loads without a key, within 135 kB, from listed files only, and under a policy
    without inline code. The data it shows need the key.
    """
    client = Bench(play("x"), settings=ServerSettings(api_keys=("k",), api_prefix="/llm")).client
    first = client.get("/llm/")
    assert first.status_code == 200
    names = re.findall(r'(?:src|href)="(page/[^"]+)"', first.text)
    assert "page/app.js" in names
    answers = [first, *(client.get(f"/llm/{name}") for name in names)]
    for answer in answers:
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = client.get(
            answer.request.url.path, headers={"If-None-Match": answer.headers["etag"]}
        )
        assert again.status_code == 304
        assert again.content == b""
    assert sum(len(answer.content) for answer in answers) < 135_000
    scripts = list((Path(assets.__file__).parent / "static").glob("*.js"))
    assert {path.name for path in scripts} == {name[5:] for name in names}
    for script in scripts:
        lines = script.read_text("utf-8").splitlines()
        assert max(map(len, lines)) <= 120, script
        assert len(lines) <= 400, script
        assert not any(line.count("`") % 2 for line in lines), "what is served has no indentation"
    (style,) = re.findall(r"<style>(.*?)</style>", first.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in first.headers["content-security-policy"]
    for path in (
        "/llm/page/none.js",
        "/llm/page/../app.py",
        "/llm/page/%2e%2e%2fassets.py",
        "/llm/page/page.css",
    ):
        assert client.get(path).status_code in (401, 404), path
    assert client.post("/llm/page/markdown", {"texts": []}).status_code == 401
    assert client.get("/llm/cache").status_code == 401
    off = Bench(play("x"), settings=ServerSettings(show_page=False)).client
    assert [off.get(path).status_code for path in ("/", "/index.html", "/page/app.js")] == [404] * 3
    assert off.get("/props").json()["ui"] is False
