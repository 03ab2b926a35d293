import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from deployments.contract.strict_model import StrictModel
from serve_app.config import AppConfig
from tests.made_table import ROOT
from tests.serve_app.configuration_tables import PAGE, rows


class Section(StrictModel):
    a_timeout_s: float | None = 0.5
    """How long it lasts."""


class Undescribed(StrictModel):
    number: int = 1


def sections() -> Iterator[type[BaseModel]]:
    """Yield the configuration's sections and its entries of models."""
    yield AppConfig
    for field in AppConfig.model_fields.values():
        yield from (
            part
            for part in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(part, type) and issubclass(part, BaseModel)
        )


def shipped_values() -> dict[str, set[str]]:
    """Return the values of each key in the shipped file's deployments."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    found: dict[str, set[str]] = defaultdict(set)

    def walk(value: Any) -> None:
        for key, part in value.items():
            if isinstance(part, dict):
                found[key] |= set()
                walk(part)
            else:
                found[key].add(str(part))

    for deployment in document["applications"][0]["deployments"]:
        walk(deployment)
    return dict(found)


def test_a_line_tells_values_default_unit_and_effect() -> None:
    line = "| `a_timeout_s` | a number, `null` | `0.5` | seconds | How long it lasts. |"
    assert rows(Section).splitlines()[2:] == [line]


def test_a_key_without_a_docstring_is_an_error() -> None:
    with pytest.raises(ValueError, match="'number' has no docstring"):
        rows(Undescribed)


def test_every_section_has_a_table() -> None:
    page = (ROOT / PAGE).read_text()
    for section in sections():
        assert rows(section) in page


def test_every_key_that_the_shipped_file_gives_to_deployments_is_explained() -> None:
    page = (ROOT / PAGE).read_text()
    named = set(re.findall(r"`(?:policy\.)?(\w+)`", "".join(re.findall(r"^\| `.*", page, re.M))))
    assert shipped_values().keys() - {"name", "policy", "num_cpus"} <= named


def test_the_page_tells_the_shipped_values_of_ray_s_keys() -> None:
    page = (ROOT / PAGE).read_text()
    shipped = shipped_values()
    told = re.findall(r"^\| (`.*?`) \| (`[\d.].*?) \| [A-Z]", page, re.M)
    compared = 0
    for keys, values in told:
        names = re.findall(r"`(\w+)`", keys)
        if all(name in shipped for name in names):
            assert set(re.findall(r"`([\d.]+)`", values)) == set().union(
                *(shipped[name] for name in names)
            )
            compared += 1
    assert compared > 10
