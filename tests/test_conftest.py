import os
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import OTHERS_NICENESS, RAY_NICENESS, give_way


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is added to this process's niceness."""
    added: list[int] = []
    monkeypatch.setattr(os, "nice", added.append)
    return added


def config(**attributes: object) -> Any:
    return SimpleNamespace(stash=pytest.Stash(), **attributes)


def test_a_process_of_several_gives_way_to_ray_once(added: list[int]) -> None:
    one_of_several = config(workerinput={})
    for _ in range(3):
        give_way(one_of_several)
    assert added == [OTHERS_NICENESS]
    assert OTHERS_NICENESS > RAY_NICENESS


def test_the_only_process_keeps_its_niceness(added: list[int]) -> None:
    give_way(config())
    assert added == []
