import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Let a full collection pass over what other tests have loaded: it takes half a second."""
    gc.freeze()
    yield
    gc.unfreeze()
