"""The server at a port that another one cannot take."""

from __future__ import annotations

from pyctl.cli.arguments import CommandSettings
from pyctl.errors import ConfigError
from pyctl.text import one_line

__all__ = ["tenant_text"]

SECONDS = 2.0


def tenant_text(settings: CommandSettings) -> str:
    """Return the end of an error: the server that answers at the address of ``settings``, and a way out."""
    import httpx  # only now: most ports are free

    from pyctl.cli.launched_server import address_of

    who, keys = "", settings.server.api_keys
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        reply = httpx.get(f"{address_of(settings)}/props", headers=headers, timeout=SECONDS, trust_env=False)
        if reply.status_code == 200 and "build_info" in (props := reply.json()):
            name = "pyctl" if "model_memory" in props else "llama-server"
            who = f"; {name} answers there, with {one_line(str(props.get('model_alias') or 'several models'))}"
    except (httpx.HTTPError, ConfigError, ValueError, TypeError):
        pass  # any other program
    return f"{who}; --port 0 takes a free port"
