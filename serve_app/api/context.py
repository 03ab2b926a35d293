"""What every surface is given."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.contract import ChatMessage, GenerationRequest
from serve_app.api.answer_stream import AnswerHead
from serve_app.api.message_schema import MessageBody, count_images, to_messages
from serve_app.api.sampling_schema import SamplingFields
from serve_app.backends import GenerationStream
from serve_app.catalog import ModelCatalog, ServedModel
from serve_app.choices import Choices
from serve_app.clock import Clock
from serve_app.config import LimitsConfig

Prompt = tuple[ChatMessage, ...] | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The models, the limits and the time."""

    catalog: ModelCatalog
    limits: LimitsConfig
    clock: Clock

    async def find_model(self, model_id: str | None) -> ServedModel:
        """Return the model of this name; the first model if there is no name.

        Raises:
            ModelNotFoundError: No model has this name.
            RaystreamError: The model can't be reached.
        """
        return await self.catalog.get(self.catalog.default_id if model_id is None else model_id)

    def answer_head(self, answer_id: str, asked_for: str, model: ServedModel) -> AnswerHead:
        """Return the head of an answer that begins now."""
        created = int(self.clock.unix_s())
        return AnswerHead(answer_id, created, asked_for, model.description.system_fingerprint)

    async def to_messages(
        self, bodies: list[MessageBody], model: ServedModel
    ) -> tuple[ChatMessage, ...]:
        """Return the messages for the model's replica; see `message_schema.to_messages`.

        Images are read on a thread: a large one takes long, and the event loop is every stream's.
        """
        accepts_images = model.description.accepts_images
        if count_images(bodies):
            return await asyncio.to_thread(to_messages, bodies, self.limits, accepts_images)
        return to_messages(bodies, self.limits, accepts_images)

    async def open_stream(
        self,
        model: ServedModel,
        prompt: Prompt,
        fields: SamplingFields,
        request_id: str,
    ) -> GenerationStream:
        """Open a stream of the model.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        sampling = fields.to_sampling(model.description.default_sampling)
        return await model.backend.generate(GenerationRequest(request_id, prompt, sampling))

    async def open_choices(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        fields: SamplingFields,
        request_id: str,
        num_per_prompt: int,
    ) -> Choices:
        """Open a stream for each of several answers to each prompt.

        The first answer to each is that of `open_stream`.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        sampling = fields.to_sampling(model.description.default_sampling)
        requests = [
            GenerationRequest(
                request_id,
                prompt,
                sampling.of_choice(index),
                default_max_tokens=fields.default_max_tokens,
            )
            for prompt in prompts
            for index in range(num_per_prompt)
        ]
        return await Choices.open(list(map(model.backend.generate, requests)), len(prompts))
