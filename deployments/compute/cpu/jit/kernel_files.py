"""Compiled kernels on disk, so that only the first start of a machine compiles them.

A file is machine code that this process will run. So its folder must belong to this user and be
open to nobody else, and so must the file; whatever is not so is passed over, and the kernel is
compiled. A file's name is a digest of all that its content depends on, and it begins with a digest
of the rest: a file that is damaged is passed over, too.
"""

import logging
import os
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from deployments.plan.cache_folder import cache_folder

logger = logging.getLogger(__name__)

DIGEST_BYTES: Final = sha256().digest_size

OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""The rights of a file that are not its owner's."""


class UnsafeFileError(OSError):
    """Another user could have written what is read; the text names it."""


def kernel_folder() -> Path:
    """Return the folder of compiled kernels, which may not exist; see `cache_folder`."""
    return cache_folder() / "kernels"


def read_kernel(key: bytes) -> bytes | None:
    """Return the object file that was stored under a key; None if there is none to be trusted.

    Args:
        key: All that the content depends on.
    """
    try:
        folder = kernel_folder()
    except RuntimeError:
        return None
    try:
        _require_own(folder, os.lstat(folder))
        # Neither a link to elsewhere is followed, nor is a pipe waited for.
        descriptor = os.open(folder / _name_of(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _require_own(folder, os.fstat(descriptor))
            digest, content = file.read(DIGEST_BYTES), file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("a compiled kernel is not read, but compiled again: %s", error)
        return None
    if digest != sha256(content).digest():
        logger.warning("a compiled kernel is damaged, and compiled again: %s", file.name)
        return None
    return content


def write_kernel(key: bytes, content: bytes) -> None:
    """Store an object file under a key, whole or not at all; a folder that can't be used is left.

    Args:
        key: As for `read_kernel`.
        content: The object file.
    """
    try:
        folder = kernel_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(folder, os.lstat(folder))
        with NamedTemporaryFile(dir=folder, prefix="new-", delete=False) as file:  # mode 600
            try:
                file.write(sha256(content).digest() + content)
                file.close()
                os.replace(file.name, folder / _name_of(key))
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
    except (OSError, RuntimeError) as error:
        logger.info("a compiled kernel is not kept for later starts: %s", error)


def _name_of(key: bytes) -> str:
    return f"{sha256(key).hexdigest()}.o"


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
