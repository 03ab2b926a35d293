from pathlib import Path

import pytest
import yaml
from ray.serve._private import constants

from serve_app.commands.check.check import BUFSIZE, ROOM_BYTES, find_problems, header_problems
from serve_app.config import AppConfig
from serve_app.shipped_files import parse_env

ROOT = Path(__file__).resolve().parents[4]
PATH = "applications[0]"


def config(max_header_bytes: int) -> AppConfig:
    return AppConfig.model_validate(
        {
            "models": [{"id": "m", "source": "nowhere"}],
            "limits": {"max_header_bytes": max_header_bytes},
        }
    )


def test_haproxy_s_buffer_must_hold_our_limit_and_some_more() -> None:
    assert list(header_problems(config(16384), PATH, {BUFSIZE: str(16384 + ROOM_BYTES)})) == []
    environment = {BUFSIZE: str(16383 + ROOM_BYTES)}
    (problem,) = header_problems(config(16384), PATH, environment)
    assert problem.startswith(f"{PATH}.args.limits.max_header_bytes: 16384 does not fit into ")
    assert BUFSIZE in problem


@pytest.mark.parametrize("environment", [{}, {BUFSIZE: ""}, {BUFSIZE: "many"}])
def test_a_buffer_that_is_not_set_is_no_mistake(environment: dict[str, str]) -> None:
    assert list(header_problems(config(2**20), PATH, environment)) == []


def test_ray_reads_the_variable() -> None:
    assert hasattr(constants, BUFSIZE)


@pytest.mark.parametrize("folder", [ROOT, ROOT / "k8s" / "base"])
def test_the_shipped_files_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = parse_env((folder / "serve.env").read_text())
    monkeypatch.setenv(BUFSIZE, environment[BUFSIZE])
    text = (folder / "serve_config.yaml").read_text()
    assert not [problem for problem in find_problems(text) if "max_header_bytes" in problem]
    document = yaml.safe_load(text)
    document["applications"][0]["args"]["limits"]["max_header_bytes"] = int(environment[BUFSIZE])
    (problem,) = [p for p in find_problems(yaml.safe_dump(document)) if "max_header_bytes" in p]
    assert problem.startswith("applications[0].args.limits.max_header_bytes: ")
