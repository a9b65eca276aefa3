"""The environment of child processes that run other people's programs or read their data: without
secrets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["child_environment"]

_KEPT = frozenset(
    (
        *("HOME", "LOGNAME", "USER", "SHELL", "PATH", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *(
            "LD_LIBRARY_PATH",
            "SSL_CERT_DIR",
            "SSL_CERT_FILE",
            "REQUESTS_CA_BUNDLE",
            "NODE_EXTRA_CA_CERTS",
        ),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    )
)
"""Names, in capital letters."""

_BEGINNINGS = ("LC_", "XDG_")


def child_environment(
    more: Mapping[str, str] | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables of ``environ`` that programs need to find their files and the network,
    and ``more``.

    All others stay out, since no rule identifies keys and tokens by their names; so does a proxy
    with a password.
    """
    variables = {
        name: value
        for name, value in environ.items()
        if (name.upper() in _KEPT or name.startswith(_BEGINNINGS))
        and not ("PROXY" in name.upper() and "@" in value)
    }
    return {**variables, **(more or {})}
