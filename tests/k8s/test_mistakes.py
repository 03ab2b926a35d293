from copy import deepcopy

import pytest

from tests.k8s.manifests import find_faults
from tests.k8s.mistakes import MISTAKES
from tests.k8s.mistakes.mistake import Mistake
from tests.k8s.renderings import rendering_of
from tests.k8s.rules import ALL
from tests.k8s.rules.rendering import Rendering, Rule

pytestmark = pytest.mark.kubectl


def _faults(mistake: Mistake, rendering: Rendering) -> list[str]:
    if mistake.rule is not None:
        return list(mistake.rule(rendering))
    return [fault for manifest in rendering.manifests for fault in find_faults(manifest)]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_planted_mistake_is_caught(mistake: Mistake) -> None:
    sound = rendering_of(mistake.where)
    spoilt = Rendering(sound.name, deepcopy(sound.manifests), sound.is_local)
    mistake.plant(spoilt)
    assert spoilt.manifests != sound.manifests
    assert _faults(mistake, spoilt) != []
    assert _faults(mistake, sound) == []


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.__name__)
def test_every_rule_catches_a_planted_mistake(rule: Rule) -> None:
    assert rule in {mistake.rule for mistake in MISTAKES}


def test_every_mistake_has_a_name_of_its_own_and_a_rule_that_all_renderings_keep() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    assert {mistake.rule for mistake in MISTAKES} - {None} <= set(ALL)
