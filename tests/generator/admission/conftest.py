from collections.abc import Iterator

import pytest

from tests.generator.admission.fake_replica import MADE


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """End what is left in the replicas of a test; nothing may be counted afterwards."""
    yield
    while MADE:
        MADE.pop().end_all()
