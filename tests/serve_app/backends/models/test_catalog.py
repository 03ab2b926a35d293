import asyncio

import pytest

from deployments.contract.descriptions import ModelDescription, PoolerDescription
from deployments.contract.errors import (
    GenerationFailedError,
    ModelNotFoundError,
    PoolingFailedError,
    ReplicaUnavailableError,
    WrongTaskError,
)
from serve_app.backends.models.catalog import ModelCatalog
from tests.serve_app.fake_pooler import FakeClassifier, FakeCrossEncoder, FakeEmbedder
from tests.serve_app.fakes import FakeBackend
from tests.stopped_clock import settle

pytestmark = pytest.mark.in_time


class SickBackend(FakeBackend):
    async def describe(self) -> ModelDescription:
        raise ReplicaUnavailableError("gone")


async def test_a_model_is_asked_for_its_description_once() -> None:
    backend = FakeBackend()
    catalog = ModelCatalog({"m": backend})
    first, second = await catalog.get("m"), await catalog.get("m")
    assert first.description is second.description
    assert backend.num_describes == 1


async def test_all_models_can_be_asked_for_descriptions_before_the_first_request() -> None:
    well, sick, classifier = FakeBackend(), SickBackend(), FakeClassifier()
    catalog = ModelCatalog({"m": well, "n": sick}, {"c": classifier})
    await catalog.get_all()
    await catalog.get("m")
    assert well.num_describes == 1
    with pytest.raises(ReplicaUnavailableError, match="gone"):
        await catalog.get("n")


async def test_an_unknown_model_is_refused_with_the_names_that_are_served() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'x'.*Served: m, n\."):
        await ModelCatalog({"m": FakeBackend(), "n": FakeBackend()}).get("x")


async def test_a_probe_does_not_wait_for_a_loading_model() -> None:
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


async def test_health_tells_which_engine_is_unhealthy() -> None:
    sick = FakeBackend()
    sick.sickness = GenerationFailedError("the engine has stopped")
    assert await ModelCatalog({"m": FakeBackend(), "n": sick}).health() == {
        "m": None,
        "n": sick.sickness,
    }


@pytest.mark.usefixtures("advance")
async def test_concurrent_health_checks_exercise_an_engine_once() -> None:
    backend = FakeBackend()
    backend.pinged = asyncio.Event()
    catalog = ModelCatalog({"m": backend})
    asking = [asyncio.ensure_future(catalog.health()) for _ in range(9)]
    await settle()
    backend.pinged.set()
    assert await asyncio.gather(*asking) == [{"m": None}] * 9
    assert backend.num_pings == 1


async def test_each_task_has_its_own_default_model() -> None:
    generating = {"m": FakeBackend(), "n": FakeBackend(model_id="n")}
    catalog = ModelCatalog(generating, {"c": FakeClassifier(), "d": FakeClassifier("d")})
    assert (await catalog.get(None)).description.id == "m"
    assert (await catalog.get_classifier(None)).description.id == "c"
    assert (await catalog.get_classifier("d")).description.id == "d"


async def test_a_model_of_another_task_is_refused_with_the_names_of_those_that_can() -> None:
    catalog = ModelCatalog({"m": FakeBackend(), "n": FakeBackend()}, {"c": FakeClassifier()})
    with pytest.raises(WrongTaskError, match=r"'c' can't generate text\. Models that can: m, n\."):
        await catalog.get("c")
    with pytest.raises(WrongTaskError, match=r"'m' can't classify\. Models that can: c\."):
        await catalog.get_classifier("m")


async def test_where_no_model_has_the_task_the_refusal_says_so() -> None:
    with pytest.raises(ModelNotFoundError, match="No model here can generate text"):
        await ModelCatalog({}, {"c": FakeClassifier()}).get(None)
    with pytest.raises(WrongTaskError, match="Models that can: none"):
        await ModelCatalog({"m": FakeBackend()}).get_classifier("m")


async def test_readiness_and_health_cover_both_tasks() -> None:
    sick = FakeClassifier()
    sick.sickness = PoolingFailedError("the worker has ended")
    catalog = ModelCatalog({"m": FakeBackend()}, {"c": sick}, probe_timeout_s=0.01)
    assert await catalog.health() == {"m": None, "c": sick.sickness}
    assert [each.id for each in await catalog.listed()] == ["m", "c"]
    assert (await catalog.probe("c")).description == sick.description
    sick.loaded = asyncio.Event()
    assert [each.state for each in await catalog.listed()] == ["running", "down"]


class SickClassifier(FakeClassifier):
    async def describe(self) -> PoolerDescription:
        raise ReplicaUnavailableError("gone")


async def test_the_first_cross_encoder_compares_texts_even_if_an_embedder_answers_before_it() -> (
    None
):
    slow = FakeCrossEncoder()
    slow.loaded = asyncio.Event()
    catalog = ModelCatalog({}, {"c": FakeClassifier(), "x": slow}, {"e": FakeEmbedder()}, 5, 600)
    asking = asyncio.ensure_future(catalog.get_comparer(None))
    await settle()
    assert not asking.done()
    slow.loaded.set()
    assert (await asking).description.id == "x"


async def test_a_classifier_that_fails_or_loads_does_not_keep_an_embedder_from_comparing() -> None:
    loading = FakeCrossEncoder()
    loading.loaded = asyncio.Event()
    classifiers = {"c": SickClassifier(), "x": loading}
    catalog = ModelCatalog({}, classifiers, {"e": FakeEmbedder()}, choice_timeout_s=0)
    assert (await catalog.get_comparer(None)).description.id == "e"
    loading.loaded.set()
    await catalog.get_comparer("x")
    catalog = ModelCatalog({}, {"x": FakeCrossEncoder()}, {"e": FakeEmbedder()})
    assert (await catalog.get_comparer(None)).description.id == "x"


async def test_where_only_a_model_that_loads_compares_texts_it_is_waited_for() -> None:
    loading = FakeEmbedder()
    loading.loaded = asyncio.Event()
    catalog = ModelCatalog({}, {"c": SickClassifier()}, {"e": loading}, choice_timeout_s=0)
    asking = asyncio.ensure_future(catalog.get_comparer(None))
    await settle()
    assert not asking.done()
    loading.loaded.set()
    assert (await asking).description.id == "e"


async def test_if_no_model_that_answers_compares_texts_the_failure_says_why() -> None:
    classifiers = {"c": FakeClassifier(), "d": SickClassifier("d")}
    with pytest.raises(ReplicaUnavailableError, match="gone"):
        await ModelCatalog({}, classifiers).get_comparer(None)
    for models in ({}, {"c": FakeClassifier()}):
        with pytest.raises(ModelNotFoundError, match="No model here can compare texts"):
            await ModelCatalog({}, models).get_comparer(None)


def test_a_request_may_have_to_wait_for_a_model_that_loads_or_may_sleep_lightly() -> None:
    generating = {"m": FakeBackend(), "cold": FakeBackend(), "warm": FakeBackend()}
    catalog = ModelCatalog(generating, is_cold=lambda id_: id_ == "cold", light_sleepers=["m"])
    names = ("m", "cold", "warm", None, "unknown")
    assert [catalog.may_wait(name) for name in names] == [True, True, False, True, False]
