"""Whether built libraries work: versions, devices, pinned memory, and a reply of the built-in model; and which modules
of the extension give restored sequences the same bits on another release of llama.cpp.

Each check runs in a new process, since a process loads llama.cpp once.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.module_command import module_command
from pyctl.setup.libraries import EXTENSION, MODULES

__all__ = ["check_libraries", "fitting_modules", "try_module", "write_models"]

MODELS = Path(__file__).resolve().parents[1] / "models" / "trial"
"""Compressed models, one for each class of memory, and one of them with a head for drafts."""

PROMPT = "My name is Anna. What is my name?"

SECONDS = 600.0
"""A driver may compile or load for long at the first use of a card."""

PINNED_BYTES, AHEAD_BYTES = 2**28, 2**26


def check_libraries(directory: Path, *, uses_gpu: bool) -> str:
    """Load the libraries in ``directory``; one line about what they found. Raises ConfigError if they do not work."""
    facts = json.loads(_run(directory, "pyctl.cli.setup_check"))
    line = f"checked: {facts['version']}"
    reply = _reply(directory, "0")
    if not uses_gpu:
        return f"{line}, CPU"
    if not facts["gpus"]:
        raise ConfigError("the new libraries find no GPU")
    if not facts["is_pinned"]:
        raise ConfigError("the new libraries cannot pin memory: cudaHostRegister is not visible in them")
    on_gpu = _reply(directory, "all")
    if on_gpu != reply:
        raise ConfigError(f"the built-in model replies {on_gpu!r} on the GPU, but {reply!r} on the CPU")
    return f"{line}, {', '.join(facts['gpus'])}; pinned memory; the same reply as on the CPU"


def fitting_modules(
    directory: Path,
    compiled: Path,
    missing: Mapping[str, str],
    attempt: Callable[[str, Path, Path], None] | None = None,
) -> dict[str, str]:
    """Copy those modules from ``compiled`` beside the libraries in ``directory`` that pass; the reasons of the others.

    ``missing`` are the reasons of those that did not compile. Raises ConfigError if the libraries fail without any.
    """
    attempt = attempt or try_module
    place, reasons = directory / EXTENSION, dict(missing)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    with tempfile.TemporaryDirectory() as name:
        write_models(Path(name))
        attempt("", directory, Path(name))
        for module in [each for each in MODULES if each not in missing]:
            if module != MODULES[0] and MODULES[0] in reasons:
                reasons[module] = f"it needs {MODULES[0]}"
                continue
            (file,) = compiled.glob(f"{module}.*so")
            shutil.copy2(file, place / file.name)
            try:
                attempt(module, directory, Path(name))
            except ConfigError as error:
                (place / file.name).unlink()
                reasons[module] = str(error).splitlines()[-1]
    return reasons


def write_models(directory: Path) -> None:
    """Write the models for trials into ``directory``."""
    for path in MODELS.glob("*.xz"):
        (directory / path.stem).write_bytes(lzma.decompress(path.read_bytes()))


def try_module(module: str, directory: Path, models: Path) -> None:
    """Use what ``module`` is for, the restoring of sequences if it is empty. Raises ConfigError if bits differ."""
    if module in ("", "_core"):
        for name, is_restored in json.loads(_run(directory, "pyctl.cli.setup_check", str(models))).items():
            if module and not is_restored:
                raise ConfigError(f"{name}: a restored sequence has other bits")
        return
    flags = {"_drafts": ("--spec-type", "draft-mtp"), "_pool": ("--kv-pool", "256")}[module]
    model = ("-m", str(models / "drafts.gguf"), "-c", "512")
    if _reply(directory, "0", *model, *flags) != _reply(directory, "0", *model):
        raise ConfigError(f"a reply with {' '.join(flags)} differs")


def _reply(directory: Path, layers: str, *flags: str) -> str:
    words = ("chat", "-p", PROMPT, "--temp", "0", "-n", "12", "-ngl", layers)
    reply = _run(directory, "pyctl", *words, *flags).strip()
    if not reply:
        raise ConfigError("the built-in model replies nothing")
    return reply


def _run(directory: Path, module: str, *arguments: str) -> str:
    """The output of ``module`` with ``arguments`` on the libraries in ``directory``."""
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(directory), "MTMD_CPP_LIB": str(directory)}
    shown = subprocess.run(
        [*module_command(module), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        env=environment,
        timeout=SECONDS,
        check=False,
    )
    if shown.returncode != 0:
        lines = shown.stderr.strip().splitlines()
        raise ConfigError("the new libraries do not work:\n" + "\n".join(lines[-12:] or [f"exit {shown.returncode}"]))
    return shown.stdout


def main() -> None:
    """Print what this process's libraries are and find, as JSON; with a directory of models, which are restored."""
    if sys.argv[1:]:
        print(json.dumps({path.stem: _is_restored(path) for path in sorted(Path(sys.argv[1]).glob("*.gguf"))}))
        return
    from pyctl.llama import devices
    from pyctl.llama.extension import core, library_file, losses
    from pyctl.llama.library import HostBuffer, build_version

    is_pinned_release = not library_file(EXTENSION).exists()
    if is_pinned_release and (lines := list(losses())):
        raise SystemExit("\n".join(lines))
    gpus = [device.description for device in devices() if device.is_gpu]
    # Without the extension nothing pins memory.
    is_pinned = core is None or HostBuffer.open(PINNED_BYTES, AHEAD_BYTES)
    HostBuffer.stop()
    print(json.dumps({"version": build_version(), "gpus": gpus, "is_pinned": is_pinned}))


def _is_restored(path: Path) -> bool:
    """Whether sequences of the model come back to the same bits."""
    from pyctl.cache import NOWHERE
    from pyctl.engine.model_settings import ModelSettings
    from pyctl.llama import load

    backend = load(ModelSettings(path=str(path), n_ctx=512, n_gpu_layers=0)).backend
    backend.check_restoring()
    is_restored = backend.memory.shape.places != NOWHERE
    backend.unload()
    return is_restored


if __name__ == "__main__":
    main()
