import pickle
from collections.abc import Iterator

from deployments.compute.attention_arguments import UnsupportedAttentionError
from deployments.contract.errors import RaystreamError
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.engine_thread import EngineDeadError
from deployments.engine.limits import InvalidSequenceError, SequenceTooLongError
from deployments.engine.scheduling.sequence import IllegalTransitionError
from deployments.plan.memory_budget import DeviceMemoryError, ModelTooLargeError
from tests.offenders import for_each


def tree(root: type[RaystreamError]) -> Iterator[type[RaystreamError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


# Leave out classes that tests define.
ERRORS = [
    error for error in tree(RaystreamError) if error.__module__ == "deployments.contract.errors"
]


@for_each(*((param, error_class) for param in (None, "messages") for error_class in ERRORS))
def test_an_error_pickles(param: str | None, error_class: type[RaystreamError]) -> None:
    error = pickle.loads(pickle.dumps(error_class("what to do", param)))
    assert type(error) is error_class
    assert (error.message, error.param, str(error)) == ("what to do", param, "what to do")


@for_each(
    DeviceMemoryError,
    EngineDeadError,
    IllegalTransitionError,
    InvalidSequenceError,
    ModelTooLargeError,
    SequenceTooLongError,
    UnsupportedAttentionError,
    UnsupportedModelError,
)
def test_an_error_of_the_engine_pickles(error_class: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(error_class("what to do")))
    assert type(error) is error_class
    assert str(error) == "what to do"


@for_each(*ERRORS)
def test_each_error_has_a_status_a_type_and_a_code(error_class: type[RaystreamError]) -> None:
    assert 400 <= error_class.status < 600
    # These are client errors too, but OpenAI's API has other types for them.
    is_clients = error_class.status < 500 and error_class.status not in (403, 429)
    assert (error_class.type == "invalid_request_error") is is_clients
    assert error_class.code


def test_codes_are_unique() -> None:
    codes = [error_class.code for error_class in ERRORS]
    assert len(set(codes)) == len(codes)


@for_each(*ERRORS)
def test_an_error_pickles_with_its_retry_time(error_class: type[RaystreamError]) -> None:
    error = pickle.loads(pickle.dumps(error_class("later", None, 7)))
    assert (error.message, error.param, error.retry_after_s) == ("later", None, 7)
