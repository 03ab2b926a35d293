import asyncio

import pytest
from starlette.datastructures import Headers

from deployments.contract.errors import (
    ForeignOriginError,
    ReplicaUnavailableError,
    UpgradeRequiredError,
)
from serve_app.api.responses.sockets import Sockets
from serve_app.config import LimitsConfig

OWN = {"host": "server:8000"}


def with_room(**limits: object) -> Sockets:
    return Sockets(LimitsConfig.model_validate(limits))


def test_connections_have_a_number_of_places() -> None:
    sockets = with_room(max_sockets=1)
    with sockets.place():
        sockets.require_room(Headers(OWN))
        with sockets.place(), pytest.raises(UpgradeRequiredError, match="max_sockets"):
            sockets.require_room(Headers(OWN))
        sockets.require_room(Headers(OWN))


@pytest.mark.parametrize(
    ("origin", "allowed", "may_connect"),
    [
        (None, (), True),
        ("http://server:8000", (), True),
        ("https://server:8000", (), True),
        ("http://server", (), False),
        ("http://elsewhere.example", (), False),
        ("null", (), False),
        ("http://elsewhere.example", ("http://elsewhere.example",), True),
        ("http://elsewhere.example", ("*",), True),
        ("http://elsewhere.example:1", ("http://elsewhere.example",), False),
    ],
)
def test_a_page_connects_only_from_an_origin_that_may(
    origin: str | None, allowed: tuple[str, ...], may_connect: bool
) -> None:
    sockets = Sockets(LimitsConfig(), allowed)
    headers = Headers(OWN if origin is None else {**OWN, "origin": origin})
    if may_connect:
        sockets.require_room(headers)
    else:
        with pytest.raises(ForeignOriginError):
            sockets.require_room(headers)


async def test_serve_is_asked_only_while_a_connection_is_open() -> None:
    sockets, drained = with_room(), asyncio.Event()
    answers: list[bool | Exception] = [False, RuntimeError("no controller"), True]

    async def is_stopping() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watching = asyncio.ensure_future(sockets.watch(is_stopping, poll_s=0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(answers) == 3
    with sockets.watched(drained.set):
        async with asyncio.timeout(30):
            await watching
    assert drained.is_set()
    with pytest.raises(ReplicaUnavailableError):
        sockets.require_room(Headers(OWN))
