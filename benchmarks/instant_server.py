"""The ingress's application on uvicorn, with an instant source of tokens in place of replicas.

`benchmarks.front_door` starts this file by its path, once with this checkout's packages and once
with an older one's: it may only use what both have.

Run: python benchmarks/instant_server.py PORT
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import NoReturn

import uvicorn

from deployments.contract import (
    FinishReason,
    GenerationRequest,
    ModelDescription,
    SamplingParams,
    TextDelta,
)
from serve_app.config import AppConfig
from serve_app.ingress import build_app

NUM_DELTAS = 16
TOKENS_PER_DELTA = 4
"""A replica sends what it has gathered since its last message."""

DELTAS = [TextDelta((7,) * TOKENS_PER_DELTA, "some more of it ") for _ in range(NUM_DELTAS - 1)]
LAST = TextDelta((7,) * TOKENS_PER_DELTA, "and the end.", FinishReason.STOP)


class InstantStream:
    """The same answer to everything, with a turn of the event loop before each message."""

    num_prompt_tokens = 20

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Yield a message's deltas."""
        for delta in (*DELTAS, LAST):
            await asyncio.sleep(0)
            yield [delta]

    async def aclose(self) -> None:
        """Hold nothing."""


class InstantBackend:
    """A model that has its answer already."""

    async def generate(self, request: GenerationRequest) -> InstantStream:
        """Open the answer."""
        return InstantStream()

    async def describe(self) -> ModelDescription:
        """Tell what a model of this kind tells."""
        return ModelDescription(
            id="instant",
            created=0,
            max_model_len=4096,
            accepts_images=False,
            default_sampling=SamplingParams(),
        )

    async def tokenize(self, request: object) -> NoReturn:
        """Stand for what is not measured."""
        raise NotImplementedError

    async def detokenize(self, token_ids: tuple[int, ...]) -> NoReturn:
        """Stand for what is not measured."""
        raise NotImplementedError

    async def ping(self) -> None:
        """Be well."""


def main() -> None:
    """Serve until a signal."""
    config = AppConfig.model_validate({"models": [{"id": "instant", "source": "nowhere"}]})
    app = build_app(config, {"instant": InstantBackend()})
    # The settings of Ray Serve's own proxy and ingress, where it matters for speed.
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", access_log=False, log_level=40
    )


if __name__ == "__main__":
    main()
