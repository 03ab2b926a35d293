"""A served model, asked from Python: in any Serve deployment or driver of the same Ray cluster.

A request takes the ingress's way to the replicas (`serve_app.served_models`), so it has the same
failover, limits and priorities; only HTTP is left out. Its options are the fields of the HTTP API,
read by the same classes, and whole answers are the API's own.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from raystream.applications import reaching
from raystream.request import (
    AS_NUMBERS,
    Messages,
    conversation,
    fields_of,
    listed,
    log_warnings,
    read_body,
    working,
)
from serve_app.api.answers.reader import AnswerFinish
from serve_app.api.chat.routes import OpenChat
from serve_app.api.chat.schema import ChatCompletion, ChatRequest, ToolCallDelta
from serve_app.api.classify.routes import classified
from serve_app.api.classify.schema import Classifications, ClassifyBody
from serve_app.api.completions.routes import OpenCompletion
from serve_app.api.completions.schema import Completion, CompletionRequest
from serve_app.api.embeddings.routes import EmbeddedTexts
from serve_app.api.embeddings.schema import EmbeddingsBody
from serve_app.api.openai.logprobs import ChoiceLogprobs, CompletionLogprobs
from serve_app.api.openai.usage import Usage, UsageTally
from serve_app.api.requests.chunked_answer import ChunkedAnswer
from serve_app.api.requests.context import ApiContext

AnswerT = TypeVar("AnswerT")

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""One text or several, or their token ids."""

Reach = Callable[[str | None, str | None], AbstractAsyncContextManager[ApiContext]]
"""Reaches an application, by the model's id and the application's name, for one request."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a text has gained since the delta before.

    Attributes:
        text: More text.
        index: Which of several answers (`n`, or several prompts) it belongs to, from 0.
        reasoning_content: More of the model's reasoning, which comes before the text.
        tool_calls: What calls of tools have gained: first the id and the name, then arguments.
        finish_reason: Why the answer ends here: stop, length or tool_calls; None if it goes on.
        logprobs: The log-probabilities of the new tokens, if they were asked for.
        usage: The tokens of the whole request; only with the last delta.
    """

    text: str = ""
    index: int = 0
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: AnswerFinish | None = None
    logprobs: ChoiceLogprobs | CompletionLogprobs | None = None
    usage: Usage | None = None

    @classmethod
    def of(cls, choice: dict[str, Any], usage: Usage | None) -> Self:
        """Return the delta for a choice in a chunk of the HTTP API's streams."""
        is_chat = "delta" in choice
        gained = choice["delta"] if is_chat else {"content": choice["text"]}
        logprobs = choice["logprobs"]
        kind: type[ChoiceLogprobs] | type[CompletionLogprobs]
        kind = ChoiceLogprobs if is_chat else CompletionLogprobs
        return cls(
            gained.get("content") or "",
            choice["index"],
            gained.get("reasoning_content") or "",
            tuple(map(ToolCallDelta.model_validate, gained.get("tool_calls") or ())),
            choice["finish_reason"],
            None if logprobs is None else kind.model_validate(logprobs),
            usage,
        )


class Generation(Generic[AnswerT]):
    """A text that a model is asked for: `async for` streams its deltas, `await` returns all of it.

    Each loop, and each `await`, is a request of its own, which begins there. To leave a loop, in
    whatever way, aborts the text and frees its place.
    """

    def __init__(
        self,
        open_answer: Callable[[ApiContext, bool, str], Awaitable[ChunkedAnswer[AnswerT]]],
        reach: Callable[[], AbstractAsyncContextManager[ApiContext]],
    ) -> None:
        """Prepare a request.

        Args:
            open_answer: Opens the streams of an application's answer, by whether they are read as
                deltas and by the request's id.
            reach: Reaches the application.
        """
        self._open_answer = open_answer
        self._reach = reach

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        """Iterate over the deltas; the generator's `aclose` ends the request, too.

        Raises:
            RaystreamError: The request was refused, or has failed after these deltas.
        """
        return self._deltas()

    def __await__(self) -> Generator[Any, None, AnswerT]:
        """Return the whole answer.

        Raises:
            RaystreamError: The request was refused, or has failed.
        """
        return self._whole().__await__()

    async def _whole(self) -> AnswerT:
        async with self._reach() as context:
            with working() as record:
                opened = await self._open_answer(context, False, record.request_id)
                log_warnings(record)
                return await opened.whole()

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        async with self._reach() as context:
            # The record is current only while this runs: between two deltas, the caller's code is.
            with working() as record:
                opened = await self._open_answer(context, True, record.request_id)
                deltas = opened.choices.deltas()
            try:
                log_warnings(record)
                framer = opened.framer()
                tally = UsageTally(opened.choices, opened.reasoning)
                num_open = len(opened.choices)
                for index in range(num_open):
                    opening = Delta.of(framer.opening(index) or NO_OPENING, None)
                    if opening.text:
                        yield opening
                while True:
                    with working(record):
                        found = await anext(deltas, None)
                    if found is None:
                        return
                    tally.add(*found)
                    for choice in framer.gain(*found):
                        num_open -= choice["finish_reason"] is not None
                        yield Delta.of(choice, None if num_open else tally.usage())
            finally:
                with working(record):
                    await deltas.aclose()
                    await opened.choices.aclose()


NO_OPENING: Final[dict[str, Any]] = {
    "index": 0,
    "delta": {},
    "logprobs": None,
    "finish_reason": None,
}
"""A choice that adds nothing."""


class Model:
    """A model that an application of this Ray cluster serves.

    It can be made anywhere, also before the application runs, and may be kept and shared: the
    application is looked for when the first request needs it, once for each event loop.
    """

    def __init__(
        self, id: str | None = None, *, application: str | None = None, reach: Reach = reaching
    ) -> None:
        """Name a model.

        Args:
            id: As clients of the HTTP API name it; None means the application's first model for the
                task.
            application: The name of the Serve application that serves it. None means the
                caller's own, if that serves the model, or else the only one that does.
            reach: Reaches the application.
        """
        self.id = id
        self._application = application
        self._reach = reach

    def chat(self, messages: Messages, /, **options: Any) -> Generation[ChatCompletion]:
        """Ask for the next message of a conversation.

        Args:
            messages: One user's message, or the conversation as a list of dictionaries.
            **options: Fields of POST /v1/chat/completions, such as temperature, max_tokens, seed,
                stop, tools or response_format.
        """
        fields = fields_of(options, model=self.id, messages=conversation(messages))

        async def open_chat(context: ApiContext, streams: bool, id_: str) -> OpenChat:
            body = read_body(ChatRequest, {**fields, "stream": True} if streams else fields)
            return await OpenChat.of(context, body, id_)

        return Generation(open_chat, self._reached)

    def complete(self, prompt: Prompts, /, **options: Any) -> Generation[Completion]:
        """Ask for the continuation of a text, without a chat template.

        Args:
            prompt: One text or several, or their token ids.
            **options: Fields of POST /v1/completions, such as temperature, max_tokens, seed or
                stop.
        """
        fields = fields_of(options, model=self.id, prompt=listed(prompt))

        async def open_completion(context: ApiContext, streams: bool, id_: str) -> OpenCompletion:
            body = read_body(CompletionRequest, {**fields, "stream": True} if streams else fields)
            return await OpenCompletion.of(context, body, id_)

        return Generation(open_completion, self._reached)

    async def classify(self, texts: str | Sequence[str], /, **options: Any) -> Classifications:
        """Return the labels and scores of texts.

        Args:
            texts: One text or several.
            **options: Fields of POST /v1/classify: split, truncate and top_k.

        Raises:
            RaystreamError: The request was refused, or has failed.
        """
        body = read_body(ClassifyBody, fields_of(options, model=self.id, input=listed(texts)))
        async with self._reached() as context:
            with working() as record:
                made, _ = await classified(context, body, record.request_id)
        return made()

    async def embed(self, texts: str | Sequence[str], /, **options: Any) -> npt.NDArray[np.float32]:
        """Return the vectors of texts, [texts, width].

        Args:
            texts: One text or several.
            **options: Fields of POST /v1/embeddings, such as dimensions or prompt_name.

        Raises:
            RaystreamError: The request was refused, or has failed.
        """
        fields = fields_of(options, model=self.id, input=listed(texts))
        body = read_body(EmbeddingsBody, {**fields, **AS_NUMBERS})
        async with self._reached() as context:
            with working() as record:
                embedded = await EmbeddedTexts.of(context, body, record.request_id)
        return np.stack(list(embedded.vectors()))

    def _reached(self) -> AbstractAsyncContextManager[ApiContext]:
        return self._reach(self.id, self._application)
