import os
import subprocess
import sys

import pytest

from serve_app import haproxy


def test_it_becomes_haproxy() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "serve_app.haproxy", "-v"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.startswith("HAProxy version 2.8")


def test_it_does_not_splice_and_passes_rays_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["raystream-haproxy", "-f", "haproxy.cfg", "-db"])
    monkeypatch.delenv(haproxy.VARIABLE, raising=False)
    monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments))
    haproxy.main()
    ((_, *arguments),) = started
    assert arguments == ["-dS", "-f", "haproxy.cfg", "-db"]
