from collections.abc import Iterator
from copy import deepcopy

import pytest

from tests.k8s.manifests import find_faults
from tests.k8s.mistakes import MISTAKES
from tests.k8s.mistakes.mistake import Mistake
from tests.k8s.renderings import rendering_of
from tests.k8s.rules import ALL
from tests.k8s.rules.rendering import Rendering

pytestmark = pytest.mark.kubectl


def _faults(mistake: Mistake, rendering: Rendering) -> list[str]:
    if mistake.rule is not None:
        return list(mistake.rule(rendering))
    return [fault for manifest in rendering.manifests for fault in find_faults(manifest)]


def _failures(mistake: Mistake) -> Iterator[str]:
    """Plant a mistake; say how its check fails to tell it from the sound rendering."""
    sound = rendering_of(mistake.where)
    spoilt = Rendering(sound.name, deepcopy(sound.manifests), sound.is_local)
    mistake.plant(spoilt)
    if spoilt.manifests == sound.manifests:
        yield f"{mistake.name}: changes nothing in {mistake.where}"
    if not _faults(mistake, spoilt):
        yield f"{mistake.name}: not caught in {mistake.where}"
    if faults := _faults(mistake, sound):
        yield f"{mistake.name}: {mistake.where} has {faults} without it"


def test_every_planted_mistake_is_caught() -> None:
    assert [failure for mistake in MISTAKES for failure in _failures(mistake)] == []


def test_every_rule_catches_a_planted_mistake() -> None:
    caught = {mistake.rule for mistake in MISTAKES}
    assert [rule.__name__ for rule in ALL if rule not in caught] == []


def test_every_mistake_has_a_name_of_its_own_and_a_rule_that_all_renderings_keep() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    assert {mistake.rule for mistake in MISTAKES} - {None} <= set(ALL)
