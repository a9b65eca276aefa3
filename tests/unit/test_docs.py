"""README and docs: their length, their links, and the flags and commands that they name."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyctl.cli.arguments import FLAGS, parse_chat, parse_launch, parse_serve
from pyctl.cli.flag_aliases import IGNORED, NO_OP, REJECTED
from pyctl.terminal.interactive import ALIASES, COMMANDS
from tools import cards, pages
from tools.house import modules, tree_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
SUFFIXES = (".py", ".pyi", ".cpp", ".h", ".cu", ".md", ".yaml", ".sh", ".js")
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]
WIDTH = 100
README_LINES = 120

WIDE_TABLES = {
    "prompt-caching.md",
    "README.md",
    "benchmarks.md",
    "cards.md",
    "draft-speeds.md",
    "limits.md",
    "migration.md",
}
"""Tables whose cells hold whole sentences, tests or links."""

REFERENCE = {"limits.md"}
"""Pages about how the program works, which has nothing to copy."""

OTHERS = {
    *("--fix", "--json", "--help", "--version"),  # of pyctl cache, of all commands
    "--all",  # of pyctl verify
    *(
        "--dry-run",
        "--yes",
        "--jobs",
        "--arch",
        "--cpu",
        "--dir",
        "--llama-cpp",
        "--pinned",
    ),  # of pyctl setup
    *(
        "--release",
        "--find-links",
        "--with",
        "--pip-args",
        "--remove",
    ),  # of pyctl setup, pip, pipx, install.sh
    *(
        "--user",
        "--now",
        "--settings",
        "--model-metadata-file",
        "--message",
    ),  # of systemctl, claude, aider
    *(
        "--build-arg",
        "--detach",
        "--read-only",
        "--shm-size",
        "--stop-timeout",
        "--tmpfs",
    ),  # of docker
    *("--gpus", "--no-deps", "--no-binary"),  # of pyctl setup, docker and podman, pip
    *(
        "--no-cache-dir",
        "--url",
        "--only",
        "--gib",
        "--models",
        "--restore-chat-history",
    ),  # of pip, bench, aider
    *(
        "--continue",
        "--resume",
        "--schema",
        "--functions",
        "--auth-type",
        "--model",
        "--config",
    ),  # of clients
    *("--against", "--parts", "--servers", "--real"),  # of bench
    *(
        "--check",
        "--quick",
        "--depths",
        "--llama-server",
        "--budget",
        "--cache",
        "--share",
    ),  # of pyctl bench and doctor
    *(
        "--write",
        "--upgrade",
        "--weights",
        "--modelfile",
        "--parts",
        "--sysroot",
        "--variant",
        "--include",
    ),  # of tools, ollama, mmdebstrap
}
"""Flags of other programs, and of other commands than serve and chat."""


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands_of(page: Path) -> list[list[str]]:
    """Return the commands of pyctl that take the flags of a server, in blocks of shell code."""
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
    command = r"^sudo apt (?:update && sudo apt )?install (.*?) +#"
    (line,) = re.findall(command, text_of(README), re.MULTILINE)
    assert f"`sudo apt install {line}`" in text_of(ROOT / "docs" / "install.md")
    sources = (ROOT / "CMakeLists.txt", ROOT / "pyctl" / "setup" / "plan.py")
    missing = [
        re.findall(r'sudo apt install (\S+) (?:"\s*")?\(Fedora', text_of(source))
        for source in sources
    ]
    assert {*missing[0], *missing[1], "git", "make", "python3-venv"} == {*line.split()}


def test_the_docs_are_short() -> None:
    assert sum(pages.count_words(text_of(page)) for page in DOCS) <= pages.MAX_WORDS


def test_pages_for_developers_are_apart() -> None:
    folders = {page.parent.relative_to(ROOT / "docs").parts[:1] for page in DOCS}
    assert folders == {(), ("internals",)}


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_lines_are_short(page: Path) -> None:
    long = [line for line in text_of(page).splitlines() if len(line) > WIDTH]
    assert [line for line in long if page.name not in WIDE_TABLES or line[0] not in "|*"] == []


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
            assert anchor in [
                re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
            ], link


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_named_flags_exist(page: Path) -> None:
    flags = {name for found in FLAGS.values() for flag in found for name in flag.spellings()}
    known = flags | {*NO_OP, *IGNORED, *REJECTED, *OTHERS}
    named = set(
        re.findall(
            r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", "".join(re.findall(r"`[^`]+`", text_of(page)))
        )
    )
    assert sorted(named - known) == []


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_commands_are_understood(page: Path) -> None:
    for command, *flags in commands_of(page):
        assert READERS[command](flags).warnings == ()
    if page in (README, ROOT / "docs" / "24gb.md", ROOT / "docs" / "tutorial.md"):
        assert commands_of(page)


def test_cards_are_those_of_bench_cards() -> None:
    assert cards.written(text_of(cards.PAGE)) == text_of(cards.PAGE), "run python -m tools.cards"


TREES = ("pyctl", "csrc", "bench", "tools", "docs", "deploy", ".github", ".ci")
REFERENCE_TO_A_FILE = re.compile(
    r"(?:\b(?P<shown>[0-9a-f]{8}):)?"
    r"(?<![\w./-])(?P<path>(?:bench|docs)/[\w./-]+\.(?:md|json|svg|py))\b"
    r"`?(?: (?:of|at) (?P<of>[0-9a-f]{8}|ggml)\b)?"
)
"""A path in a comment or a page; "of 1323d1c8", or before it "1323d1c8:", names the commit that
still has it.
"""


def references() -> Iterator[tuple[str, str, str]]:
    """Yield each file that a text of the repository names: where, its path, and its commit, "" for
    today's.
    """
    files = (path for tree in TREES for path in sorted((ROOT / tree).rglob("*")) if path.is_file())
    for path in [*PAGES, *(path for path in files if path.suffix in SUFFIXES)]:
        for found in REFERENCE_TO_A_FILE.finditer(
            " ".join(text_of(path).replace("#", " ").split())
        ):
            yield str(path.relative_to(ROOT)), found["path"], found["shown"] or found["of"] or ""


def is_in_commit(path: str, commit: str) -> bool:
    """Return whether ``commit`` has the file; True if this copy of the repository lacks the
    commit.
    """
    if git("cat-file", "-e", commit).returncode:
        return True
    return git("cat-file", "-e", f"{commit}:{path}").returncode == 0


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, check=False)


def test_files_that_texts_name_exist_today_or_in_the_commit_they_name() -> None:
    missing = []
    for place, path, commit in references():
        if commit == "ggml" or place == "CHANGELOG.md":
            continue
        exists = is_in_commit(path, commit) if commit else (ROOT / path).exists()
        if not exists:
            missing.append((place, path, commit))
    assert missing == []


def printed() -> str:
    """Return the texts of the package's code, one a line, an empty place for each value in them."""
    found = []
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_that_troubleshooting_lists_are_printed_by_the_program() -> None:
    tables = re.findall(
        r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", text_of(TROUBLESHOOTING), re.MULTILINE
    )
    assert tables
    texts = printed()
    missing = []
    for row in "".join(tables).splitlines():
        for message in re.findall(r"`([^`]+)`", row.split("|")[1]):
            parts = [part.strip() for part in message.split("...")]
            # The end of "cannot listen on ...: Address already in use" is the system's.
            missing += [message for part in parts if not part.startswith(":") and part not in texts]
    assert missing == []


def endpoints() -> Iterator[list[str]]:
    """Yield the paths of each operation of the server, without parameters; none for a pattern of
    paths.
    """
    for node in ast.walk(tree_of(ROOT / "pyctl" / "server" / "app.py")):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("Operation"):
            texts = [str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)]
            yield [
                text.partition("/{")[0]
                for text in texts
                if text.startswith("/") and ":path" not in text
            ]


def test_serve_lists_each_endpoint() -> None:
    listed = set(
        re.findall(
            r"`([/.][^`]*)`", text_of(ROOT / "docs" / "serve.md").partition("## Endpoints")[2]
        )
    )

    def is_listed(path: str) -> bool:
        directory = path.split("/")[1]
        last = path.rpartition("/")[2]
        return not listed.isdisjoint(
            {path, f".../{last}", f"/{directory}"}
        )  # /cache has a page of its own

    assert [paths for paths in endpoints() if paths and not any(map(is_listed, paths))] == []
    assert len(list(endpoints())) > 30


def test_the_readme_names_the_tests_of_ci() -> None:
    command = "make test"
    assert f"`{command}`" in text_of(README)
    script = text_of(ROOT / ".ci" / "run")
    assert f"`{command}`, the README's test command" in script
    assert re.search(rf"^{command}\b", script, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_sentences_have_single_blanks_and_none_before_a_comma(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "`", text_of(page), flags=re.DOTALL)
    assert re.findall(r"\S+[.;,:]  +\S+|\S+ [;,](?= |$)", prose, re.MULTILINE) == []


def threads() -> Iterator[tuple[str, str]]:
    """Yield each place of the package that makes threads, and their name there, or "" without
    one.
    """
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
    rows = re.search(
        r"## Threads\n\n((?:\|.*\n)+)", text_of(ROOT / "docs/internals/architecture.md")
    )
    assert rows is not None
    named = {
        name for row in rows[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    }
    assert {name for _, name in threads()} == named - {"serve"}


def test_the_page_of_the_chat_has_all_commands() -> None:
    named = set(
        re.findall(
            r"`(/[a-z]+)`", text_of(ROOT / "docs" / "page-and-chat.md").partition("## Chat")[2]
        )
    )
    assert named == {*COMMANDS, *ALIASES}


@pytest.mark.parametrize(
    "page", [page for page in DOCS if page.parent.name == "docs"], ids=lambda page: page.name
)
def test_a_page_that_people_use_opens_with_what_to_copy(page: Path) -> None:
    """A page starts with something to copy; at most one paragraph about its purpose precedes it."""
    _, first, second, *_ = text_of(page).split("\n\n")
    if page.name not in REFERENCE:
        assert first.startswith("```") or second.startswith("```")
