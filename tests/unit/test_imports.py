"""Imports climb one way, form no cycle, and llama.cpp is spoken to in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tools import ratchet
from tools.house import COUPLINGS, ROOT, longest_chain, module_graph, modules, tree_of

LAYERS = {
    # words of the whole house
    "errors": "",  # one tree of exceptions
    "settings": "",  # flags, conversions of texts, bounds
    "text": "settings",  # lines, whole characters, ids
    "processes": "settings",  # child processes, the memory of this one
    "files": "errors processes settings",  # atomic writes, images, PDFs
    "prompt": "files",  # token ids, boundaries, images between them
    "http_client": "errors",  # clients that use proxies, but not to this machine
    # this machine, and what stands beside a request
    "machine": "errors files",  # cards, compilers, the libraries in use
    "setup": "errors machine processes",  # builds of llama.cpp
    "doctor": "errors machine setup text",  # checks of the machine
    "measure": "processes",  # `pyctl bench`, through HTTP
    "model_files": "errors files http_client settings text",  # downloads, the built-in model
    "mcp": "errors processes settings text",  # tools of MCP servers
    "page": "processes settings",  # the web page
    # decisions, without llama.cpp
    "cache": "errors files prompt settings",  # which snapshots, and where
    "disk": "cache errors files processes prompt settings",  # snapshots in files
    "chat": "errors files prompt settings text",  # conversations as text and tokens
    "engine": "cache chat errors files prompt settings",  # requests, on one thread
    # exact replies, evaluated again
    "receipts": "cache engine errors files prompt settings",
    # llama.cpp
    # the libraries, the extension, devices, batches
    "llama.library": "cache engine errors files machine model_files processes prompt settings",
    # a model's settings, llama.cpp's parameters
    "llama.settings": "engine errors llama.library machine settings",
    "llama.sampling": "engine errors llama.library prompt settings",  # samplers, grammars
    "llama.images": "errors files llama.library llama.settings prompt settings",  # the encoder
    "llama.draft": "cache engine errors llama.library llama.settings settings",  # draft models
    "llama.memory": "cache engine errors llama.draft llama.library prompt",  # rows and states
    # settings that fit the free memory
    "llama.fit": "engine errors llama.draft llama.images llama.library llama.settings settings",
    # the loader, and the backend of the engine
    "llama": (
        "cache engine errors llama.draft llama.fit llama.images llama.library "
        "llama.memory llama.sampling llama.settings machine prompt settings"
    ),
    # requests
    # from a body to the engine
    "requests": "cache chat engine errors files processes prompt settings text",
    # HTTP
    "server": (
        "cache chat engine errors files http_client mcp page processes prompt receipts requests "
        "settings text"
    ),
    "terminal": "chat engine errors files http_client mcp requests settings text",  # `pyctl chat`
}
"""The packages from the ground up, and those that each may import, all of which are above its line.

`cli` and `__main__` may import everything.
"""

NAME = re.compile(r"\b(?:(?:llama|llm|ggml|LLAMA|LLM|GGML|get)_\w+|(?:llama|ggml)[\w-]*\.h)")
"""Names of llama.cpp and of its headers."""

NATIVE = {"_core", "_drafts", "_pool"}

CONCRETE = {"Disk", "Engine", "EngineAdmin", "LlamaBackend", "RamCache", "Worker"}
"""Classes whose objects only `cli` builds."""


def tensor_layer(name: str) -> str:
    """Return the package of `LAYERS` that a module is in; `cli` for the command itself."""
    parts = name.split(".")[1:]
    inner = ".".join(parts[:2])
    return inner if inner in LAYERS else parts[0] if parts else "cli"


def test_layers() -> None:
    for name, targets in module_graph().items():
        layer = tensor_layer(name)
        if layer in ("cli", "__main__"):
            continue
        allowed = {*LAYERS[layer].split(), *NATIVE, layer}
        for target in targets:
            if target.startswith("pyctl."):
                assert tensor_layer(target) in allowed, f"{name} imports {target}"


def test_no_arrow_runs_up() -> None:
    below = set[str]()
    for layer, targets in LAYERS.items():
        assert {*targets.split()} <= below, layer
        below.add(layer)


def test_the_map_has_each_package_and_each_arrow() -> None:
    """Every arrow of the map is used, and every package is on it."""
    used: dict[str, set[str]] = {}
    for name, targets in module_graph().items():
        layers = {tensor_layer(target) for target in targets if target.startswith("pyctl.")}
        used.setdefault(tensor_layer(name), set()).update(layers)
    assert used.keys() - {"cli", "__main__"} == LAYERS.keys()
    for layer, targets in LAYERS.items():
        assert {*targets.split()} == used[layer] - {layer, *NATIVE}, layer


def test_chains_of_imports_grow_no_longer() -> None:
    kept = ratchet.load()[COUPLINGS]["longest chain of imports"]
    assert longest_chain(module_graph()) <= kept


def test_the_extension_is_imported_in_one_place() -> None:
    """`extension` imports its modules by their names, `native` only their types."""
    names = ("pyctl._core", "pyctl._drafts", "pyctl._pool")
    assert {name for name, targets in module_graph().items() if targets & {*names}} == {
        "pyctl.llama.library.native"
    }


def test_no_cycles() -> None:
    graph = module_graph()
    done = set[str]()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for target in sorted(graph[name] & graph.keys()):
                if target != name:
                    visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_one_place_talks_to_llama_cpp() -> None:
    """Only `pyctl.llama.library.bindings` imports llama_cpp, and only modules of `pyctl.llama`
    import that one. A change of llama.cpp then has one place.
    """
    speakers = {
        name
        for name, targets in module_graph().items()
        if any(t.split(".")[0] == "llama_cpp" for t in targets)
    }
    assert speakers == {"pyctl.llama.library.bindings"}
    importers = {
        name
        for name, targets in module_graph().items()
        if "pyctl.llama.library.bindings" in targets
    }
    assert all(name.startswith("pyctl.llama.") for name in importers)
    # pyctl.llama.library loads the C++ runtime first: a library with a runtime of its own must not
    # take its place.
    bindings = re.compile(r"^\s*(?:from|import) llama_cpp\b", re.MULTILINE)
    files = [path for package in ("bench", "tools") for path in (ROOT / package).rglob("*.py")]
    assert [path for path in files if bindings.search(path.read_text("utf-8"))] == []


def test_packages_of_the_extension() -> None:
    """The packages that copy bytes include none that handles sequences: see the table of
    docs/internals/native.md.
    """
    packages = {
        "library": (),
        "host": ("device/device_runtime.h",),
        "device": ("host/", "core/block.h"),
        "core": ("host/", "device/"),
        "drafts": ("device/handles.h",),
        "pool": ("host/", "device/", "core/"),
    }
    for package, names in packages.items():
        for path in sorted((ROOT / "csrc" / package).iterdir()):
            used = re.findall(r'#include "(\w+/\w+\.h)"', path.read_text(encoding="utf-8"))
            assert [
                name for name in used if not name.startswith((f"{package}/", "library/", *names))
            ] == [], path.name


STANDARD = {
    "stdexcept": r"runtime_error|invalid_argument|out_of_range|length_error",
    "cstring": r"mem(cpy|set|cmp)",
    "string": r"string|to_string",
    "vector": r"vector",
    "memory": r"(make_)?(unique|shared)(_ptr)?",
    "mutex": r"mutex|(lock_guard|unique_lock)",
    "algorithm": r"min|max|sort|fill|clamp|(any|all|none)_of|find_if|(low|upp)er_bound",
    "functional": r"function",
    "utility": r"move|pair|exchange",
}
"""Standard headers, and names of theirs that a compiler may declare without them."""


def test_sources_include_the_standard_headers_that_they_use() -> None:
    """Each source includes the header of each name that it uses: one release of GCC declares by
    chance, in headers of others, names that the next leaves out.
    """
    csrc = ROOT / "csrc"

    def included(path: Path) -> set[str]:
        text = path.read_text(encoding="utf-8")
        own = {csrc / name for name in re.findall(r'#include "([\w/]+\.h)"', text)}
        return set(re.findall(r"#include <(\w+)>", text)).union(
            *(included(each) for each in own if each.is_file())
        )

    for path in sorted(csrc.rglob("*.*")):
        text = path.read_text(encoding="utf-8")
        found = included(path)
        used = {
            header for header, names in STANDARD.items() if re.search(rf"\bstd::({names})\b", text)
        }
        assert used - found == set(), path.name


def test_one_package_names_private_parts_of_llama_cpp() -> None:
    """Another release has to fit only that package; `get_` starts the members that others could
    call.
    """
    vendor = ROOT / "vendor" / "llama.cpp"
    csrc = ROOT / "csrc"

    def names(paths: Iterable[Path]) -> set[str]:
        return {name for path in paths for name in NAME.findall(path.read_text(encoding="utf-8"))}

    headers = [path for place in ("src", "ggml/src") for path in (vendor / place).glob("*.h")]
    if not headers:
        pytest.skip("llama.cpp is not unpacked here")
    public = [
        path for place in ("include", "ggml/include") for path in (vendor / place).glob("*.h")
    ]
    private = (names(headers) | {path.name for path in headers}) - names(public)
    sources = [path for path in sorted(csrc.rglob("*.*")) if path.parent.name != "library"]
    found = {path.name: names([path]) & private for path in sources}
    assert {name: used for name, used in found.items() if used} == {}


def test_generating_knows_no_api() -> None:
    for name, targets in module_graph().items():
        if not name.startswith("pyctl.server.api"):
            assert name == "pyctl.server.app" or not any(
                t.startswith("pyctl.server.api.") for t in targets
            ), name


def test_only_the_command_builds_concrete_objects() -> None:
    known = modules()
    graph = module_graph()
    assert calls(known["pyctl.cli.assemble"]) & CONCRETE
    for name, path in known.items():
        if name.startswith(("pyctl.server", "pyctl.requests", "pyctl.terminal", "pyctl.chat")):
            assert not calls(path) & CONCRETE, name
            assert not any(target.startswith("pyctl.llama") for target in graph[name])


def test_one_place_starts_python() -> None:
    """`-m` and `-c` beside `sys.executable` would run modules of the current directory."""
    found = {}
    for path in (
        path for place in ("pyctl", "bench", "tools") for path in (ROOT / place).rglob("*.py")
    ):
        tree = tree_of(path)
        told = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise)
            for part in ast.walk(node)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.List | ast.Tuple | ast.Call | ast.JoinedStr)
                and id(node) not in told
            ):
                texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                runs = any("-m" in str(text).split() for text in texts) or (
                    path.is_relative_to(ROOT / "pyctl") and "-c" in texts
                )
                if runs and any(
                    isinstance(e, ast.Attribute) and e.attr == "executable" for e in ast.walk(node)
                ):
                    found[path.relative_to(ROOT)] = node.lineno
    assert found == {}


def calls(path: Path) -> set[str]:
    """Return names that ``path`` calls."""
    return {
        node.func.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
