"""The text of PDF files, read by pypdf in a process that is bounded in time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from pyctl.errors import RequestError
from pyctl.processes.module_process import answer_of_module
from pyctl.settings.limit import limit

__all__ = ["MAX_PDF_BYTES", "is_pdf", "pdf_text"]

MAX_PDF_BYTES = limit(32 << 20, "a PDF file", "400", "request", "bytes")
_MAX_PAGES = limit(2000, "pages of a PDF file", "400", "request")
_MAX_CHARS = limit(4 << 20, "text of a PDF file", "400", "request", "characters")
_SECONDS = limit(20.0, "time to read a PDF file", "400", "request", "s")
_MEMORY = limit(1 << 30, "memory of the process that reads a PDF file", "400", "process", "bytes")


def is_pdf(data: bytes) -> bool:
    """Return whether ``data`` starts as a PDF file does."""
    return data.startswith(b"%PDF-")


def pdf_text(data: bytes, max_bytes: int = MAX_PDF_BYTES, seconds: float = _SECONDS) -> str:
    """Return the text of all pages of a PDF file. Raises RequestError."""
    if not is_pdf(data):
        raise RequestError("this is not a PDF file")
    if len(data) > max_bytes:
        raise RequestError(f"a PDF file may have {max_bytes:,} bytes, not {len(data):,}")
    try:
        output = answer_of_module(__name__, data, seconds)
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"reading this PDF file takes more than {seconds:g} seconds") from error
    try:
        answer = json.loads(output)
    except ValueError as error:
        raise RequestError("reading this PDF file takes too much time or memory") from error
    if "error" in answer:
        raise RequestError(f"cannot read this PDF file: {answer['error']}")
    return str(answer["text"])


def _read(data: bytes) -> str:
    """Return the text of the pages. Raises ValueError with a sentence, and the errors of pypdf."""
    import io

    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is encrypted")
    if len(reader.pages) > _MAX_PAGES:
        raise ValueError(f"it has more than {_MAX_PAGES:,} pages")
    texts: list[str] = []
    n_chars = 0
    for page in reader.pages:
        texts.append(page.extract_text().replace("\0", "").strip())
        n_chars += len(texts[-1])
        if n_chars > _MAX_CHARS:
            raise ValueError(f"it has more than {_MAX_CHARS:,} characters")
    if not n_chars:
        raise ValueError("it contains no text; its pages may be scanned images")
    return "\n\n".join(texts)


def _main() -> None:
    """Print the answer for the file on the standard input."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(_SECONDS) + 1, int(_SECONDS) + 2))
    os.nice(5)
    try:
        answer = {"text": _read(sys.stdin.buffer.read(MAX_PDF_BYTES + 1))}
    except MemoryError:
        return
    except Exception as error:
        answer = {"error": str(error)[:200] or type(error).__name__}
    text = json.dumps(answer)  # escapes halves of surrogate pairs, which UTF-8 does not have
    sys.stdout.write(text)


if __name__ == "__main__":
    _main()
