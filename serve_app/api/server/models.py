"""`GET /v1/models` and `GET /v1/models/{id}`: the configured models, with their states."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.contract.descriptions import Engine, ModelDescription, PoolerDescription, Task
from serve_app.api.requests.context import ApiContext
from serve_app.backends.models.catalog import ListedModel
from serve_app.backends.models.serving_states import ServingState

logger = logging.getLogger("ray.serve.raystream.models")
"""Below Serve's logger, which writes it to the replica's file and to the terminal."""


class Footprint(BaseModel):
    """What a replica holds of a model, and where."""

    model_config = ConfigDict(from_attributes=True)

    num_parameters: int = Field(description="All weights; tied ones count once.")
    weight_bytes: int = Field(description="The weights in memory.")
    dtype: str = Field(description="The weights' type, or int8 or int4 if they are quantized.")
    device: str


class DefaultSampling(BaseModel):
    """The values for parameters that a request does not set."""

    model_config = ConfigDict(from_attributes=True)

    temperature: float
    top_p: float
    top_k: int = Field(description="0 keeps all tokens.")
    min_p: float
    repetition_penalty: float
    max_tokens: int | None = Field(
        description="Of a chat's answer; null means as many as the model's length leaves."
    )


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(
        description="When the model was loaded, in Unix seconds; 0 while that is not known."
    )
    owned_by: Literal["raystream"] = "raystream"
    root: str = Field(
        description="The hub repository of the model's files, whose tokenizer clients may load. "
        "The id, if the files lie in a folder, and until the model has been loaded or described."
    )
    parent: str | None = Field(
        default=None, description="The model that it is an adapter of; null if it is none."
    )
    task: Task
    state: ServingState = Field(
        description="`running`: a replica answers. `asleep`: nobody uses the model, and a request "
        "wakes it: no replica runs, or all sleep lightly. `scaling`: the first replica starts "
        "because of a request, or the last one stops. `down`: the model loads, or has lost its "
        "replicas. `failed`: no replica starts before another deploy. Only a request to a failed "
        "model is refused; others wait."
    )
    pinned: bool = Field(
        default=False, description="Whether an operator keeps a replica running, used or not."
    )
    failure: str | None = Field(default=None, description="Why the model has failed.")
    max_model_len: int | None = Field(
        description="Most tokens of prompt and answer together; unless the model generates, of one "
        "text. null, here and in the next two, until the model has been loaded or described."
    )
    accepts_images: bool | None
    has_chat_template: bool | None = Field(
        description="Whether it answers messages; a base model only continues texts."
    )
    labels: list[str] | None = Field(
        default=None, description="A classifier's labels; null for other models."
    )
    default_sampling: DefaultSampling | None = Field(
        default=None, description="null unless the model generates, and is known to."
    )
    engine: Engine | None = Field(
        default=None, description="What runs it; null until it has been loaded or described."
    )
    exact: bool | None = Field(
        default=None,
        description="With vLLM: whether a text's tokens don't depend on the texts beside it "
        "(`exact: true` in the model's entry). Without it a stream that moves to another replica "
        "loses and doubles no token either, but its rest may differ from what it would have been. "
        "null for raystream's own engine, and unless the model generates.",
    )
    footprint: Footprint | None = Field(
        default=None, description="null until a replica has loaded the model."
    )


class ModelList(BaseModel):
    """The models of the configuration."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ModelsApi:
    """Lists the models."""

    def __init__(self, context: ApiContext) -> None:
        self._catalog = context.catalog
        self._devices = context.devices

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["models"])
        router.add_api_route(
            "/v1/models",
            self.list_models,
            summary="List the models",
        )
        router.add_api_route(
            "/v1/models/{model_id:path}",
            self.retrieve,
            summary="Show a model",
        )
        return router

    async def list_models(self) -> ModelList:
        """List the models of the configuration, each with its state; wait for none that loads."""
        models, light_sleepers = await asyncio.gather(
            self._catalog.listed(), self._devices.light_sleepers()
        )
        return ModelList(data=list(_cards(models, light_sleepers)))

    async def retrieve(self, model_id: str) -> ModelCard:
        """Show one model. A 503 says why it can't be served."""
        if not model_id.strip("/"):
            raise HTTPException(404)  # /v1/models/ is a slip for /v1/models
        model = await self._catalog.require(model_id)
        return _card(model, await self._devices.light_sleepers())


def _cards(models: Sequence[ListedModel], light_sleepers: Collection[str]) -> Iterator[ModelCard]:
    """Yield each model's card; one that can't be made leaves the others in the list."""
    for model in models:
        try:
            yield _card(model, light_sleepers)
        except ValidationError as error:
            logger.error("%s is left out of /v1/models: %r", model.id, error.errors())


def _card(model: ListedModel, light_sleepers: Collection[str]) -> ModelCard:
    sleeps_lightly = model.state is ServingState.RUNNING and model.id in light_sleepers
    found = None if model.served is None else model.served.description
    generator = found if isinstance(found, ModelDescription) else None
    return ModelCard(
        id=model.id,
        created=0 if found is None else found.created,
        root=model.id if found is None else found.root or model.id,
        parent=None if generator is None else generator.parent,
        task=model.task,
        state=ServingState.ASLEEP if sleeps_lightly else model.state,
        pinned=model.is_pinned,
        failure=model.failure,
        max_model_len=None if found is None else found.max_model_len,
        accepts_images=None
        if found is None
        else generator is not None and generator.accepts_images,
        has_chat_template=None
        if found is None
        else generator is not None and generator.has_chat_template,
        labels=list(found.labels) or None if isinstance(found, PoolerDescription) else None,
        default_sampling=None if generator is None else _default_sampling(generator),
        engine=None if found is None else found.engine,
        exact=None if generator is None else generator.is_exact,
        footprint=None
        if found is None or found.footprint is None
        else Footprint.model_validate(found.footprint),
    )


def _default_sampling(found: ModelDescription) -> DefaultSampling:
    default = found.default_sampling
    return DefaultSampling(
        temperature=default.temperature,
        top_p=default.top_p,
        top_k=default.top_k,
        min_p=default.min_p,
        repetition_penalty=default.repetition_penalty,
        max_tokens=found.default_max_tokens,
    )
