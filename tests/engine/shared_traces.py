"""Traces that engines of a test module share."""

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.model import runner
from deployments.engine.model.forward import Forward
from deployments.engine.model.traced_forward import trace


@pytest.fixture(scope="module")
def shared_traces() -> Iterator[None]:
    """Trace each model once, since tracing takes longer than most tests.

    Engines of a module that run the same model run the same trace.
    """
    forwards = dict[PreTrainedModel, Forward]()

    def trace_once(model: PreTrainedModel, kv: KVCache, *, has_kernels: bool) -> Forward:
        if model not in forwards:
            forwards[model] = trace(model, kv, has_kernels=has_kernels)
        return forwards[model]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "trace", trace_once)
        yield
