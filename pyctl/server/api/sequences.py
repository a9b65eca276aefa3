"""The live sequences: their status, and saving, restoring and clearing them, in llama-server's
forms.
"""

from __future__ import annotations

import asyncio
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.cache.plan import MIN_BATCH
from pyctl.engine.engine_stats import SequenceView
from pyctl.errors import NotSupportedError, RequestError, UnavailableError
from pyctl.requests.json_text import parse_object
from pyctl.requests.reply_options import ReplyOptions
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse
from pyctl.server.middleware import may_read_prompts
from pyctl.server.reply_json import settings_json, without_long

__all__ = ["act", "sequence_json", "show"]

_FORBIDDEN = frozenset('/\\:*?"<>|\uff0e\u2215\u2216\ufffd\ufeff')
"""Characters that some system takes for a separator, a wildcard or a full stop, or strips."""


async def show(service: HttpService, request: Request) -> Response:
    """Answer GET /slots. Raises NotSupportedError without --slots; UnavailableError if all are busy
    and fail_on_no_slot=1.
    """
    if not service.shared.settings.show_slots:
        raise NotSupportedError(
            "This server does not support slots endpoint. Start it with `--slots`"
        )
    views = await asyncio.wrap_future(
        service.admin.sequences(with_tokens=service.shared.settings.slots_debug)
    )
    if request.query_params.get("fail_on_no_slot") and all(view.busy for view in views):
        raise UnavailableError("no slot available")
    may_see = may_read_prompts(request, service.shared.settings)
    return JsonResponse(
        [sequence_json(service, view if may_see else _in_blocks(view)) for view in views]
    )


async def act(service: HttpService, request: Request) -> Response:
    """Answer POST /slots/{id}?action=save|restore|erase, {"filename": ...}. Raises
    NotSupportedError or RequestError.
    """
    directory = service.shared.settings.slot_save_path
    if directory is None:
        raise NotSupportedError(
            "This server does not support slots action. Start it with `--slot-save-path`"
        )
    seq = _number(request.path_params["id"])
    admin = service.admin
    action = request.query_params.get("action", "")
    if action == "erase":
        return JsonResponse(
            {"id_slot": seq, "n_erased": await asyncio.wrap_future(admin.erase(seq))}
        )
    if action not in ("save", "restore"):
        raise RequestError("Invalid action")
    name = _filename(parse_object(await request.body()).get("filename"))
    if action == "save":
        saved = await asyncio.wrap_future(admin.save(seq, directory / name))
        counts = {
            "n_saved": saved.n_tokens,
            "n_written": saved.n_bytes,
            "timings": {"save_ms": saved.ms},
        }
    else:
        read = await asyncio.wrap_future(admin.restore(seq, directory / name))
        counts = {
            "n_restored": read.n_tokens,
            "n_read": read.n_bytes,
            "timings": {"restore_ms": read.ms},
        }
    return JsonResponse({"id_slot": seq, "filename": name, **counts})


def sequence_json(service: HttpService, view: SequenceView) -> dict[str, Any]:
    """Return one sequence in the answer to GET /slots."""
    types = service.info.draft_types
    shown: dict[str, Any] = {"id": view.id, "n_ctx": view.n_ctx, "speculative": bool(types)}
    shown["is_processing"] = view.busy
    if (pool := service.info.pool) is not None:
        shown["kv_pool"] = {
            "n_rows": view.n_tokens,
            "bytes_per_pass": pool.pass_bytes(view.n_tokens),
        }
    if view.request is None:
        return shown
    debug = service.shared.settings.slots_debug
    params = settings_json(view.request, ReplyOptions(stream=view.request.return_progress), types)
    limit = view.request.max_tokens
    shown |= {
        "id_task": view.task,
        "n_prompt_tokens": view.n_tokens,
        "n_prompt_tokens_processed": view.n_evaluated,
        "n_prompt_tokens_cache": view.n_cached,
        "params": params if debug else without_long(params),
        "next_token": [
            {
                "has_next_token": view.busy,
                "has_new_line": view.has_new_line,
                "n_remain": limit - view.n_predicted if view.busy and limit >= 0 else -1,
                "n_decoded": view.n_predicted,
            }
        ],
    }
    if debug:
        shown |= {
            "prompt": service.readable(view.prompt),
            "generated": service.readable(view.reply),
        }
    return shown


def _in_blocks(view: SequenceView) -> SequenceView:
    """Return ``view`` with its cached tokens rounded to whole blocks.

    From the exact number, a client that planted a prompt could learn how far another client's
    prompt equals it.
    """
    n_cut = view.n_cached % MIN_BATCH
    return replace(view, n_cached=view.n_cached - n_cut, n_evaluated=view.n_evaluated + n_cut)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RequestError("Invalid slot ID") from None


def _filename(name: Any) -> str:
    """Return ``name`` if it is a plain file name on every system. Raises RequestError otherwise."""
    plain = (
        isinstance(name, str)
        and 0 < len(name.encode("utf-8", "surrogatepass")) <= 255
        and not any(c in _FORBIDDEN or unicodedata.category(c) in ("Cc", "Cs") for c in name)
        and not name.startswith(" ")
        and not name.endswith((" ", "."))
        and ".." not in name
        and Path(name).name == name
    )
    if not plain:
        raise RequestError("Invalid filename")
    return str(name)
