"""Properties, LoRA adapters, and llama-server's endpoints for features that pyctl lacks."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.cache.cache_stats import CacheView
from pyctl.cache.ports import DiskView
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.images import MEDIA_MARKER
from pyctl.chat.template import TemplateCapabilities
from pyctl.engine.backend import Placement
from pyctl.engine.pool_plan import PoolPlan
from pyctl.engine.request import Request as EngineRequest
from pyctl.errors import NotSupportedError, RequestError
from pyctl.prompt import Prompt
from pyctl.requests.adapters import check_scales, parse_adapter_scales
from pyctl.requests.json_text import parse_json
from pyctl.requests.reply_options import ReplyOptions
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse
from pyctl.server.models import Models
from pyctl.server.reply_json import settings_json, without_long

__all__ = [
    "adapters",
    "change_adapters",
    "change_props",
    "decide",
    "props",
    "router_props",
    "transcribe",
]


async def router_props(models: Models, request: Request) -> Response:
    """Answer GET /props without a model, if there are several: with the answer of llama-server's
    router.
    """
    return JsonResponse(
        {
            "role": "router",
            "max_instances": models.order.maximum,
            "models_autoload": models.autoload,
            "model_alias": "llama-server",
            "model_path": "none",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "ui_settings": {},
            "build_info": models.shared.build,
            "cors_proxy_enabled": False,
            **({"tools": True} if models.shared.tools else {}),
        }
    )


async def props(service: HttpService, request: Request) -> Response:
    """Answer GET /props."""
    info = service.info
    server = service.shared.settings
    body: dict[str, Any] = {
        "default_generation_settings": {
            "params": _default_params(service),
            "n_ctx": info.n_ctx,
        },
        "total_slots": info.n_seqs,
        "model_alias": service.model,
        "model_ftype": info.ftype_name,
        "model_path": info.model_path,
        "model_memory": info.memory,
        **_placement_json(info.placement),
        "modalities": {"vision": info.vision, "video": False, "audio": False},
        "media_marker": MEDIA_MARKER,
        "endpoint_slots": server.show_slots,
        "endpoint_props": server.change_props,
        "endpoint_metrics": server.show_metrics,
        "ui": server.show_page,
        "ui_settings": {},
        **_chat_json(service.chat),
        "bos_token": info.bos_token,
        "eos_token": info.eos_token,
        "build_info": service.shared.build or info.build,
        "is_sleeping": service.worker.is_sleeping,
        **({"tools": True} if service.shared.tools else {}),
        "cors_proxy_enabled": False,
    }
    if info.pool is not None:
        body["kv_pool"] = _pool_json(info.pool)
    view = await asyncio.wrap_future(service.admin.view())
    body["prefix_cache"] = _cache_json(view)
    body["full_cache"] = _disk_json(view.disk)
    return JsonResponse(body)


def _default_params(service: HttpService) -> dict[str, Any]:
    """Return the settings of a request that names none."""
    settings = service.settings
    defaults = EngineRequest(
        Prompt.from_ids([]),
        settings.sampling,
        settings.n_predict,
        cache_prompt=settings.cache_prompt,
    )
    options = ReplyOptions(reasoning_format="none")
    return without_long(settings_json(defaults, options, service.info.draft_types))


def _placement_json(placement: Placement) -> dict[str, Any]:
    """Return where the model lies, and the settings that were chosen for it."""
    return {
        "cache_type_k": placement.type_k,
        "cache_type_v": placement.type_v,
        "n_layers": placement.n_layers,
        "n_gpu_layers": placement.n_gpu_layers,
        "n_placement_rules": placement.n_rules,
        "resolved_settings": [
            {"flag": flag, "value": value, "reason": reason}
            for flag, value, reason in placement.resolved
        ],
    }


def _chat_json(chat: ChatFormat) -> dict[str, Any]:
    """Return the templates, their abilities and their format of calls."""
    of_tools = chat.template.of_tools
    return {
        "chat_template": chat.template.source,
        **({"chat_template_tool_use": of_tools.source} if of_tools else {}),
        "chat_template_caps": _capabilities_json(chat.capabilities),
        "tool_call_format": chat.tool_dialect.call_format.name,
    }


def _cache_json(view: CacheView) -> dict[str, Any]:
    return {
        "capacity": view.n_slots,
        "in_use": len(view.snapshots),
        "resident_bytes": view.n_bytes,
        "lifetime_hits": sum(view.totals.hits.values()),
    }


def _disk_json(disk: DiskView | None) -> dict[str, Any]:
    """Return the state of the cache on disk, in the form that it also has without one."""
    return {
        "enabled": disk is not None and disk.policy != "off",
        "in_use": disk.in_use if disk else 0,
        "disk_bytes": disk.n_bytes if disk else 0,
        "lifetime_hits": disk.hits if disk else 0,
        "disk_policy": disk.policy if disk else "off",
    }


def _capabilities_json(capabilities: TemplateCapabilities) -> dict[str, Any]:
    return {
        "supports_object_arguments": capabilities.object_arguments,
        "supports_parallel_tool_calls": capabilities.parallel_calls,
        "supports_preserve_reasoning": capabilities.old_reasoning,
        "supports_reasoning_effort": bool(capabilities.reasoning_effort),
        "supports_string_content": capabilities.text,
        "supports_system_role": capabilities.system_first,
        "supports_tool_calls": capabilities.tool_calls,
        "supports_tools": capabilities.tools,
        "supports_typed_content": capabilities.parts,
    }


def _pool_json(pool: PoolPlan) -> dict[str, Any]:
    return {
        "rows": pool.n_rows,
        "resident_layers": pool.n_resident,
        "streamed_layers": pool.n_streamed,
        "gpu_bytes": pool.device_bytes,
        "stage_bytes": pool.stage_bytes,
        "host_bytes": pool.host_bytes,
    }


async def change_props(service: HttpService, request: Request) -> Response:
    """Answer POST /props: change nothing, as in llama-server, and succeed. Raises NotSupportedError
    without --props.
    """
    if not service.shared.settings.change_props:
        raise NotSupportedError(
            "This server does not support changing global properties. Start it with `--props`"
        )
    return JsonResponse({"success": True})


async def adapters(service: HttpService, request: Request) -> Response:
    """Answer GET /lora-adapters."""
    return JsonResponse(
        [
            {"id": number, "path": path, "scale": scale, "task_name": "", "prompt_prefix": ""}
            for number, (path, scale) in enumerate(service.info.lora)
        ]
    )


async def change_adapters(service: HttpService, request: Request) -> Response:
    """Answer POST /lora-adapters [{"id", "scale"}]: adapters that are not listed get 0, unknown ids
    are ignored. Raises RequestError.
    """
    entries = parse_json(await request.body())
    if not isinstance(entries, list):
        raise RequestError("Request body must be an array")
    if service.info.lora:
        # Unlike in a request, an empty list means 0 for all.
        check_scales(service.info, parse_adapter_scales(entries) or [(-1, 0.0)])
    return JsonResponse({"success": True})


async def decide(service: object, request: Request) -> Response:
    """Raise NotSupportedError for POST /v1/systemone, as llama-server of b11549 answers for every
    model that was not made for typed decisions.
    """
    raise NotSupportedError("This model is not a decision model")


async def transcribe(service: object, request: Request) -> Response:
    """Raise NotSupportedError for POST /audio/transcriptions."""
    raise NotSupportedError("The current model does not support audio input.")
