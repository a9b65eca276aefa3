"""Conversations as files: one JSON object, replaced as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

from pyctl.errors import RequestError
from pyctl.terminal.conversation import Conversation

__all__ = ["load", "save"]

FORMAT = "pyctl-chat"
VERSION = 1


def save(path: Path, conversation: Conversation) -> None:
    """Write ``conversation`` to ``path``; a failure leaves what was there and raises RequestError."""
    document = {"format": FORMAT, "version": VERSION, "messages": conversation.for_file()}
    text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"cannot save {path}: {reason}") from error


def load(path: Path) -> Conversation:
    """Read what `save` wrote, or a bare list of messages in OpenAI's form; raises RequestError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        turns = document["messages"] if isinstance(document, dict) else document
        if not isinstance(turns, list):
            raise RequestError("no list of messages")
        if isinstance(document, dict) and document.get("version", VERSION) != VERSION:
            raise RequestError(f"version {document['version']} is not known")
        return Conversation.from_file(turns)
    except OSError as error:
        raise RequestError(f"cannot load {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"cannot load {path}: not JSON in UTF-8 ({error})") from error
    except KeyError as error:
        raise RequestError(f"cannot load {path}: no list of messages") from error
    except RequestError as error:
        raise RequestError(f"cannot load {path}: {error}") from error
