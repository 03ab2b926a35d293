"""The ingress's application on uvicorn, with an instant source of tokens in place of replicas.

`benchmarks.front_door` runs this, and an older commit's file of the same name.

Run: python -m benchmarks.instant_server PORT [FOLDER_OF_JOBS]
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from deployments.contract.descriptions import ModelDescription
from deployments.contract.generation import Accepted, GenerationRequest, Request
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app

NUM_DELTAS = 16
TOKENS_PER_DELTA = 4
"""A replica sends all tokens since its last message together."""

DELTAS = [TextDelta((7,) * TOKENS_PER_DELTA, "some more of it ") for _ in range(NUM_DELTAS - 1)]
LAST = TextDelta((7,) * TOKENS_PER_DELTA, "and the end.", FinishReason.STOP)


DESCRIPTION = ModelDescription(
    id="instant",
    created=0,
    max_model_len=4096,
    accepts_images=False,
    default_sampling=SamplingParams(),
)


class InstantStream:
    """The same answer to every request, with a turn of the event loop before each message."""

    accepted = Accepted(20)

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Yield the deltas of each message."""
        for delta in (*DELTAS, LAST):
            await asyncio.sleep(0)
            yield [delta]

    async def aclose(self) -> None:
        """Release nothing: the stream holds no resources."""


class InstantBackend:
    """A model with a fixed answer."""

    async def send(self, request: Request[Any]) -> Any:
        """Return the answer's stream, or the model's description; nothing else is measured."""
        return InstantStream() if isinstance(request, GenerationRequest) else DESCRIPTION


def application(jobs: str | None = None) -> FastAPI:
    """Return the ingress's application with one model, the instant one.

    Args:
        jobs: The folder of files and batches; None keeps none.
    """
    models = [{"id": "instant", "source": "nowhere"}]
    config = AppConfig.model_validate({"models": models, "jobs": {"folder": jobs}})
    return build_app(AppParts(config, {"instant": InstantBackend()}))


def main() -> None:
    """Serve until a signal."""
    app = application(*sys.argv[2:])
    # Ray Serve's own settings for its proxy and ingress, as far as they matter for speed.
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", access_log=False, log_level=40
    )


if __name__ == "__main__":
    main()
