import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.contract.telemetry.tracing import _ThinLog
from deployments.replica.own_turn import OwnTurn
from tests.deployments.replica_context import as_replica
from tests.deployments.sleepy import Device
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


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Let replicas that start take turns on a device."""
    made = Device(tmp_path / "turn.lock")
    monkeypatch.setattr(OwnTurn, "of", lambda group: made.turn)
    yield made
    made.close()
