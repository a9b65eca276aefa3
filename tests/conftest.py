"""Fixtures that many tests share: the tiny models, made once a run, and contexts on them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import httpx
import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.vision_settings import VisionSettings
from tests import ownership
from tests.effort import examples
from tests.unit.engine.drive import empty
from tools.generator import SHAPES, VISION_SHAPES, cached_model
from tools.generator.families import FAMILIES, cached_family

TESTS = Path(__file__).resolve().parent

# No command that a test runs within this process keeps anything in the user's cache directory.
os.environ["PYCTL_KV_CACHE"] = "off"

# A runner that was started in the background may have left signals ignored, for us and for every
# child.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ownership.install()

# How long an example takes says how busy the machine is. The examples are the same ones each time,
# unless PYCTL_FUZZ asks for others.
hypothesis.settings.register_profile(
    "calm",
    hypothesis.settings.default,
    deadline=None,
    derandomize="PYCTL_FUZZ" not in os.environ,
    database=None,
    max_examples=examples(hypothesis.settings.default.max_examples),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("calm")

# So do five seconds without an answer, httpx's default: all of its functions have this very object.
for _name in ("read", "write", "connect", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _name, 60.0)
assert httpx.Client().timeout.read == 60.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """A foreign thread that touched the engine's parts fails the test, even where its exception was
    caught.
    """
    yield
    ownership.check()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test has the marker of its folder. Whole servers come first, so that none of them is the
    last one that runs.
    """
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
    items.sort(key=lambda item: item.get_closest_marker("process") is None)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """model_path("tiny-hybrid") -> the GGUF file of that shape, or of a family."""
    directory = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        return (
            cached_family(FAMILIES[name], directory)
            if name in FAMILIES
            else cached_model(SHAPES[name], directory)
        )

    return get


@pytest.fixture(scope="session")
def tiny_mmproj(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an encoder of images for tiny-hybrid and tiny-moe."""
    return cached_model(VISION_SHAPES["tiny-vision"], tmp_path_factory.mktemp("encoders"))


@pytest.fixture(scope="module")
def open_model(model_path: Callable[[str], Path]) -> Iterator[Callable[..., Loaded]]:
    """open_model("tiny-hybrid", n_ubatch=64, drafts=...) -> a loaded model, of which every sequence
    is empty.

    It is closed when the module's tests are done.
    """
    opened: dict[str, Loaded] = {}

    def get(
        name: str,
        *,
        drafts: DraftSettings | None = None,
        vision: VisionSettings | None = None,
        pool: PoolSettings | None = None,
        **settings: object,
    ) -> Loaded:
        key = repr((name, drafts, vision, pool, sorted(settings.items())))
        if key not in opened:
            chosen = {"n_ctx": 4096, "n_ubatch": 64, "n_threads": 1, **settings}
            model = ModelSettings(path=str(model_path(name)), **chosen)
            opened[key] = load(model, drafts=drafts, vision=vision, pool=pool)
        backend = opened[key].backend
        empty(backend)
        backend.memory.cells.release_all()
        return opened[key]

    yield get
    for loaded in opened.values():
        loaded.backend.unload()
