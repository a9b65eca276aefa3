"""The built-in tools: their results, their bounds, and errors that go to the model."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pyctl.errors import NotFoundError, RequestError
from pyctl.tools import BUILT_IN, ToolSettings, tool_names
from pyctl.tools.files import FILE_TOOLS, ToolError
from pyctl.tools.files_process import run_file_tool
from pyctl.tools.shell import exec_shell_command
from pyctl.tools.toolbox import ToolBox


def run(name: str, path: Path | str, **params: Any) -> dict[str, Any]:
    return FILE_TOOLS[name]({"path": str(path), **params})


def text(name: str, path: Path | str, **params: Any) -> str:
    return str(run(name, path, **params)["plain_text_response"])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a.py", "src/b.py", "src/deep/c.txt", "node_modules/x.py", "build/out.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"name = '{name}'\nvalue = 1\n")
    return tmp_path


def listed(tree: Path, **params: Any) -> list[str]:
    return sorted(entry["path"] for entry in run("file_glob_search", tree, **params)["entries"])


def test_read_a_file_or_a_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one\ntwo\nthr\xffee\n")
    assert text("read_file", file) == "one\ntwo\nthr\ufffdee\n"
    assert text("read_file", file, start_line=2, end_line=2, append_loc=True) == "2\u2192two\n"
    assert text("read_file", "f", cwd=str(tmp_path), start_line=9) == ""
    assert run("read_file", file, as_base64=True) == {"base64": "b25lCnR3bwp0aHL/ZWUK", "size_bytes": 15}
    file.write_text("x" * 9000 + "\n" + "y" * 9000 + "\n")
    with pytest.raises(ToolError, match="start_line and end_line"):
        run("read_file", file)
    assert text("read_file", file, end_line=2) == "x" * 9000 + "\n[output truncated]"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(ToolError, match="no such file"):
            run("read_file", path)


def test_find_files_by_globs(tree: Path) -> None:
    assert listed(tree) == ["a.py", "src/b.py", "src/deep/c.txt"]
    assert listed(tree, include="*.py") == ["a.py", "src/b.py"]
    assert listed(tree, include="src/**/*.txt") == ["src/deep/c.txt"]
    assert listed(tree, include="src/*") == ["src/b.py"]
    assert listed(tree, include="[ab].p?") == ["a.py", "src/b.py"]
    assert listed(tree, include="[!a].py") == ["src/b.py"]
    assert listed(tree, exclude="src/**") == ["a.py"]
    assert listed(tree, max_depth=2) == ["a.py", "src/b.py"]
    assert listed(tree, type="dir") == ["build", "node_modules", "src", "src/deep"]
    cut = run("file_glob_search", tree, limit=1)
    assert len(cut["entries"]) == 1
    assert "Total matches: 3\n[only 1 are listed" in cut["plain_text_response"]
    for wrong in ({"type": "x"}, {"limit": 0}):
        with pytest.raises(ToolError, match="invalid"):
            run("file_glob_search", tree, **wrong)


def test_find_lines(tree: Path) -> None:
    assert text("grep_search", tree, pattern=r"value = \d").endswith("\n---\nTotal matches: 3\n")
    found = text("grep_search", tree, pattern="NAME = 'src/b", literal=True, ignore_case=True, context_lines=1)
    assert found == "src/b.py:1:name = 'src/b.py'\nsrc/b.py-2-value = 1\n--\n\n---\nTotal matches: 1\n"
    (tree / "data.bin").write_bytes(b"\0value")
    (tree / "long").write_text("value " * 1000)
    long = text("grep_search", tree, pattern="^value", include="{long,*}"[1:5])
    assert len(long.splitlines()[0]) == len("long:") + 500
    (tree / "many").write_text("value\n" * 1000)
    assert "Total matches: 100\n[there are more" in text("grep_search", tree / "many", pattern="value")
    with pytest.raises(ToolError, match="invalid regular expression"):
        run("grep_search", tree, pattern="(")
    with pytest.raises(ToolError, match="no such"):
        run("grep_search", tree / "none", pattern="x")


def test_files_are_written_as_a_whole_and_keep_their_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "new" / "f", tmp_path / "link"
    assert run("write_file", file, content="é")["bytes"] == 2
    file.chmod(0o751)
    link.symlink_to(file)
    run("write_file", link, content="two")
    assert (link.is_symlink(), file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (True, "two", 0o751)
    assert os.listdir(file.parent) == ["f"]
    for path in (tmp_path, file / "below"):
        with pytest.raises(ToolError):
            run("write_file", path, content="x")


def edit(path: Path, *pairs: tuple[str, str]) -> dict[str, Any]:
    return run("edit_file", path, edits=[{"old_text": old, "new_text": new} for old, new in pairs])


def test_edits_apply_to_the_text_before_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one\r\ntwo  \nthr\xffee \xe2\x80\x9cx\xe2\x80\x9d\n")
    assert edit(file, ("two", "one"), ("one", "two"))["edits_applied"] == 2
    assert file.read_bytes().startswith(b"two\r\none  \nthr\xffee ")
    edit(file, ('ee "x"', 'ee "y"'), ("two\none\n", "1\n"))  # other quotes, line ends and blanks
    assert file.read_bytes() == b'1\nthr\xffee "y"\n'


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ((("dup", "x"),), "2 times"),
        ((("none", "x"),), "not in"),
        ((("", "x"),), "empty"),
        ((("one", "one"),), "change nothing"),
        ((("one\ntwo", "x"), ("two", "y")), "overlap"),
    ],
)
def test_edits_that_are_refused_change_nothing(tmp_path: Path, pairs: tuple[tuple[str, str], ...], why: str) -> None:
    file = tmp_path / "f"
    file.write_text("one\ntwo\ndup dup\n")
    with pytest.raises(ToolError, match=why):
        edit(file, *pairs)
    assert file.read_text() == "one\ntwo\ndup dup\n"


def test_a_process_bounds_what_a_pattern_may_take(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a" * 40 + "\n")
    said = run_file_tool("grep_search", {"path": str(tmp_path), "pattern": "(a+)+$b"}, seconds=0.5)
    assert "took longer than 0.5 s" in said["error"]
    huge = {"path": str(tmp_path), "pattern": "((((a{1,60000}){1,60000}){1,60000}){1,60000})b"}
    assert "error" in run_file_tool("grep_search", huge, seconds=0.5)
    assert run_file_tool("read_file", {"path": "f", "cwd": str(tmp_path)}) == {"plain_text_response": "a" * 40 + "\n"}
    assert run_file_tool("read_file", {"path": "\0"}) == {"error": "a path cannot hold a zero byte"}
    for wrong in ({}, {"path": 5}, {"path": "x", "start_line": True}):
        with pytest.raises(RequestError, match="parameter"):
            run_file_tool("read_file", wrong)


def shell(command: str, **params: Any) -> str:
    return str(exec_shell_command({"command": command, **params})["plain_text_response"])


def test_commands_are_bounded_in_time_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    assert shell("echo one; echo two >&2; exit 3") == "one\ntwo\n\n[exit code: 3]"
    assert shell("pwd; echo $LLAMA_API_KEY", cwd=str(tmp_path)) == f"{tmp_path}\n\n\n[exit code: 0]"
    assert (
        shell("yes", timeout=1, max_output_size=4)
        == "y\ny\n\n[output truncated]\n[exit code: -9] [exit due to timed out]"
    )
    left = tmp_path / "left"
    assert shell(f"(sleep 600; touch {left}) & echo away") == "away\n\n[exit code: 0]"
    chunks: list[str] = []
    exec_shell_command({"command": "printf 'h\\303'; printf '\\251llo'"}, lambda text: chunks.append(text) is None)
    assert "".join(chunks) == "héllo\n[exit code: 0]"
    assert exec_shell_command({"command": "sleep 600", "timeout": 60}, lambda text: False)
    assert "cannot run a command" in exec_shell_command({"command": "x", "cwd": "/none"})["error"]
    for wrong in ({}, {"command": "x", "timeout": "1"}):
        with pytest.raises(RequestError, match="parameter"):
            exec_shell_command(wrong)


def test_only_named_tools_are_there() -> None:
    assert tool_names("get_info, read_file") == ("read_file", "get_info")
    assert tool_names("all") == BUILT_IN
    with pytest.raises(ValueError, match="unknown tool 'x'; available tools: all, read_file"):
        tool_names("x")
    off, some, agent = (ToolBox(ToolSettings(*given)) for given in ((), (("get_info",),), ((), True)))
    for box in (off, some, agent):
        box.start()
        box.wait()
    assert ([*off], bool(off)) == ([], False)
    assert [tool.name for tool in some] == ["get_info"]
    assert [tool.name for tool in agent] == [*BUILT_IN]
    assert some.named("get_info").run({"cwd": "/"})["cwd"] == "/"
    with pytest.raises(NotFoundError, match="unknown tool 'read_file'"):
        some.named("read_file")
    writers = {tool.name for tool in agent if tool.writes}
    assert writers == {"exec_shell_command", "write_file", "edit_file"}
