"""Fetches models by name from huggingface.co, or from an address, and finds models fetched
before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download

# HTTPError is the class of its HTTP library.
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from pyctl.errors import ConfigError
from pyctl.model_files import HubSettings, split_names
from pyctl.model_files.download import MAGIC, DownloadLog, fetch_url
from pyctl.model_files.hub_cache import choose, find_companion, main_revision
from pyctl.text import error_text

__all__ = ["fetch", "fetch_companion"]


def fetch(settings: HubSettings) -> Path:
    """Return the GGUF file that ``settings`` name, the first one of a split model; everything
    missing is downloaded.

    Without a network, or with ``offline``, earlier downloads are used. Raises ConfigError.
    """
    if settings.model_url:
        return fetch_url(settings.model_url, settings.offline)
    repo, _, quant = settings.hf_repo.partition(":")
    unreachable = "--offline forbids it"
    if not settings.offline:
        try:
            return _download(repo, quant, settings)
        except (OSError, HTTPError, LocalEntryNotFoundError) as error:
            # Only failed connections end here: a refusal of the hub is a ConfigError
            # already.
            unreachable = f"{constants.ENDPOINT} cannot be reached ({error_text(error)})"
    revision = main_revision(repo)
    if revision is None:
        raise ConfigError(f"{repo} is not downloaded yet, and {unreachable}")
    first = choose(
        revision.names,
        quant,
        settings.hf_file,
        f"the downloaded part of {repo}",
    )
    for name in split_names(first):
        if name not in revision.names:
            raise ConfigError(f"{name} of {repo} is not downloaded yet, and {unreachable}")
    return revision.path / first


def fetch_companion(settings: HubSettings, model: Path) -> Path | None:
    """Return the vision encoder next to ``model``, which `fetch` has found for the same
    ``settings``; None if there is none.

    Of several, the one in the nearest folder and then with the most similar quant, as in
    llama-server. Raises ConfigError.
    """
    repo = settings.hf_repo.partition(":")[0]
    if not settings.offline:
        with suppress(OSError, HTTPError, LocalEntryNotFoundError), _refusals(repo):
            listed = _listed(repo, settings)
            name = find_companion(listed, _name_in(repo, model, listed))
            return _fetched(repo, name, settings) if name else None
    revision = main_revision(repo)
    if revision is None:
        return None
    name = find_companion(revision.names, _name_in(repo, model, revision.names))
    return revision.path / name if name else None


def _name_in(repo: str, model: Path, names: Sequence[str]) -> str:
    """Return the name of the file ``model`` in its repository."""
    ends = [name for name in names if f"/{model}".endswith(f"/{name}")]
    return max(ends, key=len, default=model.name)


def _download(repo: str, quant: str, settings: HubSettings) -> Path:
    with _refusals(repo):
        name = choose(_listed(repo, settings), quant, settings.hf_file, repo)
        paths = [_fetched(repo, part, settings) for part in split_names(name)]
    return paths[0]


def _listed(repo: str, settings: HubSettings) -> list[str]:
    """Return the names of the files of a repository."""
    info = HfApi(token=settings.hf_token or None).model_info(repo)
    return [file.rfilename for file in info.siblings or []]


def _fetched(repo: str, name: str, settings: HubSettings) -> Path:
    """Return the file ``name``. A file that is not a model, such as a pointer to one, is removed:
    it would be taken for one for ever.
    """
    token = settings.hf_token or None
    path = Path(
        hf_hub_download(
            repo,
            name,
            token=token,
            **_progress(name),
        )
    )
    with path.open("rb") as file:
        head = file.read(len(MAGIC))
    if head != MAGIC:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)  # a link to it in the hub's cache
        raise ConfigError(f"{path.name} of {repo} is not a GGUF file: it starts with {head!r}")
    return path


class _LoggedBar(tqdm):
    """The hub's progress bar as lines of the log; subclasses name the ``file``."""

    file = "a file"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["disable"] = True
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._lines = DownloadLog(self.file)
        self._n_bytes = int(kwargs.get("initial") or 0)
        self._size = int(kwargs.get("total") or 0) or None
        self._lines.reached(self._n_bytes, self._size)

    def update(self, n: float | None = 1) -> bool | None:
        """Count ``n`` more bytes."""
        self._n_bytes += int(n or 0)
        self._lines.reached(self._n_bytes, self._size)
        return None


def _progress(name: str) -> dict[str, Any]:
    """Return arguments of `hf_hub_download` that log the progress of the file ``name``; none on a
    terminal, which gets a bar.

    Older releases of the hub's library do not have them.
    """
    parameters = inspect.signature(hf_hub_download).parameters
    if sys.stderr.isatty() or "tqdm_class" not in parameters:
        return {}
    named_bar = type("NamedBar", (_LoggedBar,), {"file": name})
    return {"tqdm_class": named_bar}


@contextmanager
def _refusals(repo: str) -> Iterator[None]:
    """Turn refusals of the hub into ConfigError."""
    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(
            f"{repo} requires that you accept its terms; then pass --hf-token"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no model {repo} at {constants.ENDPOINT}, or it needs --hf-token"
        ) from error
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError as error:
        raise ConfigError(f"{repo}: {error_text(error)}") from error
    except HFValidationError as error:
        raise ConfigError(f"{repo} is not the name of a model: {error_text(error)}") from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code >= 500:
            raise
        raise ConfigError(f"{constants.ENDPOINT} refuses {repo}: {error_text(error)}") from error
