import asyncio

import pytest
from pydantic import ValidationError

from serve_app.backends.models.serving_states import (
    DEPLOY_FAILED,
    MEMORY_S,
    PATIENCE_S,
    DeploymentState,
    ServingState,
    ServingStates,
    reason_in,
)
from serve_app.config import AppConfig
from tests.stopped_clock import Clock, settle

pytestmark = [pytest.mark.in_time, pytest.mark.usefixtures("advance")]

RUNNING, DOWN = ServingState.RUNNING, ServingState.DOWN


class Controller:
    """Says in which state `m` is; counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.state = RUNNING
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.now_s = 0.0
        self.states = ServingStates(self.ask, lambda: self.now_s)

    async def ask(self) -> dict[str, DeploymentState]:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return {"m": DeploymentState(self.state)}

    async def told(self, deployment: str = "m") -> ServingState:
        """Return the state that the ingress takes a deployment to be in."""
        return (await self.states.of(deployment)).serving


@pytest.fixture
def controller() -> Controller:
    return Controller()


async def test_a_state_is_the_controllers_word(controller: Controller) -> None:
    controller.error = ConnectionError("the controller is gone")
    assert await controller.told() is DOWN  # nothing is known
    for state in ServingState:
        controller.error, controller.state = None, state
        controller.now_s += MEMORY_S
        assert await controller.told() is state


async def test_a_deployment_without_news_is_down(controller: Controller) -> None:
    assert await controller.told("n") is DOWN
    assert (await ServingStates().of("n")).serving is RUNNING  # without a controller to ask


async def test_an_answer_is_passed_on_for_a_while(controller: Controller) -> None:
    assert await controller.told() is RUNNING
    controller.state = DOWN
    controller.now_s = MEMORY_S / 2
    assert await controller.told() is RUNNING
    assert controller.num_asked == 1
    controller.now_s = MEMORY_S
    assert await controller.told() is DOWN
    assert controller.num_asked == 2


async def test_concurrent_questions_share_one_answer(controller: Controller) -> None:
    controller.may_answer.clear()
    asking = [asyncio.ensure_future(controller.told()) for _ in range(9)]
    await settle()
    controller.may_answer.set()
    assert set(await asyncio.gather(*asking)) == {RUNNING}
    assert controller.num_asked == 1


@pytest.mark.parametrize("state", [RUNNING, DOWN])
async def test_the_last_answer_stands_while_the_controller_is_silent(
    controller: Controller, advance: Clock, state: ServingState
) -> None:
    controller.state = state
    assert await controller.told() is state
    controller.state = DOWN if state is RUNNING else RUNNING
    controller.may_answer.clear()
    for _ in range(3):
        controller.now_s += MEMORY_S
        asking = asyncio.ensure_future(controller.told())
        await settle()
        assert not asking.done()
        advance(PATIENCE_S)
        assert await asking is state
    assert controller.num_asked == 2  # one question waits; there is no second one beside it
    controller.may_answer.set()


async def test_a_controller_that_fails_changes_nothing(controller: Controller) -> None:
    assert await controller.told() is RUNNING
    controller.error, controller.now_s = ConnectionError("the controller is gone"), MEMORY_S
    assert await controller.told() is RUNNING


def test_a_file_that_pydantic_refuses_is_told_with_the_path() -> None:
    entry = {"id": "m", "source": "s"}
    for models, expected in (
        ([entry | {"max_num_seq": 1}], "models.0: unknown key 'max_num_seq': did you mean"),
        ([entry | {"max_num_seqs": 0}], "models.0.max_num_seqs.constrained-int: Input should be"),
        ([], "models: Tuple should have at least 1 item"),
    ):
        with pytest.raises(ValidationError) as error:
            AppConfig.model_validate({"models": models})
        told = reason_in(f"Deploying app 'a' failed with exception:\n{error.value}\n\n")
        assert expected in told
        assert "\n" not in told


TRACEBACK = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:raystream:chat.initialize_and_get_metadata() (pid=7, ip=127.0.0.1)
RuntimeError: Traceback (most recent call last):
  File "deployments/replica/model_replica.py", line 76, in __init__
    raise error.with_traceback(None) from None
{}
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("ValueError: from one of: \n(1) a file,\n(2) a class.\n\nInstall it", "from one of: (1) a "
         "file, (2) a class. Install it"),
        ("RuntimeError: Error(s) in loading:\n\tsize mismatch for a.\n\tsize mismatch for b.",
         "Error(s) in loading: size mismatch for a. size mismatch for b."),
        ("huggingface_hub.errors.StrictError: Validation of 'a':\n    TypeError: expected int",
         "Validation of 'a': TypeError: expected int"),
        ("KeyError: 'su'", "KeyError: 'su'"),
    ],
)  # fmt: skip
def test_the_whole_error_is_told_and_its_class_where_it_is_no_sentence(
    error: str, reason: str
) -> None:
    assert reason_in(TRACEBACK.format(error)) == reason


def test_a_message_without_a_traceback_is_told_as_a_whole() -> None:
    assert reason_in("Failed to update\nthe deployments.") == "Failed to update the deployments."
    refused = "Deploying app 'a' failed with exception:\nm: can't load 'x'"
    assert reason_in(refused) == "m: can't load 'x'"
    assert reason_in("") == "Serve does not say why"


def test_a_failure_is_the_error_at_the_end_of_serves_traceback() -> None:
    message = TRACEBACK.format("a.b.SomeError: can't load 'x': it is gone")
    failed = DeploymentState(ServingState.FAILED, "UNHEALTHY", message)
    still_serving = DeploymentState(RUNNING, DEPLOY_FAILED, message)
    assert failed.failure == still_serving.failure == "can't load 'x': it is gone"
    assert DeploymentState(ServingState.FAILED).failure == "Serve does not say why"
    assert DeploymentState(DOWN, "UNHEALTHY", message).failure is None
