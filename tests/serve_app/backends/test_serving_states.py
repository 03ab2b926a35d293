import asyncio

import pytest

from serve_app.backends import serving_states
from serve_app.backends.serving_states import (
    MEMORY_S,
    DeploymentState,
    ServingState,
    ServingStates,
)
from tests.stopped_clock import settle


class Controller:
    """Says which deployments are down; counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.down: set[str] = set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.now_s = 0.0

    async def ask(self) -> dict[str, DeploymentState]:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return dict.fromkeys(self.down, DeploymentState(ServingState.DOWN))

    def of(self, *needed: str) -> ServingStates:
        return ServingStates(self.ask, needed, lambda: self.now_s)


@pytest.fixture
def controller() -> Controller:
    return Controller()


async def test_a_model_without_a_replica_is_not_ready(controller: Controller) -> None:
    assert await controller.of("m", "n").are_ready()
    controller.down = {"n", "other"}
    assert await controller.of("m").are_ready()
    assert not await controller.of("m", "n").are_ready()


async def test_an_answer_is_passed_on_for_a_while(controller: Controller) -> None:
    ready = controller.of("m")
    assert await ready.are_ready()
    controller.down = {"m"}
    controller.now_s = MEMORY_S / 2
    assert await ready.are_ready()
    assert controller.num_asked == 1
    controller.now_s = MEMORY_S
    assert not await ready.are_ready()
    assert controller.num_asked == 2


async def test_concurrent_questions_share_one_answer(controller: Controller) -> None:
    ready = controller.of("m")
    controller.may_answer.clear()
    asking = [asyncio.ensure_future(ready.are_ready()) for _ in range(9)]
    await settle()
    controller.may_answer.set()
    assert all(await asyncio.gather(*asking))
    assert controller.num_asked == 1


@pytest.mark.parametrize("is_ready", [False, True])
async def test_the_last_answer_stands_while_the_controller_is_silent(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    monkeypatch.setattr(serving_states, "PATIENCE_S", 0.01)
    controller.down = set() if is_ready else {"m"}
    ready = controller.of("m")
    assert await ready.are_ready() == is_ready
    controller.down ^= {"m"}
    controller.may_answer.clear()
    for _ in range(3):
        controller.now_s += MEMORY_S
        assert await ready.are_ready() == is_ready
    assert controller.num_asked == 2  # one question waits; there is no second one beside it
    controller.may_answer.set()


async def test_a_controller_that_fails_changes_nothing(controller: Controller) -> None:
    ready = controller.of("m")
    controller.error = ConnectionError("the controller is gone")
    assert not await ready.are_ready()
    controller.error, controller.now_s = None, MEMORY_S
    assert await ready.are_ready()
    controller.error, controller.now_s = ConnectionError("gone again"), 2 * MEMORY_S
    assert await ready.are_ready()


async def test_a_state_is_the_controllers_word(controller: Controller) -> None:
    states = controller.of("m")
    controller.error = ConnectionError("the controller is gone")
    assert await states.of("m") is ServingState.DOWN  # nothing is known
    controller.error, controller.now_s, controller.down = None, MEMORY_S, {"m"}
    assert await states.of("m") is ServingState.DOWN
    assert await states.of("n") is ServingState.RUNNING
