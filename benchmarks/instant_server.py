"""The ingress's application on uvicorn, with an instant source of tokens in place of replicas.

`benchmarks.front_door` starts this file by its path, once with this checkout's packages and once
with an older one's. So it may only use what both have.

Run: python benchmarks/instant_server.py PORT
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI

from deployments.contract.descriptions import ModelDescription
from deployments.contract.generation import GenerationRequest
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from serve_app import ingress
from serve_app.config import AppConfig

NUM_DELTAS = 16
TOKENS_PER_DELTA = 4
"""A replica sends all tokens since its last message together."""

DELTAS = [TextDelta((7,) * TOKENS_PER_DELTA, "some more of it ") for _ in range(NUM_DELTAS - 1)]
LAST = TextDelta((7,) * TOKENS_PER_DELTA, "and the end.", FinishReason.STOP)


class InstantStream:
    """The same answer to every request, with a turn of the event loop before each message."""

    num_prompt_tokens = 20
    reasoning = "open"  # no enum: an older commit does not know it
    fingerprint = None
    prompt_digest = b""

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Yield the deltas of each message."""
        for delta in (*DELTAS, LAST):
            await asyncio.sleep(0)
            yield [delta]

    def watch(self, on_due: Callable[[], object]) -> None:
        """Never call it: the stream need not leave."""

    async def aclose(self) -> None:
        """Release nothing: the stream holds no resources."""


class InstantBackend:
    """A model with a fixed answer."""

    async def generate(self, request: GenerationRequest) -> InstantStream:
        """Return the answer's stream."""
        return InstantStream()

    async def describe(self) -> ModelDescription:
        """Describe the fake model."""
        return ModelDescription(
            id="instant",
            created=0,
            max_model_len=4096,
            accepts_images=False,
            default_sampling=SamplingParams(),
        )

    async def tokenize(self, request: object) -> NoReturn:
        """Fail: this call is not measured."""
        raise NotImplementedError

    async def detokenize(self, token_ids: tuple[int, ...]) -> NoReturn:
        """Fail: this call is not measured."""
        raise NotImplementedError

    async def ping(self) -> None:
        """Report good health."""


def application() -> FastAPI:
    """Return the application of this checkout, or of an older one without `AppParts`."""
    config = AppConfig.model_validate({"models": [{"id": "instant", "source": "nowhere"}]})
    backends = {"instant": InstantBackend()}
    build_app: Any = ingress.build_app
    parts: Any = getattr(ingress, "AppParts", None)
    app: FastAPI = (
        build_app(config, backends) if parts is None else build_app(parts(config, backends))
    )
    return app


def main() -> None:
    """Serve until a signal."""
    app = application()
    # Ray Serve's own settings for its proxy and ingress, as far as they matter for speed.
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", access_log=False, log_level=40
    )


if __name__ == "__main__":
    main()
