import re
from pathlib import Path

import pytest
import yaml

from serve_app.commands.user.new_key import PREFIX, InvalidNameError, InvalidScopeError, make_key
from serve_app.config import AuthConfig
from serve_app.keys.api_keys import load_api_keys


@pytest.mark.parametrize("scopes", [(), ("operate",)])
def test_the_printed_key_and_entries_fit_together(tmp_path: Path, scopes: tuple[str, ...]) -> None:
    told = make_key("alice", scopes)
    (secret,) = re.findall(rf"{PREFIX}\S+", told)
    lines = "".join(
        line + "\n" for line in told.splitlines() if re.match(r"\s+(- name|sha256|scopes):", line)
    )
    (tmp_path / "keys.yaml").write_text(f"keys:\n{lines}")
    assert yaml.safe_load((tmp_path / "keys.yaml").read_text())["keys"][0]["name"] == "alice"
    ring = load_api_keys(AuthConfig(api_keys_file=str(tmp_path / "keys.yaml")), tmp_path, {})
    assert ring is not None
    found = ring.find(secret)
    assert found is not None
    assert found.scopes == scopes
    (pair,) = re.findall(r"alice:[0-9a-f]{64}", told)
    environment = load_api_keys(AuthConfig(), tmp_path, {"RAYSTREAM_API_KEYS": pair})
    assert environment is not None
    assert environment.find(secret) is not None


def test_keys_differ() -> None:
    assert len(set(re.findall(rf"{PREFIX}\S+", make_key("a") + make_key("a")))) == 2


@pytest.mark.parametrize("name", ["", "a b", "a" * 65])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidNameError, match="1 to 64 letters"):
        make_key(name)


def test_unknown_scopes_are_refused() -> None:
    with pytest.raises(InvalidScopeError, match="no scope 'admin'; write operate"):
        make_key("alice", ["operate", "admin"])
