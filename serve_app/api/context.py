"""What every surface is given."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from deployments.contract import (
    ChatMessage,
    Classification,
    ClassificationRequest,
    GenerationRequest,
    SamplingParams,
)
from deployments.work_line import WorkLine
from serve_app.access_log import current_record
from serve_app.api.answer_stream import AnswerHead
from serve_app.api.json_schema_grammar import schema_line
from serve_app.api.message_schema import (
    MessageBody,
    count_images,
    image_urls,
    refuse_calls,
    to_messages,
)
from serve_app.api.request_limits import (
    Prompt,
    check_messages,
    check_num_choices,
    check_prompts,
    check_stops,
)
from serve_app.api.response_format import to_grammar
from serve_app.api.sampling_schema import SamplingFields
from serve_app.api.tool_offer import NO_TOOLS, ToolOffer
from serve_app.backends import GenerationStream
from serve_app.catalog import ModelCatalog, ServedClassifier, ServedModel
from serve_app.choices import Choices
from serve_app.clock import Clock
from serve_app.config import LimitsConfig
from serve_app.deadlines import arrival_s, first_deadline
from serve_app.image_fetcher import ImageSource

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The models, the limits, the time, where images come from and where schemas are compiled."""

    catalog: ModelCatalog
    limits: LimitsConfig
    clock: Clock
    images: ImageSource | None = None
    schemas: WorkLine = field(default_factory=schema_line)

    async def find_model(self, model_id: str | None) -> ServedModel:
        """Return the model of this name that generates; the first one if there is no name.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model classifies.
            RaystreamError: The model can't be reached.
        """
        model = await self.catalog.get(model_id)
        _record_model(model.description.id)
        return model

    async def find_classifier(self, model_id: str | None) -> ServedClassifier:
        """Return the model of this name that classifies; the first one if there is no name.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model generates.
            RaystreamError: The model can't be reached.
        """
        model = await self.catalog.get_classifier(model_id)
        _record_model(model.description.id)
        return model

    async def classify(
        self, model: ServedClassifier, request: ClassificationRequest
    ) -> tuple[Classification, ...]:
        """Return what the model says of each text.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        classifications = await model.backend.classify(request)
        _record(sum(each.num_tokens for each in classifications))
        return classifications

    def answer_head(self, answer_id: str, asked_for: str, model: ServedModel) -> AnswerHead:
        """Return the head of an answer that begins now."""
        created = int(self.clock.unix_s())
        return AnswerHead(answer_id, created, asked_for, model.description.system_fingerprint)

    async def to_messages(
        self, bodies: list[MessageBody], model: ServedModel
    ) -> tuple[ChatMessage, ...]:
        """Return the messages for the model's replica; see `message_schema.to_messages`.

        Images at https: URLs are fetched first, if their hosts are allowed.

        Images are read on a thread: a large one takes long, and the event loop is every stream's.
        """
        check_messages(bodies, self.limits)
        if not model.description.accepts_tools:
            refuse_calls(bodies, model.description.id)
        accepts_images = model.description.accepts_images
        if count_images(bodies):
            fetched = await self._fetch(bodies) if accepts_images else {}
            return await self._in_time(
                asyncio.to_thread(to_messages, bodies, self.limits, accepts_images, fetched)
            )
        return to_messages(bodies, self.limits, accepts_images)

    async def _fetch(self, bodies: list[MessageBody]) -> dict[str, bytes]:
        urls = image_urls(bodies, self.limits)
        if self.images is None:
            return {}
        return await self._in_time(self.images.fetch_all(urls))

    async def _in_time(self, work: Awaitable[T]) -> T:
        """Wait for what a request needs before a replica sees it.

        Raises:
            DeadlineExceededError: The request has no first token by then.
        """
        return await first_deadline(self.limits, arrival_s()).hold(work)

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
        check_prompts([prompt], self.limits)
        sampling = await self._to_sampling(fields, model)
        stream = await model.backend.generate(GenerationRequest(request_id, prompt, sampling))
        _record(stream.num_prompt_tokens)
        return stream

    async def open_choices(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        fields: SamplingFields,
        request_id: str,
        num_per_prompt: int,
        offer: ToolOffer = NO_TOOLS,
    ) -> Choices:
        """Open a stream for each of several answers to each prompt.

        The first answer to each is that of `open_stream`.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        check_prompts(prompts, self.limits)
        check_num_choices(num_per_prompt, self.limits)
        sampling = await self._to_sampling(fields, model, offer)
        requests = [
            GenerationRequest(
                request_id,
                prompt,
                sampling.of_choice(index),
                tools=offer.tools,
                default_max_tokens=fields.default_max_tokens,
            )
            for prompt in prompts
            for index in range(num_per_prompt)
        ]
        choices = await Choices.of(model.backend, requests, len(prompts))
        _record(choices.num_prompt_tokens)
        return choices

    async def _to_sampling(
        self, fields: SamplingFields, model: ServedModel, offer: ToolOffer = NO_TOOLS
    ) -> SamplingParams:
        """Return the parameters for the engine.

        JSON schemas, of the text and of calls, are compiled on a thread; limits bound for how long.

        Raises:
            InvalidRequestError: A field can't be honoured.
            OverloadedError: Too many schemas wait to be compiled.
        """
        sampling = fields.to_sampling(model.description.default_sampling)
        check_stops(sampling.stop, self.limits)
        if fields.response_format is not None:
            grammar = await self._in_time(
                self.schemas.run(to_grammar, fields.response_format, self.limits)
            )
            sampling = replace(sampling, grammar=grammar)
        if offer.is_guiding(sampling):
            return await self._in_time(self.schemas.run(offer.guide, sampling, self.limits))
        return sampling


def _record_model(model_id: str) -> None:
    record = current_record()
    if record is not None:
        record.model = model_id


def _record(num_prompt_tokens: int) -> None:
    record = current_record()
    if record is not None:
        record.opened(num_prompt_tokens)
