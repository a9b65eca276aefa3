"""`pyctl setup` as a command, and the warning of `pyctl serve` about a GPU that its libraries do
not use.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyctl.machine.libraries import libraries_at
from tests.process.conftest import Server, pyctl
from tests.unit.setup.machines import build_libcuda
from tests.unit.setup.test_release_files import release


def test_setup_looks_and_says_what_it_would_do(tmp_path: Path) -> None:
    places = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = pyctl("setup", "--cpu", "--dry-run", **places)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("found: ")
    assert (
        lines[1]
        == "build: for the CPU only, because --cpu was given: no graphics card will be used"
    )
    assert lines[-1] == "dry run: nothing was changed"
    assert not list(tmp_path.iterdir())


def test_the_file_of_a_release_is_taken_where_it_fits(tmp_path: Path) -> None:
    """Setup takes a release's build that fits the card in place of compiling, assembles it with the
    CUDA libraries, and leaves no temporary file; a second run changes nothing.
    """
    home = tmp_path / "data" / "pyctl"
    work = tmp_path / "cache" / "pyctl" / "setup"
    environ = {
        "XDG_DATA_HOME": str(home.parent),
        "XDG_CACHE_HOME": str(work.parents[1]),
        "PYTHONPATH": str(tmp_path),
    }
    environ["PYCTL_RELEASE"] = str(release(tmp_path / "a release"))
    for name in (
        "llama_cpp/__init__.py",
        "llama_cpp/lib/libllama.so",
        "llama_cpp/lib/libggml-cpu-haswell.so",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (cuda := work / "nvidia-13.5.0" / "nvidia" / "cu13" / "lib").mkdir(
        parents=True
    )  # else pip fetches it
    (cuda / "libcublas.so.13").write_bytes(b"cublas")
    done = pyctl("setup", "--arch", "86", "--yes", **environ)
    assert done.returncode == 0, done.stderr
    assert f"take:  {(tmp_path / 'a release').as_uri()}/pyctl-cuda-" in done.stdout
    (built,) = libraries_at(home)
    assert built.architectures == ("75", "86")
    assert built.toolkit == "13.5.0"
    assert built.features == ()
    assert built.files.keys() == {
        "libggml-cuda.so",
        "libcublas.so.13",
        "libllama.so",
        "libggml-cpu-haswell.so",
    }
    assert [path.name for path in work.parent.iterdir()] == ["setup.lock"]
    assert "already there" in pyctl("setup", "--arch", "75,86", "--yes", **environ).stdout


def test_serve_says_that_a_card_is_idle(start: Callable[..., Server], tmp_path: Path) -> None:
    # A library that is loaded already is the one that its name finds.
    before = f"import ctypes, os; os.environ['XDG_DATA_HOME'] = {str(tmp_path / 'data')!r}; "
    before += f"ctypes.CDLL({str(build_libcuda(tmp_path))!r})"
    server = start("", before=before)
    (line,) = [line for line in server.log().splitlines() if "is idle" in line]
    assert (
        "Card 0 is idle: these libraries of llama.cpp use the CPU only; to build them for it: "
        "pyctl setup"
    ) in line
