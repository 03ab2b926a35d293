import gc
from collections.abc import Iterator

import pytest

from deployments.replica import own_actor
from deployments.replica.uncollected_imports import uncollected_imports


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.fixture
def in_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_actor, "is_actor", lambda: True)


@pytest.mark.usefixtures("in_actor")
def test_an_actor_collects_nothing_of_its_imports() -> None:
    num_frozen = gc.get_freeze_count()
    with uncollected_imports():
        imported = [[number] for number in range(1000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= num_frozen + len(imported)


@pytest.mark.usefixtures("in_actor")
def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), uncollected_imports():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.usefixtures("in_actor")
def test_a_collector_that_was_off_stays_off() -> None:
    num_frozen = gc.get_freeze_count()
    gc.disable()
    with uncollected_imports():
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() <= num_frozen


def test_a_process_that_is_no_actor_collects_as_ever() -> None:
    num_frozen = gc.get_freeze_count()
    with uncollected_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= num_frozen
