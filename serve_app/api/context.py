"""What every surface is given."""

import asyncio
from dataclasses import dataclass

from deployments.contract import ChatMessage, GenerationRequest
from serve_app.access_log import current_record
from serve_app.api.message_schema import MessageBody, count_images, image_urls, to_messages
from serve_app.api.request_limits import (
    check_messages,
    check_num_choices,
    check_prompt,
    check_stops,
)
from serve_app.api.sampling_schema import SamplingFields
from serve_app.backends import GenerationStream
from serve_app.catalog import ModelCatalog, ServedModel
from serve_app.choices import Choices
from serve_app.clock import Clock
from serve_app.config import LimitsConfig
from serve_app.image_fetcher import ImageSource


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The models, the limits, the time and where images come from."""

    catalog: ModelCatalog
    limits: LimitsConfig
    clock: Clock
    images: ImageSource | None = None

    async def to_messages(
        self, bodies: list[MessageBody], model: ServedModel
    ) -> tuple[ChatMessage, ...]:
        """Return the messages for the model's replica; see `message_schema.to_messages`.

        Images at https: URLs are fetched first, if their hosts are allowed.

        Images are read on a thread: a large one takes long, and the event loop is every stream's.
        """
        check_messages(bodies, self.limits)
        accepts_images = model.description.accepts_images
        if count_images(bodies):
            fetched = await self._fetch(bodies) if accepts_images else {}
            return await asyncio.to_thread(
                to_messages, bodies, self.limits, accepts_images, fetched
            )
        return to_messages(bodies, self.limits, accepts_images)

    async def _fetch(self, bodies: list[MessageBody]) -> dict[str, bytes]:
        urls = image_urls(bodies, self.limits)
        return {} if self.images is None else await self.images.fetch_all(urls)

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
        check_prompt(prompt, self.limits)
        sampling = fields.to_sampling(model.description.default_sampling)
        check_stops(sampling.stop, self.limits)
        stream = await model.backend.generate(GenerationRequest(request_id, prompt, sampling))
        _record(model, stream.num_prompt_tokens)
        return stream

    async def open_choices(
        self,
        model: ServedModel,
        prompt: tuple[ChatMessage, ...] | str,
        fields: SamplingFields,
        request_id: str,
        num_choices: int,
    ) -> Choices:
        """Open a stream for each of several answers; the first is that of `open_stream`.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        check_prompt(prompt, self.limits)
        check_num_choices(num_choices, self.limits)
        sampling = fields.to_sampling(model.description.default_sampling)
        check_stops(sampling.stop, self.limits)
        choices = await Choices.of(
            model.backend,
            [
                GenerationRequest(request_id, prompt, sampling.of_choice(index))
                for index in range(num_choices)
            ],
        )
        _record(model, choices.num_prompt_tokens)
        return choices


def _record(model: ServedModel, num_prompt_tokens: int) -> None:
    record = current_record()
    if record is not None:
        record.opened(model.description.id, num_prompt_tokens)
