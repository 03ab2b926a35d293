"""A fake backend's `send`, which calls a method of the fake for each kind of request."""

from typing import Any

from deployments.contract.generation import GenerationRequest, Request, TokenizeRequest
from deployments.contract.pooling import PoolingRequest
from serve_app.backends.replicas.backend import DescribeRequest, DetokenizeRequest, PingRequest

METHODS = {
    GenerationRequest: "generate",
    PoolingRequest: "pool",
    TokenizeRequest: "tokenize",
    DescribeRequest: "describe",
    PingRequest: "ping",
}


class ByMethod:
    async def send(self, request: Request[Any]) -> Any:
        fake: Any = self
        match request:
            case DetokenizeRequest():
                return await fake.detokenize(request.token_ids)
            case DescribeRequest() | PingRequest():
                return await getattr(fake, METHODS[type(request)])()
        return await getattr(fake, METHODS[type(request)])(request)
