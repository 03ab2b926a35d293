"""The ingress's application on uvicorn, with an instant source of tokens in place of replicas.

`benchmarks.front_door` runs this, and an older commit's file of the same name.

Run: python -m benchmarks.instant_server PORT
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from deployments.contract.descriptions import ModelDescription
from deployments.contract.generation import GenerationRequest
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.reasoning_format import PromptReasoning
from deployments.contract.sampling_params import SamplingParams
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app

NUM_DELTAS = 16
TOKENS_PER_DELTA = 4
"""A replica sends all tokens since its last message together."""

DELTAS = [TextDelta((7,) * TOKENS_PER_DELTA, "some more of it ") for _ in range(NUM_DELTAS - 1)]
LAST = TextDelta((7,) * TOKENS_PER_DELTA, "and the end.", FinishReason.STOP)


class InstantStream:
    """The same answer to every request, with a turn of the event loop before each message."""

    num_prompt_tokens = 20
    reasoning = PromptReasoning.OPEN
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
    """Return the ingress's application with one model, the instant one."""
    config = AppConfig.model_validate({"models": [{"id": "instant", "source": "nowhere"}]})
    return build_app(AppParts(config, {"instant": InstantBackend()}))


def main() -> None:
    """Serve until a signal."""
    app = application()
    # Ray Serve's own settings for its proxy and ingress, as far as they matter for speed.
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", access_log=False, log_level=40
    )


if __name__ == "__main__":
    main()
