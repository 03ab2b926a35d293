import asyncio

import pytest

from deployments.errors import GenerationFailedError, ModelNotFoundError, ReplicaUnavailableError
from serve_app.catalog import ModelCatalog
from tests.serve_app.fakes import FakeBackend


async def test_a_model_is_asked_once_what_it_is() -> None:
    backend = FakeBackend()
    catalog = ModelCatalog({"m": backend})
    first, second = await catalog.get("m"), await catalog.get("m")
    assert first.description is second.description
    assert backend.num_describes == 1


async def test_an_unknown_model_is_refused_with_the_names_that_are_served() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'x'.*Served: m, n\."):
        await ModelCatalog({"m": FakeBackend(), "n": FakeBackend()}).get("x")


async def test_a_loading_model_is_not_waited_for_by_a_probe() -> None:
    backend = FakeBackend()
    backend.loaded = asyncio.Event()
    catalog = ModelCatalog({"m": backend}, probe_timeout_s=0)
    with pytest.raises(ReplicaUnavailableError, match="loading"):
        await catalog.probe("m")
    backend.loaded.set()
    assert (await catalog.get("m")).description.id == "m"
    assert (await catalog.probe("m")).description.id == "m"


async def test_a_model_that_has_died_is_no_longer_ready() -> None:
    backend = FakeBackend()
    catalog = ModelCatalog({"m": backend}, probe_timeout_s=0.01)
    assert (await catalog.probe("m")).description.id == "m"
    backend.loaded = asyncio.Event()
    with pytest.raises(ReplicaUnavailableError, match="loading"):
        await catalog.probe("m")
    assert (await catalog.get("m")).description.id == "m"


async def test_health_tells_which_engine_is_not_well() -> None:
    sick = FakeBackend()
    sick.sickness = GenerationFailedError("the engine has stopped")
    assert await ModelCatalog({"m": FakeBackend(), "n": sick}).health() == {
        "m": None,
        "n": sick.sickness,
    }


async def test_however_many_ask_for_health_at_once_an_engine_is_exercised_once() -> None:
    backend = FakeBackend()
    backend.pinged = asyncio.Event()
    catalog = ModelCatalog({"m": backend})
    asking = [asyncio.ensure_future(catalog.health()) for _ in range(9)]
    await asyncio.sleep(0)
    backend.pinged.set()
    assert await asyncio.gather(*asking) == [{"m": None}] * 9
    assert backend.num_pings == 1
