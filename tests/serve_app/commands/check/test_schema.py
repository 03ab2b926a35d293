import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from serve_app.commands.check.check import find_problems
from serve_app.commands.check.schema import BESIDE, file_schema, schema_text, write_new
from tests.offenders import every, for_each

ROOT = Path(__file__).resolve().parents[4]
SHIPPED = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))

APP = ("applications", 0)
MODEL = (*APP, "args", "models", 0)
DEPLOYMENT = (*APP, "deployments", 1)


@cache
def validator() -> Draft7Validator:
    schema = file_schema()
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return the shipped file with another value at a path."""
    document: dict[str, Any] = copy.deepcopy(SHIPPED)
    section: Any = document
    for step in path[:-1]:
        section = section[step]
    if isinstance(section, list) and path[-1] == len(section):
        section.append(value)
    else:
        section[path[-1]] = value
    return document


def test_every_file_that_is_shipped_is_valid() -> None:
    files = [ROOT / "serve_config.yaml", ROOT / "k8s/base/serve_config.yaml"]
    for case in every(files):
        with case as file:
            assert list(validator().iter_errors(yaml.safe_load(file.read_text()))) == []


# A path in the shipped file, and a value there that is refused.
@for_each(
    (("loging_config",), {}),
    (("proxy_location",), "Everywhere"),
    (("http_options", "prt"), 8000),
    (("http_options", "port"), "eight thousand"),
    (("logging_config",), {"encodng": "JSON"}),
    (("grpc_options",), {"prt": 1}),
    ((*APP, "import_paht"), "serve_app.app:build"),
    ((*APP, "import_path"), "serve_app.app:biuld"),
    ((*APP, "runtime_env"), {"pips": []}),
    ((*APP, "args"), {}),
    ((*APP, "args", "access_logs"), True),
    ((*APP, "args", "limits", "max_body_bytes"), "large"),
    ((*APP, "args", "limits", "max_bodybytes"), 1),
    ((*APP, "args", "auth", "keys_file"), "keys.yaml"),
    ((*APP, "args", "cors", "allowed_origins"), ["chat.example.org"]),
    ((*MODEL, "dtype"), "float15"),
    ((*MODEL, "tsak"), "generate"),
    ((*MODEL, "task"), "classify"),  # it has keys of models that generate
    ((*MODEL, "max_model_len"), 1),
    ((*MODEL, "id"), "no spaces"),
    ((*DEPLOYMENT, "max_ongoing_request"), 1),
    ((*DEPLOYMENT, "max_surge_percent"), 101),
    ((*DEPLOYMENT, "user_config", "max_batch_siz"), 1),
    ((*DEPLOYMENT, "user_config", "max_batch_size"), 0),
    ((*DEPLOYMENT, "autoscaling_config", "max_replica"), 1),
    ((*DEPLOYMENT, "autoscaling_config", "policy", "policy_kwarg"), {}),
    ((*DEPLOYMENT, "autoscaling_config", "policy", "policy_kwargs", "target"), 1),
    ((*DEPLOYMENT, "request_router_config"), {"router": "x"}),
    ((*DEPLOYMENT, "ray_actor_options"), {"num_cpu": 1, "num_cpus": 1, "num_gpus": 0}),
)
def test_mistakes_are_refused_as_the_check_refuses_them(
    path: tuple[str | int, ...], value: Any
) -> None:
    document = changed(path, value)
    assert not validator().is_valid(document)
    assert find_problems(yaml.safe_dump(document)) != []


@for_each(
    ((*APP, "args", "models"), [{"id": "m", "source": "org/m"}]),
    ((*DEPLOYMENT, "user_config"), None),
    ((*DEPLOYMENT, "num_replicas"), "auto"),
    ((*DEPLOYMENT, "autoscaling_config", "policy"), {"policy_function": "own:Policy"}),
    ((*DEPLOYMENT, "ray_actor_options"), {"num_cpus": 1, "num_gpus": 0.5, "resources": {"a": 1}}),
    ((*APP, "runtime_env"), {"env_vars": {"A": "b"}}),
    ((*APP, "logging_config"), {"encoding": "JSON"}),
    (("applications", 1), {"name": "b", "route_prefix": "/b", "import_path": "b:c", "args": {}}),
)
def test_other_files_that_are_right_are_valid(path: tuple[str | int, ...], value: Any) -> None:
    assert [e.message for e in validator().iter_errors(changed(path, value))] == []


def test_each_key_of_ours_says_in_one_paragraph_what_it_does() -> None:
    for case in every(
        (name, section, key, field)
        for name, section in file_schema()["$defs"].items()
        for key, field in section.get("properties", {}).items()
    ):
        with case as (name, _section, _key, field):
            is_ours = name.startswith("raystream.") and "$ref" not in field
            assert "description" in field or not is_ours, "no description"
            assert "\n" not in field.get("description", "")


def test_no_default_of_ray_s_stands_in_for_none_given() -> None:
    fields = file_schema()["$defs"]["DeploymentSchema"]["properties"]
    assert "default" not in fields["user_config"]
    assert fields["max_surge_percent"]["type"] == "integer"


def test_a_file_names_the_schema_beside_it_to_editors(tmp_path: Path) -> None:
    file = tmp_path / "serve_config.yaml"
    write_new(file, "a: 1\n")
    assert file.read_text() == f"# yaml-language-server: $schema={BESIDE}\na: 1\n"
    assert yaml.safe_load((tmp_path / BESIDE).read_text()) == file_schema()


def test_a_new_file_leaves_the_schema_that_is_there_and_is_not_written_without_it(
    tmp_path: Path,
) -> None:
    file, beside = tmp_path / "serve_config.yaml", tmp_path / BESIDE
    beside.write_text("mine")
    with pytest.raises(FileExistsError):
        write_new(file, "")
    assert (file.exists(), beside.read_text()) == (False, "mine")
    beside.write_text(schema_text())
    write_new(file, "")  # as a second file of the folder
    assert file.exists()


def test_the_schema_is_the_same_in_each_process() -> None:
    """Otherwise a second file beside the first would need another schema of the same name."""
    definitions = file_schema()["$defs"]
    keys = [*definitions["RayActorOptionsSchema"]["properties"]["runtime_env"]["properties"]]
    assert keys == sorted(keys)
