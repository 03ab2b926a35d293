"""Renders k8s/ with kubectl and finds what an API server would refuse, without a cluster.

A RayService is validated by KubeRay's CRD (unknown keys refused, as in strict decoding), its pod
templates and all other kinds by Kubernetes' own schemas. A kind without a schema is a fault.
"""

import subprocess
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
CRD = Path(__file__).with_name("ray.io_rayservices.yaml")
# The oldest and the newest supported Kubernetes.
KUBERNETES_VERSIONS = ("1.32", "1.37")

Manifest = dict[str, Any]


@cache
def render(folder: Path) -> str:
    """Return the manifests that `kubectl apply -k` would send."""
    command = ["kubectl", "kustomize", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def parse(text: str) -> list[Manifest]:
    """Read the manifests; a repeated key is an error, as it is for the API server."""
    return [manifest for manifest in yaml.load_all(text, Loader=_UniqueKeyLoader) if manifest]


class _UniqueKeyLoader(yaml.CSafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.YAMLError(f"a key is repeated {node.start_mark}")
        return super().construct_mapping(node, deep)


def find_faults(manifest: Manifest) -> list[str]:
    """Return a line for each fault that the API server would find in the manifest."""
    if (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService"):
        pods = [fault for pod in pods_of(manifest) for fault in _core_faults(pod)]
        return [*_ray_service_faults(manifest), *pods]
    return list(_core_faults(manifest))


def pods_of(ray_service: Manifest) -> list[Manifest]:
    """Return the pods of the head and of each worker group as separate manifests."""
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": group.get("groupName", "head"), **group["template"]["metadata"]},
            "spec": group["template"]["spec"],
        }
        for group in groups
    ]


def _core_faults(manifest: Manifest) -> Iterator[str]:
    name = f"{manifest['kind']} {manifest['metadata'].get('name')}"
    for version in KUBERNETES_VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{name}, Kubernetes {version}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{name}, Kubernetes {version}: no schema for {manifest['apiVersion']}"


def _ray_service_faults(manifest: Manifest) -> Iterator[str]:
    schema = _ray_service_schema()
    manifest = deepcopy(manifest)
    _apply_defaults(manifest, schema)
    for error in jsonschema.Draft202012Validator(_to_json_schema(schema)).iter_errors(manifest):
        yield f"RayService: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"


@cache
def _ray_service_schema() -> dict[str, Any]:
    crd = yaml.load(CRD.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    (version,) = (version for version in crd["spec"]["versions"] if version["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def _apply_defaults(value: Any, schema: dict[str, Any]) -> None:
    """Fill in the CRD's defaults, as the API server does before it validates."""
    if isinstance(value, list):
        for item in value:
            _apply_defaults(item, schema.get("items", {}))
    elif isinstance(value, dict):
        for key, part in schema.get("properties", {}).items():
            if "default" in part:
                value.setdefault(key, deepcopy(part["default"]))
            if key in value:
                _apply_defaults(value[key], part)


# OpenAPI's keywords that JSON Schema does not know, or gives another meaning.
_DROPPED = ("nullable", "description", "default", "format")


def _to_json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert a CRD's structural schema to JSON Schema that refuses unknown keys."""
    result = {
        key: _convert(key, part)
        for key, part in schema.items()
        if key not in _DROPPED and not key.startswith("x-kubernetes")
    }
    keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in result and not keeps_unknown:
        result.setdefault("additionalProperties", False)
    return result


def _convert(keyword: str, part: Any) -> Any:
    if keyword == "properties":
        return {name: _to_json_schema(schema) for name, schema in part.items()}
    if keyword in ("allOf", "anyOf", "oneOf"):
        return [_to_json_schema(schema) for schema in part]
    if keyword in ("items", "additionalProperties", "not") and isinstance(part, dict):
        return _to_json_schema(part)
    return part
