"""`POST /v1/embeddings`: turns texts into vectors, in OpenAI's shape."""

import asyncio
import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from deployments.contract.descriptions import EmbeddingDescription
from deployments.contract.errors import InvalidRequestError, RaystreamError
from deployments.contract.pooling import ROW_DTYPE, PooledText, PoolingInput, PoolingRequest
from serve_app.api.body.limits import check_texts
from serve_app.api.embeddings.schema import Embedding, Embeddings, EmbeddingsBody
from serve_app.api.openai.text_schema import TextUsage
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.faulty_text import faulty_text, renamed
from serve_app.api.requests.sentence_prompts import named_prompt
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of
from serve_app.http.request_record import claim_of_request, note_operation, note_prompt

MAX_NUMBERS_AT_ONCE: Final = 2**14
"""Answers with more numbers are written on a thread: that takes a millisecond or more, and every
stream shares the event loop."""

Format = Literal["float", "base64"]

MAX_NUMBERS: Final[Mapping[Format, int]] = {"float": 2**22, "base64": 2**24}
"""Most numbers in one answer: either way they fill about 90 MB."""

MIN_NORM: Final = 1e-12
"""A shorter vector is divided by this, as torch's `normalize` does."""


class EmbeddingsApi:
    """Embeds texts."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["embeddings"])
        router.add_api_route(
            "/v1/embeddings",
            self.embed,
            methods=["POST"],
            response_model=Embeddings,
            summary="Embed texts",
        )
        return router

    async def embed(self, body: EmbeddingsBody, request: Request) -> Response:
        """Return a vector for each text."""
        request_id = request_id_of(request)
        embedded = await EmbeddedTexts.of(self._context, body, request_id)

        def write() -> bytes:
            found = Embeddings(
                id=f"embd-{request_id}",
                created=int(self._context.clock.unix_s()),
                model=embedded.model,
                data=[],
                usage=TextUsage.of(embedded.num_tokens),
            )
            return b"".join(json_slices(found, _data(embedded, _form(body))))

        is_long = len(embedded.answers) * embedded.width > MAX_NUMBERS_AT_ONCE
        json = await asyncio.to_thread(write) if is_long else write()
        return Response(json, media_type="application/json")


@dataclass(frozen=True, slots=True)
class EmbeddedTexts:
    """The vectors of a request's texts.

    Attributes:
        model: The id of the model.
        answers: The model's own vectors, in the order of the texts.
        width: Numbers of each vector as the request asks for it.
        is_normalized: Whether vectors have the length 1.
    """

    model: str
    answers: Sequence[PooledText]
    width: int
    is_normalized: bool

    @classmethod
    async def of(cls, context: ApiContext, body: EmbeddingsBody, request_id: str) -> Self:
        """Embed the texts.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        model = await context.models.find_embedder(body.model)
        vectors = model.description.embedding
        assert vectors is not None, "`find_embedder` finds only models that embed"
        _check_normalization(body, vectors)
        width = _width(body.dimensions, vectors)
        texts = _texts(body, named_prompt(vectors, body.prompt_name))
        # Token ids have no bytes to count; the model bounds their number.
        written = [text if isinstance(text, str) else "" for text in texts]
        check_texts(written, context.limits)
        _check_size(len(texts) * width, _form(body), vectors)
        asked = PoolingRequest(
            request_id,
            texts,
            truncate=body.drops_ends,
            max_num_tokens=body.max_num_tokens,
            operation="embeddings",
            trace=note_operation("embeddings"),
            claim=claim_of_request(body.priority),
        )
        try:
            answers = await model.backend.send(asked)
        except RaystreamError as error:
            raise _in_request_terms(error, body) from None
        embedded = cls(model.description.id, answers, width, vectors.is_normalized)
        note_prompt(embedded.num_tokens)
        return embedded

    @property
    def num_tokens(self) -> int:
        """Tokens that the model has read."""
        return sum(answer.num_tokens for answer in self.answers)

    def vectors(self) -> Iterator[npt.NDArray[np.float32]]:
        """Yield each vector, [width]."""
        for answer in self.answers:
            yield _cut(answer.vector, self.width, self.is_normalized)


def json_slices(answer: Embeddings, data: Iterable[Embedding]) -> Iterator[bytes]:
    """Write an answer in slices of one text: between two of them, other threads get the GIL.

    Args:
        answer: The answer without its data.
        data: The vector of each text.
    """
    start, end = answer.model_dump_json().split('"data":[]')
    yield f'{start}"data":['.encode()
    for index, each in enumerate(data):
        yield b"," * (index > 0) + each.model_dump_json().encode()
    yield f"]{end}".encode()


def _check_normalization(body: EmbeddingsBody, vectors: EmbeddingDescription) -> None:
    """Refuse to normalize vectors, or not to, against the model's files.

    Raises:
        InvalidRequestError: The request asks for it.
    """
    for name in ("normalize", "use_activation"):
        if getattr(body, name) in (None, vectors.is_normalized):
            continue
        how = "normalized" if vectors.is_normalized else "not normalized"
        raise InvalidRequestError(
            f"{name} can only be {str(vectors.is_normalized).lower()}: the model's own files say "
            f"that its vectors are {how}.",
            name,
        )


def _check_size(num_numbers: int, form: Format, vectors: EmbeddingDescription) -> None:
    """Refuse an answer that is too long, before the model is asked.

    Raises:
        InvalidRequestError: It would hold more than `MAX_NUMBERS`.
    """
    if num_numbers <= MAX_NUMBERS[form]:
        return
    ways = ["send fewer texts"]
    if vectors.dimensions is not None:
        ways.append("ask for fewer dimensions")
    if form == "float" and num_numbers <= MAX_NUMBERS["base64"]:
        ways.append("ask for encoding_format base64")
    raise InvalidRequestError(
        f"The answer to this input would hold {num_numbers} numbers; at most {MAX_NUMBERS[form]} "
        f"are returned as {form}. To mend it, {' or '.join(ways)}.",
        "input",
    )


def _width(dimensions: int | None, vectors: EmbeddingDescription) -> int:
    """Return the width of the answer's vectors.

    Raises:
        InvalidRequestError: The model's vectors can't be cut to this.
    """
    if dimensions is None or dimensions == vectors.width:
        return vectors.width
    if vectors.dimensions is None:
        raise InvalidRequestError(
            f"The model's vectors have {vectors.width} dimensions, and it was not trained for "
            "fewer (its config.json names no matryoshka_dimensions). Leave dimensions out.",
            "dimensions",
        )
    if dimensions in vectors.dimensions or (not vectors.dimensions and dimensions < vectors.width):
        return dimensions
    widths = sorted({*vectors.dimensions, vectors.width})
    known = ", ".join(map(str, widths)) if vectors.dimensions else f"1 to {vectors.width}"
    raise InvalidRequestError(
        f"The model's vectors can't have {dimensions} dimensions; choose from {known}.",
        "dimensions",
    )


def _texts(body: EmbeddingsBody, prompt: str) -> tuple[PoolingInput, ...]:
    """Return the request's texts, each behind the prompt.

    Raises:
        InvalidRequestError: A prompt is asked for before token ids.
    """
    given: list[Any] = [body.input] if _is_single(body) else list(body.input)
    if isinstance(given[0], str):
        return tuple(prompt + text for text in given)
    if body.prompt_name is not None:
        raise InvalidRequestError(
            "prompt_name needs texts: a prompt can't be put before token ids.", "prompt_name"
        )
    return tuple(map(tuple, given))


def _is_single(body: EmbeddingsBody) -> bool:
    """Return whether the input is one text, or the token ids of one."""
    return isinstance(body.input, str) or isinstance(body.input[0], int)


def _form(body: EmbeddingsBody) -> Format:
    return body.encoding_format or "float"


def _data(embedded: EmbeddedTexts, form: Format) -> Iterator[Embedding]:
    for index, vector in enumerate(embedded.vectors()):
        yield Embedding.model_construct(index=index, embedding=_encoded(vector, form))


def _cut(
    vector: npt.NDArray[np.float32], width: int, is_normalized: bool
) -> npt.NDArray[np.float32]:
    """Return the first numbers of a vector, [width], of [its width]."""
    if width == len(vector):
        return vector
    start = vector[:width]
    # As in OpenAI's API and in vLLM; sentence-transformers leaves the shorter vector as it is.
    return start / max(float(np.linalg.norm(start)), MIN_NORM) if is_normalized else start


def _encoded(vector: npt.NDArray[np.float32], form: Format) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype(ROW_DTYPE, copy=False).tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _in_request_terms(error: RaystreamError, body: EmbeddingsBody) -> RaystreamError:
    """Return a replica's error in terms of the request's input."""
    index = faulty_text(error)
    if index is None:
        return error
    return renamed(error, "input" if _is_single(body) else f"input[{index}]")
