from collections.abc import Iterator

import pytest

from tests.deployments.replica_context import as_replica


@pytest.fixture(autouse=True, scope="package")
def replica_context() -> Iterator[None]:
    with as_replica("tiny"):
        yield
