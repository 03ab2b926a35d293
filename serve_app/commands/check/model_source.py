"""Finds a model's files before anything is loaded, and reads what they say.

They are in a folder, in the cache of a hub repository, or on the hub, which is asked for a few
kilobytes. Imports neither torch nor Ray.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from errno import EACCES
from os import R_OK, X_OK, access, environ, strerror
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Final, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._validators import validate_repo_id

from deployments.contract.descriptions import Task
from deployments.contract.unsupported_model import reason_of
from serve_app.commands.check.source_files import (
    OTHER_FORMATS,
    ModelFiles,
    SourceError,
    read_json,
    unreadable,
)
from serve_app.commands.check.source_problems import weight_problems
from serve_app.shipped_files import SHIPPED

T = TypeVar("T")

HUB_TIMEOUT_S: Final = 2.5
"""How long the hub has for an answer, unless HF_HUB_ETAG_TIMEOUT is set: a check takes 3 s."""

KnownFiles = Mapping[tuple[str, str | None], ModelFiles | SourceError]
"""The files of models, or why there are none, by source and revision."""


def is_path(source: str) -> bool:
    """Return whether a source can only be a path, whether or not there is such a folder."""
    return source.startswith(("/", "./", "../", "~")) or source in (".", "..")


def path_of(source: str) -> Path:
    """Return the path that a source would have, if it is one.

    Raises:
        SourceError: It begins with the home of an unknown user.
    """
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        user = source.partition("/")[0]
        raise SourceError(f"there is no folder {source!r}: {user} is no home here") from error


def is_folder(source: str) -> bool:
    """Return whether a source is a folder; False if this user can't see that."""
    try:
        return path_of(source).is_dir()
    except (OSError, SourceError):
        return False


def local_folder(source: str) -> Path | None:
    """Return the folder that a source names, here or among the shipped; None for a hub's id.

    Raises:
        SourceError: It can only be a folder, and there is none, or this user can't enter it.
    """
    here = path_of(source)
    try:
        if here.is_dir():
            if not access(here, R_OK | X_OK):
                raise PermissionError(EACCES, strerror(EACCES))
            return here.resolve()
        if here.is_file():
            raise SourceError(_file_message(source, here))
        if is_path(source):
            raise SourceError(f"there is no folder {source!r}{_near(here)}")
        shipped = SHIPPED / source
        return shipped.resolve() if (shipped / "config.json").is_file() else None
    except OSError as error:
        raise SourceError(unreadable(source, error)) from error


def _file_message(source: str, file: Path) -> str:
    for suffix, kind, advice in OTHER_FORMATS:
        if file.suffix == suffix:
            return f"{source!r} is a file of {kind}, which is not served: {advice}"
    return f"{source!r} is a file; give the model's folder, {str(file.parent)!r}"


def _near(path: Path) -> str:
    """Return a hint at a folder of a similar name, if a path does not exist."""
    for base in (Path(), SHIPPED):
        for name, rest in ((path.name, ""), (path.parent.name, path.name)):
            parent = path.parent if rest == "" else path.parent.parent
            try:
                beside = [each.name for each in (base / parent).iterdir() if each.is_dir()]
                for near in get_close_matches(name, beside, n=1, cutoff=0.75):
                    if (base / parent / near / rest).is_dir():
                        return f"; did you mean {str(parent / near / rest)!r}?"
            except OSError:
                continue
    return ""


def read_files(source: str, revision: str | None) -> ModelFiles:
    """Return what a model's files say, as far as it can be known before a start.

    Raises:
        SourceError: There are none, or they can't be read; `source_problems` says what is wrong
            with those that there are.
    """
    folder = local_folder(source)
    return _in_folder(source, folder, None) if folder is not None else _of_hub(source, revision)


def task_of(source: str, revision: str | None) -> Task:
    """Return what a model is made for; generate if its files can't be read."""
    try:
        return read_files(source, revision).task
    except SourceError:
        return "generate"


def read_all(
    sources: Iterable[tuple[str, str | None]],
) -> dict[tuple[str, str | None], ModelFiles | SourceError]:
    """Return the files of several models, or why there are none, by source and revision.

    The hub is asked about all of them at the same time.
    """

    def read(key: tuple[str, str | None]) -> ModelFiles | SourceError:
        try:
            return read_files(*key)
        except SourceError as error:
            return error

    keys = list(dict.fromkeys(sources))
    with ThreadPoolExecutor(max_workers=max(1, len(keys))) as pool:
        return dict(zip(keys, pool.map(read, keys), strict=True))


def _in_folder(source: str, folder: Path, commit: str | None) -> ModelFiles:
    patterns = ("*", "*/config.json")
    found = (file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
    try:
        names = frozenset(str(file.relative_to(folder)) for file in found)
    except OSError as error:
        raise SourceError(unreadable(source, error)) from error
    config = read_json(source, folder / "config.json") if "config.json" in names else {}
    return ModelFiles(source, names, folder, commit, config)


def _of_hub(source: str, revision: str | None) -> ModelFiles:
    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise SourceError(
            f"there is no folder {source!r}, and it can't be the id of a repository on the hub, "
            f"such as Qwen/Qwen3-0.6B{_near(Path(source))}"
        ) from error
    cached = try_to_load_from_cache(source, "config.json", revision=revision)
    if isinstance(cached, str):
        snapshot = Path(cached).parent
        files = _in_folder(source, snapshot, snapshot.name)
        if not any(weight_problems(files)):
            return files
    return _ask_hub(source, revision)


def _ask_hub(source: str, revision: str | None) -> ModelFiles:
    """Return the names of a repository's files, and its configuration.

    Raises:
        SourceError: It is not there, or can't be reached.
    """

    def ask() -> ModelFiles:
        found = HfApi().model_info(source, revision=revision, timeout=timeout_s)
        names = frozenset(each.rfilename for each in found.siblings or ())
        config: Mapping[str, Any] = {}
        if "config.json" in names:
            file = hf_hub_download(
                source, "config.json", revision=found.sha, etag_timeout=timeout_s
            )
            config = read_json(source, Path(file))
        return ModelFiles(source, names, None, found.sha, config)

    given = environ.get("HF_HUB_ETAG_TIMEOUT")
    timeout_s = float(constants.HF_HUB_ETAG_TIMEOUT) if given else HUB_TIMEOUT_S
    at = f" at {revision!r}" if revision else ""
    none = f"there is no folder {source!r}"
    uncached = f"{none}, and the repository{at} is not, or not wholly, in the cache"
    near = _near(Path(source))
    try:
        return _within(timeout_s, ask)
    except SourceError:
        raise
    except GatedRepoError as error:
        raise SourceError(
            f"{source!r} asks for an account that has accepted its licence on the hub: set "
            "HF_TOKEN to that account's token"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{source!r} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{none}, and no repository of this name is on the hub, or it is not yours to see "
            f"(HF_TOKEN is the token that is sent){near}"
        ) from error
    except OfflineModeIsEnabled as error:
        raise SourceError(
            f"{uncached} ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE forbids to download it"
            f"{near}"
        ) from error
    except TimeoutError as error:
        raise SourceError(
            f"{uncached}, and {constants.ENDPOINT} has not answered in {timeout_s:g} s; if it is "
            f"only slow, set HF_HUB_ETAG_TIMEOUT to more seconds{near}"
        ) from error
    except Exception as error:
        raise SourceError(
            f"{uncached}, and {constants.ENDPOINT} can't be reached: {reason_of(error)}{near}"
        ) from error


def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what a call returns or raises, but wait no longer: a name's look-up may hang.

    Raises:
        TimeoutError: It takes longer.
    """
    results: Queue[tuple[T | None, BaseException | None]] = Queue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = results.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError from None
    if isinstance(error, BaseException):
        raise error
    return value  # type: ignore[return-value] # what the call returned
