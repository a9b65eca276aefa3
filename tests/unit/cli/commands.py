"""Runs `pyctl serve` and `pyctl chat` on a fake model, and records the arguments of the parts of the program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cli import assemble, chat_command, main, serve_command
from pyctl.engine import openmp
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.draft.draft_settings import MODEL_TYPES, DraftSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.pool import PoolSettings
from pyctl.engine.request import Done, Piece, Request, Timings
from pyctl.engine.vision_settings import VisionSettings
from pyctl.engine.worker import Worker
from pyctl.errors import ModelError
from pyctl.llama import Loaded
from pyctl.llama.params import ModelParams, context_params
from pyctl.server.request_pool import Afterwards
from pyctl.server.run import LoadingApp
from pyctl.server.sending import ReplyResponse
from pyctl.server.supervisor import Supervisor
from pyctl.terminal import TerminalSettings
from tests.fake import FakeBackend
from tests.pictures import GridReader
from tests.unit.chat.toy import CHATML_SPECIALS, ByteTokenizer
from tests.unit.server.fake import INFO, Client

TEMPLATE = """\
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if flavour is defined -%}{{- flavour -}}{%- endif -%}
{%- if enable_thinking is defined -%}{{- 'thinking: ' ~ enable_thinking -}}{%- endif -%}
{%- if reasoning_effort is defined -%}{{- 'effort: ' ~ reasoning_effort -}}{%- endif -%}
{%- if preserve_thinking is defined -%}{{- 'preserve: ' ~ preserve_thinking -}}{%- endif -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
HI = [{"role": "user", "content": "Hi"}]
TOKENIZER_SPECIALS = (*CHATML_SPECIALS, "<|fim_pre|>", "<|fim_suf|>", "<|fim_mid|>")


class Seen:
    """The arguments of the parts of a running command; ``built`` are those of the objects of `assemble`, by name."""

    def __init__(self) -> None:
        self.model = ModelSettings()
        self.drafts, self.pool = DraftSettings(), PoolSettings()
        self.vision = VisionSettings()
        self.images = GridReader()
        self.images.rows = SimpleNamespace(limit=0)  # what is made of images may take so much
        self.built: dict[str, dict[str, Any]] = {}
        self.log: dict[str, Any] = {}
        self.requests: list[Request] = []
        self.warmed: list[Request] = []
        self.opened: list[str] = []
        self.address: tuple[tuple[str, ...], int] = ((), 0)
        self.served: Any = None
        self.gate: LoadingApp | None = None
        self.pings: list[int] = []
        self.chat: dict[str, Any] = {}
        self.remote: tuple[Any, ...] = ()
        self.hub: Any = None
        self.workers: list[tuple[str, ...]] = []

    @cached_property
    def model_params(self) -> Any:
        """llama.cpp's parameters for the model; what they point to lives as long as this."""
        self._kept = ModelParams(self.model)
        return self._kept.struct

    @cached_property
    def draft_params(self) -> tuple[Any, Any]:
        """llama.cpp's parameters for the draft model and for its context."""
        settings = self.drafts.of_file(self.model)
        self._kept_for_drafts = ModelParams(settings)
        return self._kept_for_drafts.struct, context_params(settings, 4096)

    @property
    def context_params(self) -> Any:
        """llama.cpp's parameters for the context."""
        return context_params(self.model, 4096)

    @cached_property
    def client(self) -> Client:
        """Speaks with the server."""
        assert self.gate is not None
        return Client(self.gate)

    @cached_property
    def reply(self) -> tuple[str, str]:
        """Reasoning and content of a reply, on whichever way the command gives one."""
        if self.gate is not None:
            message = self.client.post(self.prefix + "/v1/chat/completions", json={"messages": HI}).json()["choices"]
            return message[0]["message"].get("reasoning_content") or "", message[0]["message"]["content"]
        deltas = list(self.chat["backend"].stream(HI))
        return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)

    prefix = ""

    @cached_property
    def request(self) -> Request:
        """The request to the engine for a reply to one short message."""
        assert self.reply
        return self.requests[-1]


class _Backend(FakeBackend):
    """The result of `load` for a command: its memory restores to the same bits."""

    memory_text = "rows of tokens"

    def check_restoring(self) -> None:
        """Nothing to try."""


@contextlib.contextmanager
def _nothing(seen: Seen, hosts: tuple[str, ...], port: int) -> Iterator[None]:
    seen.address = (hosts, port)
    yield


def look(monkeypatch: pytest.MonkeyPatch, argv: list[str], at: Callable[[Seen], Any]) -> Any:
    """The result of ``at`` while the command ``argv`` runs."""
    seen, found = Seen(), []

    def load(settings: ModelSettings, *given: Any, pool: PoolSettings) -> Any:
        seen.model, seen.drafts, seen.pool = settings, given[2], pool
        seen.vision = given[3] if len(given) > 3 else VisionSettings()
        if "gemma" in seen.vision.mmproj_path:
            raise ModelError("images as gemma.gguf makes them are not supported")
        pooling = "mean" if settings.embeddings else ""
        info = replace(INFO, chat_template=TEMPLATE, n_vocab=300, pooling=pooling, vision=True)
        tokenizer = ByteTokenizer(TOKENIZER_SPECIALS, eos="<|im_end|>")
        by_model = [name for name in seen.drafts.ordered_types if name in MODEL_TYPES]
        backend = _Backend(draft_type=by_model[0] if by_model else "")
        return Loaded(backend, tokenizer, info, seen.images, seen.drafts)  # type: ignore[arg-type]

    def submit(_: Worker, request: Request) -> RequestHandle:
        seen.requests.append(request)
        handle = RequestHandle(request)
        handle.put(Piece("deep\n</think>\n\nshown", tuple(b"deep\n</think>\n\nshown")))
        handle.put(Done("eos", "", Timings(1, 1, 1.0, 1, 1.0, 1.0), RequestStats(1), 0))
        return handle

    def serve(gate: LoadingApp, _: None, listen: Any, *, on_ready: Callable[[str], None], **given: Any) -> None:
        on_ready("http://127.0.0.1:1")
        seen.gate, seen.served = gate, listen
        found.append(at(seen))

    def run_chat(backend: Any, settings: TerminalSettings, tools: Any = None) -> int:
        seen.chat = {"backend": backend, "settings": settings, "tools": tools}
        found.append(at(seen))
        return 0

    def embed(*_: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(np.array([[3.0, 4.0]], np.float32))
        return future

    def ping(_: Any, send: Any, seconds: int) -> Any:
        seen.pings.append(seconds)
        return asyncio.sleep(0)

    def recorded(patch: pytest.MonkeyPatch, name: str, module: Any = assemble) -> None:
        made = getattr(module, name)

        def make(*args: Any, **given: Any) -> Any:
            seen.built[name] = {**{str(i): value for i, value in enumerate(args)}, **given}
            return made(*args, **given)

        patch.setattr(module, name, make)

    def remote(*given: Any) -> Any:
        seen.remote = given
        return SimpleNamespace(close=lambda: None)

    def fetch(settings: Any) -> str:
        seen.hub = settings
        return "fetched.gguf"

    with monkeypatch.context() as patch:
        patch.setenv(openmp.SPIN, "")  # what the command sets is gone afterwards
        patch.setattr(openmp, "_spin_is_given", False)  # as in a process without the variable at its start
        for name in (
            "RamCache",
            "DiskStore",
            "StoreBehind",
            "DiskTier",
            "Replay",
            "ModelDrafts",
            "Speculation",
            "Engine",
            "Worker",
        ):
            recorded(patch, name)
        recorded(patch, "LoadOrder", serve_command)
        recorded(patch, "WarmFiles", serve_command)
        patch.setattr(assemble, "load", load)
        patch.setattr(serve_command, "check_gguf", lambda path: None)  # nothing is loaded
        patch.setattr(serve_command, "connect_workers", seen.workers.append)
        patch.setattr("pyctl.llama.connect_workers", seen.workers.append)
        patch.setattr(serve_command, "open_in_browser", seen.opened.append)
        patch.setattr(assemble, "gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None))
        patch.setattr(Worker, "submit", submit)
        patch.setattr(Worker, "watch", lambda _: None)
        patch.setattr(Supervisor, "run", lambda _: None)
        patch.setattr(Worker, "warm", lambda _, request: seen.warmed.append(request))
        patch.setattr(Afterwards, "add", lambda _, function: function())
        patch.setattr(EngineAdmin, "embed", embed)
        patch.setattr(ReplyResponse, "_ping", ping)
        patch.setattr(serve_command, "bind", lambda hosts, port: _nothing(seen, hosts, port))
        patch.setattr(serve_command, "serve", serve)
        patch.setattr(serve_command, "leave", lambda code: code)
        patch.setattr(chat_command, "run_chat", run_chat)
        patch.setattr("pyctl.terminal.remote.RemoteBackend", remote)
        patch.setattr("pyctl.models.hub.fetch", fetch)
        eyes = "gemma.gguf" if "org/gemma" in argv else "eyes.gguf"
        patch.setattr("pyctl.models.hub.fetch_companion", lambda *_: eyes)
        patch.setattr(logging, "basicConfig", lambda **given: seen.log.update(given))
        patch.setattr(logging.getLogger("pyctl"), "warning", lambda *args: seen.log.update(warning=args[-1]))
        assert main(argv) == 0, argv
    for handler in seen.log.get("handlers", ()):
        handler.close()
    return found[0]
