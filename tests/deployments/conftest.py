import logging
from collections.abc import Iterator

import pytest

from deployments.contract.telemetry.tracing import _ThinLog
from tests.deployments.replica_context import as_replica
from tests.otlp_receiver import Receiver, receiving


@pytest.fixture(autouse=True, scope="package")
def replica_context() -> Iterator[None]:
    with as_replica("tiny"):
        yield


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def thin_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Let the next line of the SDK pass, whatever it has logged before."""
    sdk = logging.getLogger("opentelemetry")
    for handler in [each for each in sdk.handlers if isinstance(each, _ThinLog)]:
        sdk.removeHandler(handler)
    caplog.set_level(logging.DEBUG)
    return caplog
