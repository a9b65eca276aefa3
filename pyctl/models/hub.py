"""Fetches models by name from huggingface.co, or from an address, and finds again what was fetched before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CachedRevisionInfo, HfApi, constants, hf_hub_download, scan_cache_dir
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is the one of its HTTP library
    CacheNotFound,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from pyctl.errors import ConfigError
from pyctl.models import SPLIT_NAME, HubSettings, split_names
from pyctl.models.download import MAGIC, fetch_url
from pyctl.text import reason_of

__all__ = ["cached_models", "fetch", "fetch_companion"]

PREFERRED = ("Q4_K_M", "Q8_0")
"""Quants that are taken where none is asked for, as in llama-server."""
COMPANIONS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of file names that belong to no model of their own."""


def fetch(settings: HubSettings) -> Path:
    """The GGUF file that ``settings`` name, the first one of a split model; everything missing is downloaded.

    Without a network, or with ``offline``, what was fetched before is used. Raises ConfigError.
    """
    if settings.model_url:
        return fetch_url(settings.model_url, settings.offline)
    repo, _, quant = settings.hf_repo.partition(":")
    unreachable = "--offline forbids it"
    if not settings.offline:
        try:
            return _download(repo, quant, settings)
        except (OSError, HTTPError, LocalEntryNotFoundError) as error:
            # Only what kept us from asking ends here: a refusal of the hub is a ConfigError already.
            unreachable = f"{constants.ENDPOINT} cannot be reached ({reason_of(error)})"
    revision = _cached(repo)
    if revision is None:
        raise ConfigError(f"{repo} is not downloaded yet, and {unreachable}")
    names = sorted(str(file.file_path.relative_to(revision.snapshot_path)) for file in revision.files)
    wanted = _choose(names, quant, settings.hf_file, f"what was fetched of {repo}")
    if missing := [name for name in split_names(wanted) if name not in names]:
        raise ConfigError(f"{missing[0]} of {repo} is not downloaded yet, and {unreachable}")
    return revision.snapshot_path / wanted


def fetch_companion(settings: HubSettings, model: Path) -> Path | None:
    """The vision encoder next to ``model``, which `fetch` has found for the same ``settings``; None if there is none.

    Of several, that in the nearest folder and then with the most similar quant, as in llama-server. Raises ConfigError.
    """
    repo = settings.hf_repo.partition(":")[0]
    if settings.offline:
        return _cached_companion(repo, model)
    token = settings.hf_token or None
    try:
        with _refusals(repo):
            listed = [file.rfilename for file in HfApi(token=token).model_info(repo).siblings or []]
            name = _companion(listed, _name_in(repo, model, listed))
            path = Path(hf_hub_download(repo, name, token=token)) if name else None
    except (OSError, HTTPError, LocalEntryNotFoundError):
        return _cached_companion(repo, model)
    if path is not None:
        _check_magic(path, repo)
    return path


def _cached_companion(repo: str, model: Path) -> Path | None:
    revision = _cached(repo)
    if revision is None:
        return None
    names = sorted(str(file.file_path.relative_to(revision.snapshot_path)) for file in revision.files)
    name = _companion(names, _name_in(repo, model, names))
    return revision.snapshot_path / name if name else None


def _name_in(repo: str, model: Path, names: Sequence[str]) -> str:
    """The name of the file ``model`` in its repository."""
    return max((name for name in names if f"/{model}".endswith(f"/{name}")), key=len, default=model.name)


def _companion(names: Sequence[str], model: str) -> str:
    """The name of the vision encoder for ``model`` among ``names``; empty if there is none."""
    folders = model.split("/")[:-1]

    def rank(name: str) -> tuple[int, int]:
        return len(name.split("/")), -abs(_bits(name) - _bits(model))

    found = [name for name in names if name.endswith(".gguf") and "mmproj" in name and name.isprintable()]
    return max((name for name in found if folders[: name.count("/")] == name.split("/")[:-1]), key=rank, default="")


def _bits(name: str) -> int:
    """How many bits a weight has, as the name of a file says; 0 if it does not."""
    split = SPLIT_NAME.match(name)
    quant = re.search(r"[-.]([A-Za-z0-9_]+)$", split[1] if split else name.removesuffix(".gguf"))
    digits = re.search(r"[0-9]{1,4}", quant[1]) if quant else None
    return int(digits[0]) if digits else 0


def cached_models() -> list[str]:
    """The models that `fetch` finds without a network, as ``USER/MODEL:QUANT`` where the name says the quant."""
    found = set()
    for repo, revision in _revisions():
        for file in revision.files:
            part = SPLIT_NAME.match(file.file_name)
            if _is_model(file.file_name) and (part is None or int(part[2]) == 1):
                stem = part[1] if part else file.file_name[: -len(".gguf")]
                quant = re.search(r"[-.]([A-Za-z0-9_]+)$", stem)
                found.add(f"{repo}:{quant[1].upper()}" if quant else repo)
    return sorted(found)


def _download(repo: str, quant: str, settings: HubSettings) -> Path:
    token = settings.hf_token or None
    with _refusals(repo):
        listed = HfApi(token=token).model_info(repo).siblings or []
        wanted = _choose([file.rfilename for file in listed], quant, settings.hf_file, repo)
        paths = [Path(hf_hub_download(repo, name, token=token)) for name in split_names(wanted)]
    for path in paths:
        _check_magic(path, repo)
    return paths[0]


def _check_magic(path: Path, repo: str) -> None:
    """Remove a file that is no model, such as a pointer to one, and say so: it would be taken for one for ever."""
    with path.open("rb") as file:
        head = file.read(len(MAGIC))
    if head != MAGIC:
        for each in (path.resolve(), path):
            each.unlink(missing_ok=True)
        raise ConfigError(f"{path.name} of {repo} is not a GGUF file: it starts with {head!r}")


@contextmanager
def _refusals(repo: str) -> Iterator[None]:
    """Turn refusals of the hub into ConfigError."""
    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(f"{repo} requires that you accept its terms; then pass --hf-token") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"there is no model {repo} at {constants.ENDPOINT}, or it needs --hf-token") from error
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError as error:
        raise ConfigError(f"{repo}: {reason_of(error)}") from error
    except HFValidationError as error:
        raise ConfigError(f"{repo} is not the name of a model: {reason_of(error)}") from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code >= 500:
            raise
        raise ConfigError(f"{constants.ENDPOINT} refuses {repo}: {reason_of(error)}") from error


def _choose(names: Sequence[str], quant: str, file: str, where: str) -> str:
    """The file to load, by llama-server's rules."""
    models = [name for name in names if _is_model(name) and int((SPLIT_NAME.match(name) or ("", "", "1"))[2]) == 1]
    if file:
        if file in names:
            return file
        raise ConfigError(f"no file {file} in {where}; found {_list(models)}")
    for wanted in (quant,) if quant else PREFERRED:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        if hit := next((name for name in models if pattern.search(name)), ""):
            return hit
    if quant or not models:
        raise ConfigError(f"no GGUF file{' of quant ' + quant if quant else ''} in {where}; found {_list(models)}")
    return models[0]


def _is_model(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base.endswith(".gguf") and base.isprintable() and not any(part in base for part in COMPANIONS)


def _cached(repo: str) -> CachedRevisionInfo | None:
    """The revision that ``main`` was when it was last fetched, else the newest one."""
    found = [revision for name, revision in _revisions() if name.lower() == repo.lower()]
    return max(found, key=lambda revision: ("main" in revision.refs, revision.last_modified), default=None)


def _revisions() -> Iterator[tuple[str, CachedRevisionInfo]]:
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type == "model":
            yield from ((repo.repo_id, revision) for revision in repo.revisions)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
