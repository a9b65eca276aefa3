"""The imports of commands: each module costs every start."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pyctl.engine.openmp import BLAS_THREADS, without_blas_threads

MODULES = """
import json, sys
{code}
print(json.dumps(sorted(sys.modules)))
"""


def printed_by(code: str) -> str:
    """Return the last line that ``code`` prints in a new process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def modules_after(code: str) -> set[str]:
    """Return the modules of a new process after ``code``."""
    return {*json.loads(printed_by(MODULES.format(code=code)))}


def test_a_server_imports_no_other_api_of_llama_cpp_and_no_grammars() -> None:
    found = modules_after("import pyctl.cli.serve_command")
    unused = {"llama_cpp.llama", "diskcache", "importlib.metadata", "llguidance"}
    assert found & unused == set()


BEFORE_A_LOAD = 100
"""Modules of pyctl that may be imported before the load of a model begins. llama.cpp could read
weights meanwhile: each costs about half a millisecond.
"""


def test_few_modules_are_imported_before_a_load_begins() -> None:
    found = modules_after("import pyctl.cli.serve_command")
    assert len([name for name in found if name.startswith("pyctl")]) <= BEFORE_A_LOAD


def test_a_load_begins_without_numpy_cache_engine_and_disk() -> None:
    found = modules_after("import pyctl.cli.serve_command")
    assert found & {"numpy", "msgspec", "jinja2", "starlette", "asyncio", "sqlite3"} == set()
    rooms = ("pyctl.disk.", "pyctl.cache.prefix_cache", "pyctl.cache.ports", "pyctl.engine.engine.")
    assert [name for name in sorted(found) if name.startswith(rooms)] == []


BEFORE_AN_ANSWER = 165
"""Data classes of pyctl that may be made before the port answers. Each compiles up to six methods,
in half a millisecond; a msgspec.Struct takes a hundredth of that.
"""

DATA_CLASSES = """
import dataclasses, unittest.mock
make = unittest.mock.Mock(wraps=dataclasses._process_class)
dataclasses._process_class = make
import pyctl.cli.serve_command, pyctl.cli.choose_directory, pyctl.cli.serving
made = [call.args[0].__module__ for call in make.call_args_list]
print(len([name for name in made if name.startswith("pyctl")]))
"""


def test_few_data_classes_are_made_before_the_port_answers() -> None:
    assert int(printed_by(DATA_CLASSES)) <= BEFORE_AN_ANSWER


def test_a_list_of_models_imports_no_server() -> None:
    found = modules_after("import pyctl.cli.models_command, pyctl.cli.presets")
    assert found & {"numpy", "asyncio", "jinja2", "starlette", "pyctl.engine.engine"} == set()


def test_a_chat_with_a_running_server_imports_no_engine() -> None:
    found = modules_after("import pyctl.cli.chat_command, pyctl.terminal.remote")
    assert found & {"numpy", "jinja2", "starlette", "pyctl.engine.backend"} == set()


def test_a_server_without_otel_imports_no_part_of_opentelemetry() -> None:
    found = modules_after("import pyctl.cli.serving, pyctl.server.api.embeddings")
    assert {name for name in found if name.startswith("opentelemetry")} == set()


def test_the_own_code_of_the_bindings_runs_when_it_is_used() -> None:
    found = modules_after("import pyctl.llama.library.bindings, llama_cpp; llama_cpp.Llama")
    assert "llama_cpp.llama" in found


@pytest.mark.parametrize("argument", ["--help", "no-command"])
def test_help_and_mistakes_import_nothing_heavy(argument: str) -> None:
    found = modules_after(f"import pyctl.cli; pyctl.cli.main([{argument!r}])")
    heavy = {"numpy", "asyncio", "jinja2", "rich", "pyctl.llama.library.bindings"}
    assert found & heavy == set()


def test_flags_are_read_without_openssl() -> None:
    found = modules_after("import pyctl.cli.arguments")
    assert found & {"_hashlib", "secrets", "random"} == set()


def test_threads_of_numpy_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BLAS_THREADS, raising=False)
    with without_blas_threads():
        assert os.environ[BLAS_THREADS] == "1"
    assert BLAS_THREADS not in os.environ


def test_threads_of_numpy_that_the_user_sets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BLAS_THREADS, "3")
    with without_blas_threads():
        assert os.environ[BLAS_THREADS] == "3"
    assert os.environ[BLAS_THREADS] == "3"
