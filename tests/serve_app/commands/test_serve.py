"""`raystream-serve` itself; `tests/ray/test_serve_run.py` serves the shipped file by it."""

import sys

import pytest

from serve_app.commands import serve


def test_the_driver_runs_under_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run_supervised(command: list[str]) -> int:
        commands.append(command)
        return 3

    monkeypatch.setattr(serve, "run_supervised", run_supervised)
    monkeypatch.setattr(sys, "argv", ["raystream-serve", "file.yaml"])
    assert serve.main() == 3
    assert commands == [[*serve.DRIVER, "file.yaml"]]


@pytest.mark.parametrize("arguments", [[], ["a.yaml", "b.yaml"]])
def test_without_one_file_the_usage_is_shown(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["raystream-serve", *arguments])
    assert serve.main() == 2
    assert capsys.readouterr().err == "usage: raystream-serve FILE\n"


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["file.yaml", "--help"]])
def test_help_shows_the_usage_and_starts_nothing(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "run_supervised", lambda command: pytest.fail(str(command)))
    monkeypatch.setattr(sys, "argv", ["raystream-serve", *arguments])
    assert serve.main() == 0
    told = capsys.readouterr()
    assert told.out.startswith("usage: raystream-serve FILE\n")
    assert told.err == ""
