"""The built-in tools for files, run in the process of `files_process`, which bounds their time and memory.

Each takes the parameters of a call and returns its result. ToolError is a result, too: the model may read it.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

__all__ = ["FILE_TOOLS", "ParameterError", "ToolError", "absolute"]

READ_BYTES = 16 << 10
RAW_BYTES = 32 << 20
MOST_FOUND = 100
LIST_SECONDS = 10.0
_SEARCHED_BYTES = 8 << 20
_EDITED_BYTES = 8 << 20
_LINE_LETTERS = 500
_OUTPUT_LETTERS = 64 << 10
_CUT = "[output truncated]"

_UNWALKED = frozenset(
    (
        *(".git", ".svn", ".hg", "node_modules", "__pycache__", ".venv", "venv"),
        *("dist", "build", "target", ".cache", ".idea", ".vscode"),
    )
)
"""Names of directories that are listed and not descended into."""


class ToolError(Exception):
    """The tool could not do what it was asked to; the text is for the model."""


class ParameterError(Exception):
    """A parameter is missing or of another type."""


_REQUIRED: Any = object()


def parameter(params: Mapping[str, Any], name: str, kind: type, otherwise: Any = _REQUIRED) -> Any:
    """The parameter ``name``, which has to be a ``kind``. Raises ParameterError."""
    value = params.get(name)
    if value is None:
        if otherwise is _REQUIRED:
            raise ParameterError(f"parameter {name!r} is missing")
        return otherwise
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ParameterError(f"parameter {name!r} is not of type {kind.__name__}")
    return value


def absolute(path: str, cwd: str = "") -> str:
    """``path`` without ~ and dots, within ``cwd`` if it is relative."""
    if "\0" in path:
        raise ToolError("a path cannot hold a zero byte")
    return os.path.abspath(os.path.join(os.path.expanduser(cwd) or os.getcwd(), os.path.expanduser(path)))


def _path(params: Mapping[str, Any]) -> tuple[str, str]:
    """The parameter ``path`` as it was given, and absolute."""
    given = parameter(params, "path", str)
    return given, absolute(given, params.get("cwd", ""))


def _failed(what: str, path: str, error: OSError) -> ToolError:
    return ToolError(f"cannot {what} {path}: {error.strerror or error}")


def _content(path: str, shown: str, most: int) -> bytes:
    """The bytes of a regular file; pipes and devices would never end."""
    try:
        size = os.stat(path).st_size
        if not os.path.isfile(path):
            raise ToolError(f"not a file: {shown}")
        if size > most:
            raise ToolError(f"{shown} is too large: {size:,} bytes, the most is {most:,}")
        return Path(path).read_bytes()
    except OSError as error:
        raise _failed("read", shown, error) from error


# -- read_file ---------------------------------------------------------------------------------------------------------


def read_file(params: Mapping[str, Any]) -> dict[str, Any]:
    """The text of a file, or some of its lines; with ``as_base64`` its bytes."""
    shown, path = _path(params)
    first, last = parameter(params, "start_line", int, 1), parameter(params, "end_line", int, -1)
    numbered = parameter(params, "append_loc", bool, False)
    if params.get("as_base64"):
        data = _content(path, shown, RAW_BYTES)
        return {"base64": base64.b64encode(data).decode(), "size_bytes": len(data)}
    try:
        if not os.path.isfile(path):
            raise ToolError(f"no such file: {shown}")
        size = os.path.getsize(path)
        if size > READ_BYTES and last == -1:
            raise ToolError(f"{shown} has {size:,} bytes; read a part of it with start_line and end_line")
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            return {"plain_text_response": _lines(file, max(first, 1), last, numbered)}
    except OSError as error:
        raise _failed("read", shown, error) from error


def _lines(file: Iterator[str], first: int, last: int, numbered: bool) -> str:
    parts, n_bytes = list[str](), 0
    for number, line in enumerate(islice(file, first - 1, None if last == -1 else max(last, 0)), first):
        text = (f"{number}\u2192" if numbered else "") + line.rstrip("\n") + "\n"
        n_bytes += len(text.encode("utf-8", "replace"))
        if n_bytes > READ_BYTES:
            return "".join((*parts, _CUT))
        parts.append(text)
    return "".join(parts)


# -- finding files -----------------------------------------------------------------------------------------------------


def glob_pattern(glob: str) -> tuple[re.Pattern[str], bool]:
    """``glob`` as a pattern, and whether it is for whole paths: without a slash it is for the last part of them."""
    is_path = "/" in glob
    if is_path and not glob.startswith(("/", "**/")):
        glob = "**/" + glob
    made, rest = "", glob.lstrip("/")
    while rest:
        for token, meaning in (("**/", "(?:.*/)?"), ("**", ".*"), ("*", "[^/]*"), ("?", "[^/]")):
            if rest.startswith(token):
                made, rest = made + meaning, rest[len(token) :]
                break
        else:
            letter, rest = rest[0], rest[1:]
            end = rest.find("]", 1) if letter == "[" else -1
            if end > 0:
                body, rest = rest[:end].replace("\\", "\\\\").replace("[", "\\["), rest[end + 1 :]
                letter = f"[^{body[1:]}]" if body[0] in "!^" else f"[{body}]"
            else:
                letter = re.escape(letter)
            made += letter
    try:
        return re.compile(made, re.DOTALL), is_path
    except re.error as error:
        raise ToolError(f"invalid glob {glob!r}: {error}") from error


def _matcher(params: Mapping[str, Any]) -> Callable[[str], bool]:
    include, exclude = parameter(params, "include", str, "") or "**", parameter(params, "exclude", str, "")
    wanted, unwanted = glob_pattern(include), glob_pattern(exclude) if exclude else None

    def fits(pattern: tuple[re.Pattern[str], bool], path: str) -> bool:
        return pattern[0].fullmatch(path if pattern[1] else path.rpartition("/")[2]) is not None

    return lambda path: fits(wanted, path) and not (unwanted is not None and fits(unwanted, path))


def entries(base: str, kind: str, depth: int) -> Iterator[tuple[str, bool]]:
    """Paths below ``base`` and whether each is a directory; as git sees them if only files are asked for.

    The last is ("", True) when the time was not enough.
    """
    end = time.monotonic() + LIST_SECONDS
    if kind == "file" and (known := _git_files(base)) is not None:
        for path in known:
            if (not depth or path.count("/") < depth) and os.path.isfile(os.path.join(base, path)):
                yield path, False
        return
    waiting = [("", 1)]
    while waiting:
        above, level = waiting.pop()
        try:
            found = sorted(os.scandir(os.path.join(base, above)), key=lambda each: each.name)
        except OSError:
            continue
        for entry in found:
            if time.monotonic() > end:
                yield "", True
                return
            path, is_dir = above + entry.name, entry.is_dir()
            if is_dir and kind != "file":
                yield path, True
            elif not is_dir and kind != "dir" and entry.is_file():
                yield path, False
            walked = is_dir and not entry.is_symlink() and entry.name not in _UNWALKED
            if walked and (not depth or level < depth):
                waiting.append((path + "/", level + 1))


def _git_files(base: str) -> list[str] | None:
    """The files below ``base`` that git does not ignore; None outside of a repository."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", base, "ls-files", "-z", "--cached", "--others"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [*command, "--exclude-standard"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LIST_SECONDS,
        )
        if done.returncode == 0:
            return [path for path in done.stdout.decode("utf-8", "replace").split("\0") if path]
    return None


def file_glob_search(params: Mapping[str, Any]) -> dict[str, Any]:
    """Files or directories whose paths fit a glob."""
    shown, base = _path(params)
    kind = parameter(params, "type", str, "file")
    depth = max(parameter(params, "max_depth", int, 0), 0)
    most = parameter(params, "limit", int, MOST_FOUND)
    if kind not in ("file", "dir", "all"):
        raise ToolError(f"invalid type {kind!r}: it is one of file, dir, all")
    if most < 1:
        raise ToolError(f"invalid limit {most}: the least is 1")
    if not os.path.isdir(base):
        raise ToolError(f"no such directory: {shown}")
    fits, found, is_cut = _matcher(params), [], False
    for path, is_dir in entries(base, kind, depth):
        is_cut = is_cut or not path
        if path and fits(path):
            found.append({"path": path, "type": "dir" if is_dir else "file"})
    listed = found[: min(most, MOST_FOUND)]
    lines = [each["path"] + "/" * (each["type"] == "dir") for each in listed]
    lines += ["", "---", f"Total matches: {len(found)}"]
    if len(found) > len(listed):
        lines.append(f"[only {len(listed)} are listed; a narrower glob lists the others]")
    if is_cut:
        lines.append("[there may be more: the time was not enough]")
    return {"plain_text_response": "\n".join(lines) + "\n", "entries": listed, "base": base}


def grep_search(params: Mapping[str, Any]) -> dict[str, Any]:
    """Lines of files that a regular expression fits."""
    shown, base = _path(params)
    text = parameter(params, "pattern", str)
    context = min(max(parameter(params, "context_lines", int, 0), 0), 50)
    numbered = parameter(params, "return_line_numbers", bool, False) or context > 0
    text = re.escape(text) if parameter(params, "literal", bool, False) else text
    try:
        pattern = re.compile(text, re.IGNORECASE if parameter(params, "ignore_case", bool, False) else 0)
    except (re.error, OverflowError, RecursionError) as error:
        raise ToolError(f"invalid regular expression: {error}") from error
    if os.path.isfile(base):
        files: Iterator[tuple[str, str]] = iter([(base, shown)])
    elif os.path.isdir(base):
        fits = _matcher(params)
        listed = (path for path, _ in entries(base, "file", 0))
        files = ((os.path.join(base, path), path) for path in listed if path and fits(path))
    else:
        raise ToolError(f"no such file or directory: {shown}")
    lines, total, n_letters, is_full = list[str](), 0, 0, False
    for path, name in files:
        for found in _found_in(path, name, pattern, context, numbered):
            n_letters += sum(map(len, found))
            is_full = total == MOST_FOUND or n_letters > _OUTPUT_LETTERS
            if is_full:
                break
            total += 1
            lines += found
        if is_full:
            break
    lines += ["", "---", f"Total matches: {total}"]
    if is_full:
        lines.append("[there are more; a narrower path, include or pattern shows them]")
    return {"plain_text_response": "\n".join(lines) + "\n"}


def _found_in(path: str, name: str, pattern: re.Pattern[str], context: int, numbered: bool) -> Iterator[list[str]]:
    """The lines to show for each match in a file, without files that are too large or no text."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _SEARCHED_BYTES:
            return
        data = Path(path).read_bytes()
    except OSError:
        return
    if b"\0" in data[:8192]:
        return
    texts = data.decode("utf-8", "replace").split("\n")
    for at, text in enumerate(texts):
        if pattern.search(text) and not (at == len(texts) - 1 and not text):
            shown = range(max(at - context, 0), min(at + context + 1, len(texts)))
            made = []
            for number in shown:
                mark = ":" if number == at else "-"
                number_text = f"{number + 1}{mark}" if numbered else ""
                made.append(f"{name}{mark}{number_text}{texts[number].rstrip()[:_LINE_LETTERS]}")
            yield [*made, "--"] if context else made


# -- writing -----------------------------------------------------------------------------------------------------------


def write_file(params: Mapping[str, Any]) -> dict[str, Any]:
    """Write a whole file, with the directories that lead to it."""
    shown, path = _path(params)
    data = parameter(params, "content", str).encode("utf-8", "replace")
    _write(path, shown, data)
    return {"result": "file written successfully", "path": shown, "bytes": len(data)}


def _write(path: str, shown: str, data: bytes) -> None:
    """Replace the file at once: this process may be ended at any time."""
    path = os.path.realpath(path)
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ToolError(f"not a file: {shown}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor, made = tempfile.mkstemp(prefix=".pyctl-", dir=os.path.dirname(path))
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            if os.path.exists(path):
                shutil.copymode(path, made)
            else:
                mask = os.umask(0)
                os.umask(mask)
                os.chmod(made, 0o666 & ~mask)
            os.replace(made, path)
        except BaseException:
            os.unlink(made)
            raise
    except OSError as error:
        raise _failed("write", shown, error) from error


def edit_file(params: Mapping[str, Any]) -> dict[str, Any]:
    """Replace texts in a file, each of which is there once."""
    shown, path = _path(params)
    edits = parameter(params, "edits", list)
    if not edits or not all(isinstance(edit, dict) for edit in edits):
        raise ToolError("'edits' must be a list of objects, and not empty")
    before = _content(path, shown, _EDITED_BYTES).decode("utf-8", "surrogateescape")
    places = sorted((*_place(before, edit, at, shown), at) for at, edit in enumerate(edits))
    for (_, end, _, at), (start, _, _, after) in pairwise(places):
        if start < end:
            raise ToolError(f"edits[{at}] and edits[{after}] overlap in {shown}; make them one edit")
    text = before
    for start, end, new, _ in reversed(places):
        text = text[:start] + new + text[end:]
    if text == before:
        raise ToolError("the edits change nothing")
    _write(path, shown, text.encode("utf-8", "surrogateescape"))
    return {"result": "file edited successfully", "path": shown, "edits_applied": len(edits)}


def _place(text: str, edit: Mapping[str, Any], at: int, shown: str) -> tuple[int, int, str]:
    """Where an edit replaces what by what. If the text is not there to the letter, the look of letters counts."""
    old, new = parameter(edit, "old_text", str), parameter(edit, "new_text", str)
    if not old:
        raise ToolError(f"edits[{at}].old_text is empty")
    plain, origins = _plain(text)
    wanted, _ = _plain(old)
    n_found = plain.count(wanted) if wanted else text.count(old)
    if n_found > 1:
        raise ToolError(f"edits[{at}].old_text is {n_found} times in {shown}; it has to be unique")
    if (start := text.find(old)) >= 0:
        return start, start + len(old), new
    if not n_found:
        raise ToolError(f"edits[{at}].old_text is not in {shown}; it has to be there to the letter")
    start = plain.find(wanted)
    return origins[start], origins[start + len(wanted) - 1] + 1, new


_LOOKS = {
    **dict.fromkeys("\u2018\u2019\u201a\u201b", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f", '"'),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    **dict.fromkeys("\u00a0\u202f\u205f\u3000", " "),
    **{chr(code): " " for code in range(0x2002, 0x200B)},
}
"""Letters that models write as others."""


def _plain(text: str) -> tuple[str, list[int]]:
    """``text`` with plain quotes, dashes and blanks and without blanks at the ends of lines; and where each is from."""
    letters: list[str] = []
    origins: list[int] = []
    start = 0
    for line in text.split("\n"):
        kept = line.rstrip(" \t\r")
        letters += [_LOOKS.get(letter, letter) for letter in kept]
        origins += range(start, start + len(kept))
        start += len(line) + 1
        if start <= len(text):
            letters.append("\n")
            origins.append(start - 1)
    return "".join(letters), origins


FILE_TOOLS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "read_file": read_file,
    "file_glob_search": file_glob_search,
    "grep_search": grep_search,
    "write_file": write_file,
    "edit_file": edit_file,
}
"""The tools by their names."""
