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


FILES = sorted(OTHER_CRDS.glob("*.yaml"))


def test_every_file_says_where_it_comes_from() -> None:
    heads = {path.name: path.read_text(encoding="utf-8").splitlines()[0] for path in FILES}
    assert heads
    assert [name for name, head in heads.items() if "Apache-2.0" not in head] == []


def test_no_file_accepts_an_unknown_key() -> None:
    accepting = []
    for path in FILES:
        spec = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)["spec"]
        manifest = {
            "apiVersion": f"{spec['group']}/{spec['versions'][0]['name']}",
            "kind": spec["names"]["kind"],
            "metadata": {"name": "x"},
            "spec": {"unknownKey": 1},
        }
        if not any("unknownKey" in fault for fault in find_faults(manifest)):
            accepting.append(path.name)
    assert accepting == []
