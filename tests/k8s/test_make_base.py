from typing import Any

import yaml

from k8s.make_base import BASE, ROOT, format_env, generated_files
from serve_app.shipped_files import parse_env


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    else:
        return {path: value}
    return {
        where: leaf for key, part in pairs for where, leaf in _leaves(part, f"{path}/{key}").items()
    }


def _differences(ours: Any, theirs: Any) -> set[str]:
    first, second = _leaves(ours), _leaves(theirs)
    return {
        path for path in first.keys() | second.keys() if first.get(path, ()) != second.get(path, ())
    }


def test_generated_files_equal_what_make_k8s_writes() -> None:
    files = generated_files()
    stale = [
        str(path.relative_to(ROOT))
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run `make k8s`"


def test_no_generated_file_is_left_of_an_overlay_that_is_gone() -> None:
    written = set(BASE.parent.glob("overlays/*/serve_config.yaml"))
    assert written == {path for path in generated_files() if "overlays" in path.parts}


def test_configuration_differs_from_the_root_only_where_a_cluster_must() -> None:
    root = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    base = yaml.safe_load((BASE / "serve_config.yaml").read_text(encoding="utf-8"))
    of_deployments = {
        f"/applications/{i}/deployments/{j}/{key}"
        for i, application in enumerate(root["applications"])
        for j in range(len(application["deployments"]))
        for key in ("graceful_shutdown_timeout_s", "max_replicas_per_node")
    }
    assert (
        _differences(root, base)
        <= {"/http_options/host", "/applications/0/args/auth/api_keys_file"} | of_deployments
    )


def test_environment_differs_from_the_root_only_in_its_drain_times() -> None:
    root = parse_env((ROOT / "serve.env").read_text(encoding="utf-8"))
    base = parse_env((BASE / "serve.env").read_text(encoding="utf-8"))
    assert _differences(root, base) == {
        "/RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
        "/RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    }


def test_written_environment_is_read_back() -> None:
    env = {"A": "1", "B": "x=y"}
    assert parse_env("# a comment\n\n" + format_env(env)) == env
