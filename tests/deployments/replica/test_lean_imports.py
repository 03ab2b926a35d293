import gc
from collections.abc import Iterator

import pytest

from deployments.replica import lean_imports as lean_imports_module
from deployments.replica import own_actor, unused_compiler
from deployments.replica.lean_imports import lean_imports


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.fixture
def in_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an actor import here, but leave nothing out: that would last."""
    monkeypatch.setattr(own_actor, "is_actor", lambda: True)
    monkeypatch.setattr(unused_compiler, "leave_compiler_out", lambda: None)
    monkeypatch.setattr(lean_imports_module, "_leave_shards_out", lambda: None)


@pytest.mark.usefixtures("in_actor")
def test_an_actor_collects_nothing_of_its_imports() -> None:
    num_frozen = gc.get_freeze_count()
    with lean_imports():
        imported = [[number] for number in range(1000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= num_frozen + len(imported)


@pytest.mark.usefixtures("in_actor")
def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), lean_imports():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.usefixtures("in_actor")
def test_a_collector_that_was_off_stays_off() -> None:
    num_frozen = gc.get_freeze_count()
    gc.disable()
    with lean_imports():
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() <= num_frozen


def test_a_process_that_is_no_actor_collects_as_ever() -> None:
    num_frozen = gc.get_freeze_count()
    with lean_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= num_frozen
