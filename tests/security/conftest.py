import pytest

from tests.serve_app.fakes import FakeBackend


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()
