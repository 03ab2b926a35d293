"""What later starts need not make again: compiled kernels, and traces of models, on disk.

A kernel is machine code that this process will run, and a trace says what it will compute. So their
folder must belong to this user and be open to nobody else, and so must each file; whatever is not
so is passed over, and made again. A file's name is a digest of all that its content depends on, and
it begins with a digest of the rest: a file that is damaged is passed over, too.
"""

import logging
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

import deployments
from deployments.plan.cache_folder import cache_folder

logger = logging.getLogger(__name__)

DIGEST_BYTES: Final = sha256().digest_size

OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""The rights of a file that are not its owner's."""


class UnsafeFileError(OSError):
    """Another user could have written what is read; the text names it."""


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """Files of one kind.

    Attributes:
        folder_name: Their folder's name in the cache folder.
        suffix: The end of a file's name.
        noun: What a file is, for the log.
        made: What is done where there is no file, for the log.
    """

    folder_name: str
    suffix: str
    noun: str
    made: str

    @property
    def folder(self) -> Path:
        """Their folder, which may not exist.

        Raises:
            RuntimeError: The user has no home.
        """
        return cache_folder() / self.folder_name

    def read(self, key: bytes) -> bytes | None:
        """Return what was stored under a key; None if there is nothing to be trusted.

        Args:
            key: All that the content depends on.
        """
        try:
            folder = self.folder
        except RuntimeError:
            return None
        try:
            _require_own(folder, os.lstat(folder))
            # Neither a link to elsewhere is followed, nor is a pipe waited for.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(folder / self._name_of(key), flags)
            with open(descriptor, "rb") as file:
                _require_own(folder, os.fstat(descriptor))
                digest, content = file.read(DIGEST_BYTES), file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s is not read, but %s again: %s", self.noun, self.made, error)
            return None
        if digest != sha256(content).digest():
            logger.warning("%s is damaged, and %s again: %s", self.noun, self.made, folder)
            return None
        return content

    def write(self, key: bytes, content: bytes) -> None:
        """Store under a key, whole or not at all; a folder that can't be used is left.

        Args:
            key: As for `read`.
            content: What is stored.
        """
        try:
            folder = self.folder
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own(folder, os.lstat(folder))
            with NamedTemporaryFile(dir=folder, prefix="new-", delete=False) as file:  # mode 600
                try:
                    file.write(sha256(content).digest() + content)
                    file.close()
                    os.replace(file.name, folder / self._name_of(key))
                except BaseException:
                    with suppress(OSError):
                        os.unlink(file.name)
                    raise
        except (OSError, RuntimeError) as error:
            logger.info("%s is not kept for later starts: %s", self.noun, error)

    def _name_of(self, key: bytes) -> str:
        return sha256(key).hexdigest() + self.suffix


KERNELS: Final = KeptFiles("kernels", ".o", "a compiled kernel", "compiled")
TRACES: Final = KeptFiles("traces", ".json", "a model's trace", "traced")


@cache
def source_digest() -> str:
    """Return a digest of all source that may make what is kept: that of `deployments`."""
    digest = sha256()
    for path in sorted(Path(deployments.__file__).parent.rglob("*.py")):
        digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _require_own(path: Path, status: os.stat_result) -> None:
    """Refuse a folder, or a file in it, that another user could have written.

    Raises:
        UnsafeFileError: It is another user's, open to others, or neither a folder nor a file.
    """
    is_plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    if not is_plain or status.st_uid != os.geteuid() or status.st_mode & OTHERS:
        raise UnsafeFileError(
            f"{path} and its files must be this user's own and closed to others; remove the folder"
        )
