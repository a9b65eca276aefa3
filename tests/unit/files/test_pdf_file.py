"""Text of PDF files: valid ones, damaged ones, and those that would take unbounded time and
memory.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from pyctl.errors import RequestError
from pyctl.files.pdf_file import pdf_text
from pyctl.terminal.conversation import read_text


def pdf(content: bytes, compress: bool = False, n_pages: int = 1) -> bytes:
    """Return a PDF file whose pages show the stream ``content``."""
    data = zlib.compress(content, 9) if compress else content
    kids = " ".join(f"{5 + i} 0 R" for i in range(n_pages))
    page = (
        b"<</Type/Page/Parent 2 0 R/Contents 4 0 R/MediaBox[0 0 99 99]/Resources<</Font<</F 3 "
        b"0 R>>>>>>"
    )
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {n_pages}/Kids[{kids}]>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
        f"<</Length {len(data)}{'/Filter/FlateDecode' if compress else ''}>>stream\n".encode()
        + data
        + b"\nendstream",
        *([page] * n_pages),
    ]
    made = bytearray(b"%PDF-1.4\n")
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(made))
        made += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    end += f"trailer<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n{len(made)}\n%%EOF\n"
    return bytes(made) + end.encode()


def says(text: str) -> bytes:
    return f"BT /F 12 Tf 9 9 Td ({text}) Tj ET".encode("cp1252")


def test_the_text_of_all_pages(tmp_path: Path) -> None:
    assert (
        pdf_text(pdf(says("The north d\u00f6or"), n_pages=2))
        == "The north d\u00f6or\n\nThe north d\u00f6or"
    )
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf(says("A lamp"), compress=True))
    assert read_text(path) == "a.pdf:\n```\nA lamp\n```\n\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"plain", "not a PDF"),
        (b"%PDF-1.4\n" + bytes(range(256)) * 20, "cannot read"),
        (pdf(b""), "no text"),
        (pdf(says("x"), n_pages=2001), "pages"),
        (pdf(b"0 " * (200 << 20), compress=True), "PDF file"),  # 400 MiB of 400 KiB
    ],
    ids=["plain", "broken", "empty", "pages", "bomb"],
)
def test_what_cannot_be_read_is_said(data: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        pdf_text(data)


def test_time_and_size_are_bounded() -> None:
    with pytest.raises(RequestError, match="more than 0 seconds"):
        pdf_text(pdf(says("x")), seconds=0.0)
    with pytest.raises(RequestError, match="may have 9 bytes"):
        pdf_text(pdf(says("x")), max_bytes=9)
