"""`raystream download`: fills the cache of models, so that servers need no network.

Only commits are downloaded, since a branch's name may mean other files tomorrow, and only the files
that raystream reads: never pickled weights. A marker beside a model's files says that all of them
are there; `--wait` waits for the markers and downloads nothing.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from deployments.contract.model_spec import ModelConfig
from serve_app.commands.check.model_source import local_folder
from serve_app.commands.check.source_files import SourceError

PATTERNS: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""The files of a repository that raystream reads."""

TELL_EVERY_S: Final = 60
POLL_S: Final = 1

_COMMIT = re.compile(r"[0-9a-f]{40}")
Fetch = Callable[[str, str, Path], Path]
"""Downloads a repository's commit into a cache; returns the folder of its files."""
Tell = Callable[[str], None]


class DownloadError(Exception):
    """A model can't be downloaded; the message says what to change."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A commit of a repository on the hub."""

    source: str
    revision: str

    def marker(self, cache: Path) -> Path:
        """Return the file that says that all files are in the cache."""
        return cache / "raystream-complete" / self.source.replace("/", "--") / self.revision


def hub_models(models: Sequence[ModelConfig], places: Sequence[str]) -> list[HubModel]:
    """Return the models that come from the hub; folders need no download.

    Args:
        models: The entries of a file.
        places: The file's name and the line of each.

    Raises:
        DownloadError: A model names no commit, or a folder that can't be read.
    """
    found = []
    for model, place in zip(models, places, strict=True):
        try:
            if local_folder(model.source) is not None:
                continue
        except SourceError as error:
            raise DownloadError(f"{place}: {model.id}: {error}") from error
        if model.revision is None or not _COMMIT.fullmatch(model.revision):
            has = "has no revision" if model.revision is None else f"names {model.revision!r}"
            raise DownloadError(
                f"{place}: {model.id} {has}; write `revision:` with the commit of {model.source}, "
                "40 hexadecimal digits, so that every server gets the same files. The newest is "
                f"printed by: git ls-remote {constants.ENDPOINT}/{model.source} HEAD"
            )
        found.append(HubModel(model.source, model.revision))
    return found


def cache_folder() -> Path:
    """Return the cache that transformers reads: HF_HUB_CACHE."""
    return Path(constants.HF_HUB_CACHE)


def fetch_from_hub(source: str, revision: str, cache: Path) -> Path:
    """Download a commit.

    Raises:
        DownloadError: The hub refuses it, or can't be reached.
    """
    try:
        folder = snapshot_download(
            source, revision=revision, cache_dir=cache, allow_patterns=list(PATTERNS)
        )
    except GatedRepoError as error:
        raise DownloadError(
            f"{source} asks for an account that has accepted its licence: put that account's token "
            "into the file that HF_TOKEN_PATH names"
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(f"{source} is not on the hub, or is not yours to see") from error
    except (HfHubHTTPError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DownloadError(f"{source}@{revision} can't be downloaded: {reason}") from error
    return Path(folder)


def download(models: Sequence[HubModel], cache: Path, fetch: Fetch, tell: Tell) -> None:
    """Download what the cache lacks, and mark each model when all its files are there.

    Raises:
        DownloadError: A model can't be downloaded, or has no weights that raystream reads.
    """
    for model in models:
        if model.marker(cache).exists():
            tell(f"{model.source}@{model.revision} is there")
            continue
        tell(f"downloading {model.source}@{model.revision}")
        folder = fetch(model.source, model.revision, cache)
        if not any(folder.glob("*.safetensors")):
            raise DownloadError(
                f"{model.source}@{model.revision} has no safetensors, only weights that could run "
                "code: take a commit that has them, or convert them"
            )
        marker = model.marker(cache)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        tell(f"{model.source}@{model.revision} is complete")


def wait(
    models: Sequence[HubModel],
    cache: Path,
    tell: Tell,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when all models are in the cache; say once a minute which are not."""
    told_s: float | None = None
    while missing := [model for model in models if not model.marker(cache).exists()]:
        if told_s is None or clock() - told_s >= TELL_EVERY_S:
            names = ", ".join(f"{model.source}@{model.revision}" for model in missing)
            tell(f"waiting for {names} in {cache}; the job raystream-download brings them")
            told_s = clock()
        sleep(POLL_S)
