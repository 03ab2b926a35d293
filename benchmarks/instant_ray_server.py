"""The ingress on Ray Serve, with an instant source of tokens behind a handle in place of a model.

`benchmarks.front_door --ray` runs this, and an older commit's file of the same name.

Run: python -m benchmarks.instant_ray_server PORT
"""

import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from benchmarks.instant_server import DESCRIPTION, InstantStream
from deployments.channel.server import ChannelServer
from deployments.contract.descriptions import ModelDescription
from deployments.contract.generation import GenerationRequest
from serve_app.config import AppConfig
from serve_app.ingress_replica import Ingress


class InstantReplica:
    """A replica with a fixed answer."""

    def __init__(self) -> None:
        self._channels = ChannelServer("127.0.0.1")

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[Any]]:
        """Accept at once, and stream the answer."""
        address = await self._channels.address()
        assert request.stream is not None
        with self._channels.stream(request.stream) as stream:
            yield [replace(InstantStream.accepted, channel=address)]
            async for deltas in InstantStream():
                for delta in deltas:
                    stream.put(delta)
                self._channels.flush()
            await stream.wait_until_ended()

    async def describe(self) -> ModelDescription:
        """Describe the fake model."""
        return DESCRIPTION

    async def ping(self) -> None:
        """Report good health."""


def main() -> None:
    """Serve until a signal."""
    config = AppConfig.model_validate({"models": [{"id": "instant", "source": "nowhere"}]})
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=int(sys.argv[1])))
    source = serve.deployment(
        name="instant", max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.2}
    )(InstantReplica).bind()
    ingress = serve.deployment(
        name="Ingress", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.2}
    )(Ingress).bind(config, {"instant": source})
    serve.run(ingress, name="door")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
