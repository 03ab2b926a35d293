"""`python -m tests.k8s.strip_crd SOURCE TARGET NOTE`: keeps of a CRD what validation needs.

Published CRDs are mostly descriptions, and hold versions and rules that the tests do not use. What
stays is unchanged: names, properties, types, enumerations, limits and defaults. Removing a property
makes the validation stricter, never weaker.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMA_KEYS = ("properties", "items", "additionalProperties", "allOf", "anyOf", "oneOf", "not")
# A ScrapeConfig can find its targets in thirty ways; ours names them.
UNUSED_SUFFIX, USED = "SDConfigs", "staticConfigs"


def strip(crd: dict[str, Any]) -> dict[str, Any]:
    """Return the CRD with the served versions' schemas, without descriptions."""
    spec = crd["spec"]
    versions = [
        {
            "name": version["name"],
            "schema": {"openAPIV3Schema": strip_schema(version["schema"]["openAPIV3Schema"])},
        }
        for version in spec["versions"]
        if version["served"]
    ]
    kept = {"group": spec["group"], "names": {"kind": spec["names"]["kind"]}, "versions": versions}
    return {"kind": crd["kind"], "metadata": {"name": crd["metadata"]["name"]}, "spec": kept}


def strip_schema(schema: Any) -> Any:
    """Return a schema without descriptions, rules and `status`."""
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("description", "x-kubernetes-validations"):
            continue
        if key == "properties":
            result[key] = {
                name: strip_schema(part)
                for name, part in value.items()
                if name != "status" and not (name.endswith(UNUSED_SUFFIX) and name != USED)
            }
        elif key in ("allOf", "anyOf", "oneOf"):
            result[key] = [strip_schema(part) for part in value]
        else:
            result[key] = strip_schema(value) if key in SCHEMA_KEYS else value
    return result


def main(source: str, target: str, note: str) -> None:
    """Write the stripped CRD, and where it comes from in the first line."""
    crd = strip(yaml.safe_load(Path(source).read_text(encoding="utf-8")))
    text = yaml.safe_dump(crd, sort_keys=False, width=100)
    Path(target).write_text(f"# {note}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
