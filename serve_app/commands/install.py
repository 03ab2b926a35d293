"""`python -m serve_app.commands.install [--all]`: makes `.venv`, telling each stage in a line.

It installs raystream with the packages that serving needs; `--all` adds those for tests and
development. All versions are those of `requirements.lock`.

The Makefile runs it before anything is installed, so it imports only the standard library. pip's
output goes into `.venv/install.log` and is shown whole if pip fails.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Final

ENVIRONMENT: Final = Path(".venv")
LOCK: Final = Path("requirements.lock")
LARGE_MB: Final = 50
"""Downloads of this size are announced, since pip is silent while they last."""
HEARTBEAT_S: Final = 30
PIP: Final = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install")

SERVING: Final = ("--constraint", str(LOCK), "--editable", ".")
"""What serving needs: raystream's own dependencies, in the lock's versions."""

ALL: Final = ("--requirement", str(LOCK))
"""Every package of the lock."""

FOUND: Final = ("Collecting ", "Processing ", "Requirement already satisfied: ")
"""How pip's line about a package begins: on an index, in a local folder, or installed."""

_DOWNLOAD = re.compile(
    r"\s*Downloading (?:\S*/)?(?P<file>\S+) \((?P<size>[\d.]+) (?P<unit>[MG])B\)"
)
Tell = Callable[[str], None]


class InstallationError(Exception):
    """A command failed; the text is its whole output."""


class PipProgress:
    """What pip has done so far, as its output and the environment's folder tell."""

    def __init__(self, environment: Path, since_s: float) -> None:
        """Start counting.

        Args:
            environment: The folder that pip installs into.
            since_s: Packages that were unpacked after this time count (Unix time).
        """
        self.num_installing = 0
        self._num_found = 0
        self._environment = environment
        self._since_s = since_s

    def read(self, line: str) -> str | None:
        """Take a line of pip's output; return what the user should know at once, if anything."""
        if line.startswith(FOUND):
            self._num_found += 1
        elif line.startswith("Installing collected packages: "):
            self.num_installing = line.count(",") + 1
        elif (match := _DOWNLOAD.match(line)) and _megabytes(match) >= LARGE_MB:
            return f"downloading {match['file']}, {match['size']} {match['unit']}B"
        return None

    def status(self) -> str:
        """Return how far pip has come."""
        if not self.num_installing:
            return f"{self._num_found} packages found"
        return f"{self._num_unpacked()} of {self.num_installing} packages unpacked"

    def _num_unpacked(self) -> int:
        # pip writes this folder last of a package.
        folders = self._environment.glob("lib/python*/site-packages/*.dist-info")
        return sum(folder.stat().st_mtime >= self._since_s for folder in folders)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment and return the exit code."""
    parser = argparse.ArgumentParser(prog="install", description="Make .venv.")
    parser.add_argument("--all", action="store_true", help="add tests and development")
    is_whole: bool = parser.parse_args(arguments).all
    try:
        install(_tell, is_whole=is_whole)
    except InstallationError as error:
        sys.stderr.write(f"{error}\nThe environment could not be made; pip's output is above.\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _tell(line: str) -> None:
    sys.stdout.write(f"  {line}\n")
    sys.stdout.flush()


def install(tell: Tell, *, is_whole: bool) -> None:
    """Make the environment, or bring it up to date.

    Args:
        tell: Takes each stage as a line.
        is_whole: Whether to add what serving does not need to an environment that can serve.

    Raises:
        InstallationError: A stage failed.
    """
    python = ENVIRONMENT / "bin" / "python"
    started = time.monotonic()
    if not has_pip(python):
        _run([sys.executable, "-m", "venv", str(ENVIRONMENT)])
        tell(f"made .venv with Python {sys.version.split()[0]} ({_seconds(started)})")
    started = time.monotonic()
    if is_whole:
        tell(f"adding the other packages of {LOCK}, for tests and development")
    else:
        tell(f"installing what serving needs, by {LOCK}; torch and Ray are the largest")
    progress = PipProgress(ENVIRONMENT, time.time())
    log = ENVIRONMENT / "install.log"
    command = [str(python), *PIP, "--progress-bar", "off", *(ALL if is_whole else SERVING)]
    run_pip(command, progress, log, lambda line: tell(f"  {_seconds(started)}: {line}"))
    tell(f"installed {progress.num_installing or 'no further'} packages ({_seconds(started)})")


def has_pip(python: Path) -> bool:
    """Return whether an environment is complete; one whose making was interrupted lacks pip."""
    if not python.exists():
        return False
    command = [str(python), "-m", "pip", "--version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_pip(
    command: Sequence[str],
    progress: PipProgress,
    log: Path,
    tell: Tell,
    heartbeat_s: float = HEARTBEAT_S,
) -> None:
    """Run pip; write its output into a file, and tell how far it has come.

    Raises:
        InstallationError: pip failed.
    """

    def read() -> None:
        assert process.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                if (news := progress.read(line)) is not None:
                    tell(news)

    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        reader = Thread(target=read)
        reader.start()
        try:
            while (code := _wait(process, heartbeat_s)) is None:
                tell(progress.status())
        except KeyboardInterrupt:
            process.terminate()
            raise
        finally:
            reader.join()
    if code:
        raise InstallationError(log.read_text(encoding="utf-8"))


def _megabytes(match: re.Match[str]) -> float:
    return float(match["size"]) * (1000 if match["unit"] == "G" else 1)


def _wait(process: subprocess.Popen[str], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode:
        raise InstallationError(result.stdout)


def _seconds(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
