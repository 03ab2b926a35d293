"""The backend of a replica in the tests' own process."""

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from deployments.contract.generation import GenerationRequest
from deployments.contract.output import TextDelta
from deployments.generator_replica import GeneratorReplica
from raystream.local_handle import LocalHandle
from serve_app.backends.replicas.handle_backend import HandleBackend

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


def local_backend(replica: object) -> HandleBackend:
    """Return the backend of a replica in this process; its deltas take a real channel."""
    return HandleBackend(cast("DeploymentHandle[Any]", LocalHandle(replica)))


async def read(generator: GeneratorReplica, request: GenerationRequest) -> list[TextDelta]:
    """Return the deltas of an answer, as an ingress gets them."""
    backend = local_backend(generator)
    async with aclosing(backend):
        stream = await backend.send(request)
        async with aclosing(stream):
            return [delta async for deltas in stream for delta in deltas]
