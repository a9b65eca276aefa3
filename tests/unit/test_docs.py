"""README and docs: their length, their links, and the flags and commands that they name."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyctl.cli.arguments import FLAGS, parse_chat, parse_launch, parse_serve
from pyctl.cli.flag_aliases import IGNORED, NO_OP, REJECTED
from pyctl.terminal.interactive import ALIASES, COMMANDS
from tools import cards
from tools.house import modules, tree_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]
WIDTH, README_LINES, DECISION_WORDS = 100, 120, 400

WIDE_TABLES = {"benchmarks.md", "cards.md", "limits.md"}
"""Tables whose cells hold whole sentences, tests or links."""

REFERENCE = {"limits.md"}
"""Pages about how the program works, which has nothing to copy."""

OTHERS = {
    *("--fix", "--json", "--help", "--version"),  # of pyctl cache, of all commands
    *("--dry-run", "--yes", "--jobs", "--arch", "--cpu", "--dir", "--llama-cpp", "--pinned"),  # of pyctl setup
    *("--release", "--find-links", "--with", "--pip-args", "--remove"),  # of pyctl setup, pip, pipx, install.sh
    *("--user", "--now", "--settings", "--model-metadata-file", "--message"),  # of systemctl, claude, aider
    *("--build-arg", "--detach", "--read-only", "--shm-size", "--stop-timeout", "--tmpfs"),  # of docker
    *("--gpus", "--no-deps", "--no-binary"),  # of pyctl setup, docker and podman, pip
    *("--no-cache-dir", "--url", "--only", "--gib", "--models", "--restore-chat-history"),  # of pip, bench, aider
    *("--continue", "--resume", "--schema", "--functions", "--auth-type", "--model", "--config"),  # of clients
    *("--against", "--parts", "--servers", "--real"),  # of bench
    *("--check", "--quick", "--depths", "--llama-server", "--budget", "--cache"),  # of pyctl bench and doctor
    *("--weights", "--modelfile", "--parts", "--sysroot", "--variant", "--include"),  # of tools, ollama, mmdebstrap
}
"""Flags of other programs, and of other commands than serve and chat."""


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands_of(page: Path) -> list[list[str]]:
    """The commands of pyctl that take the flags of a server, in blocks of shell code."""
    found = []
    for block in re.findall(r"```(?:sh|ini)\n(.*?)```", text_of(page), re.DOTALL):
        for line in re.split(r"\n| && | \| ", block.replace("\\\n", " ")):
            words = shlex.split(line.removeprefix("ExecStart="), comments=True)
            if len(words) > 1 and words[0].endswith("pyctl") and words[1] in READERS:
                found.append(words[1:])
    return found


READERS = {
    **dict.fromkeys(("serve", "service"), lambda flags: parse_serve(flags, {})),
    "chat": lambda flags: parse_chat(flags, {}),
    "launch": lambda words: parse_launch(words[0], words[1 : [*words, "--"].index("--")], {})[0],
}


def test_readme_install_and_setup_name_the_same_packages() -> None:
    (line,) = re.findall(r"^sudo apt install (.*?) +#", text_of(README), re.MULTILINE)
    assert f"`sudo apt install {line}`" in text_of(ROOT / "docs" / "install.md")
    sources = (ROOT / "CMakeLists.txt", ROOT / "pyctl" / "setup" / "plan.py")
    missing = [re.findall(r'sudo apt install (\S+) (?:"\s*")?\(Fedora', text_of(source)) for source in sources]
    assert {*missing[0], *missing[1], "git", "make", "python3-venv"} == {*line.split()}


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_lines_are_short(page: Path) -> None:
    long = [line for line in text_of(page).splitlines() if len(line) > WIDTH]
    assert [line for line in long if page.name not in WIDE_TABLES or not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text_of(page)):
        link = "".join(target)
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", text_of(found), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings], link


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_named_flags_exist(page: Path) -> None:
    flags = {name for found in FLAGS.values() for flag in found for name in flag.spellings()}
    known = flags | {*NO_OP, *IGNORED, *REJECTED, *OTHERS}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", "".join(re.findall(r"`[^`]+`", text_of(page)))))
    assert sorted(named - known) == []


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_commands_are_understood(page: Path) -> None:
    for command, *flags in commands_of(page):
        assert READERS[command](flags).warnings == ()
    if page in (README, ROOT / "docs" / "24gb.md"):
        assert commands_of(page)


def test_cards_are_those_of_bench_cards() -> None:
    assert cards.written(text_of(cards.PAGE)) == text_of(cards.PAGE), "run python -m tools.cards"


def threads() -> Iterator[tuple[str, str]]:
    """Each place of the package that makes threads, and their name there, or "" without one."""
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            called = node.func if isinstance(node, ast.Call) else None
            maker = getattr(called, "attr", getattr(called, "id", ""))
            if maker in ("Thread", "Timer", "ThreadPoolExecutor", "Readers", "to_thread"):
                given = [each.value for each in node.keywords if each.arg == "name"]
                given += node.args[1:2] if maker in ("ThreadPoolExecutor", "Readers") else []
                name = given[0] if given else ast.Constant("Timer" if maker == "Timer" else "")
                if isinstance(name, ast.Constant):  # else the name is that of `Readers`
                    yield f"{path.name}:{node.lineno}", str(name.value)


def test_the_table_of_threads_has_all() -> None:
    rows = re.search(r"## Threads\n\n((?:\|.*\n)+)", text_of(ROOT / "docs/internals/architecture.md"))
    assert rows is not None
    named = {name for row in rows[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert {name for _, name in threads()} == named - {"serve"}


def test_the_page_of_the_chat_has_all_commands() -> None:
    named = set(re.findall(r"`(/[a-z]+)`", text_of(ROOT / "docs" / "page-and-chat.md").partition("## Chat")[2]))
    assert named == {*COMMANDS, *ALIASES}


@pytest.mark.parametrize("page", [page for page in DOCS if page.parent.name == "docs"], ids=lambda page: page.name)
def test_a_page_that_people_use_opens_with_what_to_copy(page: Path) -> None:
    if page.name not in REFERENCE:
        assert text_of(page).splitlines()[2].startswith("```")
