"""LoRA adapters as models: each has an id of its own, and its model's replicas.

A request for one is a request for its model that names the adapter. So cold start, failover,
admission and time limits are those of the model.
"""

from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from deployments.contract.descriptions import ModelDescription
from deployments.contract.generation import GenerationRequest, Request
from deployments.contract.model_spec import ModelConfig
from serve_app.backends.replicas.backend import AnswerT, Backend, DescribeRequest


class AdapterBackend:
    """A model with one of its adapters; see `Backend`."""

    def __init__(self, model: Backend, id_: str, parent: str) -> None:
        """Wrap a model.

        Args:
            model: The model.
            id_: The adapter's id.
            parent: The model's id.
        """
        self._model = model
        self._id = id_
        self._parent = parent

    def send(self, request: Request[AnswerT]) -> Coroutine[Any, Any, AnswerT]:
        """Ask the model; see `Backend.send`."""
        return self._answer(request)

    async def _answer(self, request: Any) -> Any:
        if isinstance(request, GenerationRequest):
            request = replace(request, adapter=self._id)
        answer = await self._model.send(request)
        if isinstance(request, DescribeRequest):
            assert isinstance(answer, ModelDescription), "only generators have adapters"
            return replace(answer, id=self._id, root=self._id, parent=self._parent)
        return answer


def with_adapters(
    generators: Mapping[str, Backend], models: Iterable[ModelConfig]
) -> dict[str, Backend]:
    """Return the models that generate, with their adapters behind them, by id."""
    adapters = {
        adapter.id: AdapterBackend(generators[model.id], adapter.id, model.id)
        for model in models
        for adapter in model.adapters
    }
    return {**generators, **adapters}
