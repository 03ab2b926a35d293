"""What every surface is given."""

import asyncio
from dataclasses import dataclass, replace

from deployments.contract import ChatMessage, GenerationRequest, SamplingParams
from serve_app.api.json_schema_grammar import SCHEMA_THREADS
from serve_app.api.message_schema import (
    MessageBody,
    count_images,
    refuse_calls,
    to_messages,
)
from serve_app.api.response_format import to_grammar
from serve_app.api.sampling_schema import SamplingFields
from serve_app.api.tool_offer import NO_TOOLS, ToolOffer
from serve_app.backends import GenerationStream
from serve_app.catalog import ModelCatalog, ServedModel
from serve_app.choices import Choices
from serve_app.clock import Clock
from serve_app.config import LimitsConfig


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The models, the limits and the time."""

    catalog: ModelCatalog
    limits: LimitsConfig
    clock: Clock

    async def to_messages(
        self, bodies: list[MessageBody], model: ServedModel
    ) -> tuple[ChatMessage, ...]:
        """Return the messages for the model's replica; see `message_schema.to_messages`.

        Images are read on a thread: a large one takes long, and the event loop is every stream's.
        """
        if not model.description.accepts_tools:
            refuse_calls(bodies, model.description.id)
        accepts_images = model.description.accepts_images
        if count_images(bodies):
            return await asyncio.to_thread(to_messages, bodies, self.limits, accepts_images)
        return to_messages(bodies, self.limits, accepts_images)

    async def open_stream(
        self,
        model: ServedModel,
        prompt: tuple[ChatMessage, ...] | str,
        fields: SamplingFields,
        request_id: str,
    ) -> GenerationStream:
        """Open a stream of the model.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        sampling = await self._to_sampling(fields, model)
        return await model.backend.generate(GenerationRequest(request_id, prompt, sampling))

    async def open_choices(
        self,
        model: ServedModel,
        prompt: tuple[ChatMessage, ...] | str,
        fields: SamplingFields,
        request_id: str,
        num_choices: int,
        offer: ToolOffer = NO_TOOLS,
    ) -> Choices:
        """Open a stream for each of several answers; the first is that of `open_stream`.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        sampling = await self._to_sampling(fields, model)
        if offer.is_guiding(sampling):
            loop = asyncio.get_running_loop()
            sampling = await loop.run_in_executor(
                SCHEMA_THREADS, offer.guide, sampling, self.limits
            )
        return await Choices.open(
            [
                model.backend.generate(
                    GenerationRequest(
                        request_id, prompt, sampling.of_choice(index), tools=offer.tools
                    )
                )
                for index in range(num_choices)
            ]
        )

    async def _to_sampling(self, fields: SamplingFields, model: ServedModel) -> SamplingParams:
        """Return the parameters for the engine.

        A JSON schema is compiled on a thread; `to_grammar` bounds for how long.

        Raises:
            InvalidRequestError: A field can't be honoured.
        """
        sampling = fields.to_sampling(model.description.default_sampling)
        if fields.response_format is None:
            return sampling
        grammar = await asyncio.get_running_loop().run_in_executor(
            SCHEMA_THREADS, to_grammar, fields.response_format, self.limits
        )
        return replace(sampling, grammar=grammar)
