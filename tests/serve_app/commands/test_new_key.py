import re
import sys
from pathlib import Path

import pytest
import yaml

from serve_app.commands.new_key import PREFIX, main
from serve_app.config import AuthConfig
from serve_app.keys.api_keys import load_api_keys


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["raystream-key", *arguments])
    return main()


def test_the_printed_key_and_entries_fit_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "new", "alice") == 0
    told = capsys.readouterr().out
    (secret,) = re.findall(rf"{PREFIX}\S+", told)
    lines = "".join(
        line + "\n" for line in told.splitlines() if re.match(r"\s+(- name|sha256):", line)
    )
    (tmp_path / "keys.yaml").write_text(f"keys:\n{lines}")
    assert yaml.safe_load((tmp_path / "keys.yaml").read_text())["keys"][0]["name"] == "alice"
    ring = load_api_keys(AuthConfig(api_keys_file=str(tmp_path / "keys.yaml")), tmp_path, {})
    assert ring is not None
    assert ring.find(secret) is not None
    (pair,) = re.findall(r"alice:[0-9a-f]{64}", told)
    environment = load_api_keys(AuthConfig(), tmp_path, {"RAYSTREAM_API_KEYS": pair})
    assert environment is not None
    assert environment.find(secret) is not None


def test_keys_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "new", "a")
    run(monkeypatch, "new", "a")
    assert len(set(re.findall(rf"{PREFIX}\S+", capsys.readouterr().out))) == 2


@pytest.mark.parametrize(
    "arguments", [(), ("new",), ("old", "a"), ("new", "a b"), ("new", "a", "b")]
)
def test_other_arguments_show_the_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert "NAME" in capsys.readouterr().err
