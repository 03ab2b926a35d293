import pytest
import yaml

from tests.k8s.manifests import OTHER_CRDS, find_faults
from tests.k8s.strip_crd import strip

CRD = {
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "things.example.com", "annotations": {"a": "b"}},
    "spec": {
        "group": "example.com",
        "names": {"kind": "Thing", "plural": "things"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "schema": {
                    "openAPIV3Schema": {
                        "description": "A thing.",
                        "properties": {
                            "size": {"description": "Its size.", "type": "integer", "maximum": 3},
                            "status": {"type": "object"},
                            "xSDConfigs": {"type": "array"},
                        },
                        "x-kubernetes-validations": [{"rule": "true"}],
                    }
                },
            },
            {"name": "v0", "served": False, "schema": {"openAPIV3Schema": {}}},
        ],
    },
}


def test_only_what_validation_needs_stays() -> None:
    (version,) = strip(CRD)["spec"]["versions"]
    assert version == {
        "name": "v1",
        "schema": {"openAPIV3Schema": {"properties": {"size": {"type": "integer", "maximum": 3}}}},
    }


@pytest.mark.parametrize("path", sorted(OTHER_CRDS.glob("*.yaml")), ids=lambda path: path.stem)
def test_files_tell_their_source_and_refuse_unknown_keys(path: object) -> None:
    text = (OTHER_CRDS / str(path)).read_text(encoding="utf-8")
    assert "Apache-2.0" in text.splitlines()[0]
    spec = yaml.safe_load(text)["spec"]
    manifest = {
        "apiVersion": f"{spec['group']}/{spec['versions'][0]['name']}",
        "kind": spec["names"]["kind"],
        "metadata": {"name": "x"},
        "spec": {"unknownKey": 1},
    }
    assert any("unknownKey" in fault for fault in find_faults(manifest))
