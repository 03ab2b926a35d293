"""Which files of a hub repository a model is loaded from, and their download before they are read.

transformers downloads them one by one while it loads, and only a terminal shows how far it is.
Here they are downloaded at once, and counted.
"""

import logging
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils.tqdm import tqdm

from deployments.contract.telemetry.start_progress import StartPhase, StartProgress
from deployments.plan.checkpoint import CONFIG_FILE, find_file, shards_of

logger = logging.getLogger("ray.serve.raystream.replica")

SETTINGS: Final = ("*.json", "*.model", "*.txt", "*.jinja")
PARTS: Final = "[0-9]*_*/model.safetensors"
"""The weights of sentence-transformers' layers, which lie in folders such as 2_Dense."""


CHUNK_BYTES: Final = 2**18
"""A download is counted in pieces of this size."""


def download_files(source: str, revision: str | None, progress: StartProgress) -> None:
    """Download what the cache lacks of a model from the hub; a folder's files are here.

    An error is left to the loader, which meets it again and names it.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.
        progress: Counts the bytes and files.
    """
    if Path(source).is_dir() or Path(source).is_absolute() or _is_here(source, revision):
        return
    try:
        patterns = [*SETTINGS, PARTS, *shards_of(source, revision)]
        options: dict[str, Any] = {"revision": revision, "allow_patterns": patterns}
        silent = _bars_of(StartProgress())
        files = snapshot_download(source, **options, dry_run=True, tqdm_class=silent)
        sizes = [file.file_size or 0 for file in files if file.will_download]
        # The hub counts pieces of 10 MB, for each of which a slow line needs a minute.
        constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
        progress.begin(StartPhase.DOWNLOADING, total_bytes=sum(sizes), total_files=len(files))
        snapshot_download(source, **options, tqdm_class=_bars_of(progress))
    except Exception as error:  # noqa: BLE001 - of any class; the loader raises it again
        logger.info("%s could not be downloaded ahead: %r", source, error)


def _bars_of(progress: StartProgress) -> type[tqdm]:
    """Return a kind of bar that counts instead of being drawn.

    There is one of the bytes that come from the network, one of those that are written, and one of
    the files.
    """

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._is_of_bytes = options.get("unit") == "B"
            self._is_of_network = str(options.get("name")).endswith(".transfer")
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call] # the hub leaves it untyped

        def update(self, n: float | None = 1) -> bool | None:
            if not self._is_of_bytes:
                progress.add(num_files=int(n or 0))
            elif not self._is_of_network:
                progress.add(num_bytes=int(n or 0))
            drawn: bool | None = super().update(n)
            return drawn

    return Bar


def _is_here(source: str, revision: str | None) -> bool:
    """Return whether configuration and weights are in the cache, so that the hub is not asked."""
    names = (CONFIG_FILE, *shards_of(source, revision, local_only=True))
    return all(find_file(source, revision, name, local_only=True) for name in names)
