"""Renders k8s/ with kubectl and finds what an API server would refuse, without a cluster.

A RayService is validated by KubeRay's CRD, other kinds of projects besides Kubernetes by theirs
(tests/k8s/crds), with unknown keys refused, as in strict decoding. Pod templates and Kubernetes'
own kinds are validated by its schemas. A kind without a schema is a fault.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
CRD = Path(__file__).with_name("ray.io_rayservices.yaml")
OTHER_CRDS = Path(__file__).with_name("crds")
# The oldest and the newest supported Kubernetes.
KUBERNETES_VERSIONS = ("1.32", "1.37")

Manifest = dict[str, Any]


@cache
def render(folder: Path) -> str:
    """Return the manifests that `kubectl apply -k` would send."""
    command = ["kubectl", "kustomize", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def render_with(overlay: Path, components: Sequence[str], folder: Path) -> str:
    """Return an overlay's manifests with components that it does not take by itself.

    They are named by their folders in k8s/components; `folder` is empty, for the kustomization.
    """
    lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization"]
    lines += ["namespace: raystream", "resources:", f"  - {os.path.relpath(overlay, folder)}"]
    if components:
        paths = (os.path.relpath(ROOT / "k8s" / "components" / each, folder) for each in components)
        lines += ["components:", *(f"  - {path}" for path in paths)]
    (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return render(folder)


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
    return list(_faults_of(json.dumps(manifest, sort_keys=True)))


@cache
def _faults_of(text: str) -> tuple[str, ...]:
    """Check a manifest once: most of them are in several renderings."""
    manifest = json.loads(text)
    kind = (manifest["apiVersion"], manifest["kind"])
    pods = pods_of(manifest) if kind == ("ray.io/v1", "RayService") else []
    own = _schema_faults(manifest) if kind in _schemas() else _core_faults(manifest)
    return (*own, *(fault for pod in pods for fault in find_faults(pod)))


def pods_of(ray_service: Manifest) -> list[Manifest]:
    """Return the pods of the head and of each worker group as separate manifests."""
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [_pod(group.get("groupName", "head"), group["template"]) for group in groups]


def all_pods(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Return the pods of RayServices, Jobs and Deployments."""
    pods: list[Manifest] = []
    for manifest in manifests:
        if manifest["kind"] == "RayService":
            pods += pods_of(manifest)
        elif manifest["kind"] in ("Job", "Deployment"):
            pods.append(_pod(manifest["metadata"]["name"], manifest["spec"]["template"]))
    return pods


def _pod(name: str, template: Manifest) -> Manifest:
    metadata = {"name": name, **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _core_faults(manifest: Manifest) -> Iterator[str]:
    name = f"{manifest['kind']} {manifest['metadata'].get('name')}"
    for version in KUBERNETES_VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{name}, Kubernetes {version}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{name}, Kubernetes {version}: no schema for {manifest['apiVersion']}"


def _schema_faults(manifest: Manifest) -> Iterator[str]:
    key = (manifest["apiVersion"], manifest["kind"])
    manifest = deepcopy(manifest)
    _apply_defaults(manifest, _schemas()[key])
    for error in _validator(key).iter_errors(manifest):
        path = ".".join(map(str, error.absolute_path))
        yield f"{manifest['kind']}: {path}: {error.message[:200]}"


@cache
def _validator(key: tuple[str, str]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_to_json_schema(_schemas()[key]))


@cache
def _schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schemas of the CRDs, by apiVersion and kind."""
    paths = [CRD, *OTHER_CRDS.glob("*.yaml")]
    return {key: schema for path in paths for key, schema in _schemas_of(path).items()}


def _schemas_of(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    spec = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)["spec"]
    return {
        (f"{spec['group']}/{version['name']}", spec["names"]["kind"]): version["schema"][
            "openAPIV3Schema"
        ]
        for version in spec["versions"]
    }


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


BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def num_bytes(quantity: str) -> int:
    """Read a quantity of memory, as `4Gi`."""
    return int(quantity[:-2]) * BINARY_UNITS[quantity[-2:]]
