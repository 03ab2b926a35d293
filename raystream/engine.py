"""A model in this process, without a server or a Ray cluster: for notebooks, tests and lists.

The engine is that of a replica (`deployments.text_generator`, `text_pooler`), asked by the classes
of the HTTP API, so an answer is the one that a server gives. It runs on an event loop in a thread
of its own: its methods block, and may be called from a running event loop, such as a notebook's.
"""

import asyncio
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from tqdm.auto import tqdm

from deployments.contract.descriptions import Task
from deployments.contract.errors import RaystreamError, WrongTaskError
from deployments.contract.generation import GenerationRequest
from deployments.contract.model_spec import ModelConfig, ModelSpec, number
from deployments.contract.pooling import PoolingRequest
from deployments.device.device import MemoryDevice, open_device
from deployments.generator.prompt_encoder import EncodedPrompt
from deployments.pooling.text_encoder import EncodedTexts
from deployments.text_generator import TextGenerator
from deployments.text_pooler import TextPooler
from raystream.local_handle import LocalHandle
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
from serve_app.api.chat.routes import OpenChat
from serve_app.api.chat.schema import ChatCompletion, ChatRequest
from serve_app.api.classify.routes import classified
from serve_app.api.classify.schema import ClassifiedText, ClassifyBody
from serve_app.api.completions.routes import OpenCompletion
from serve_app.api.completions.schema import Completion, CompletionRequest
from serve_app.api.embeddings.routes import EmbeddedTexts
from serve_app.api.embeddings.schema import EmbeddingsBody
from serve_app.api.requests.context import ApiContext
from serve_app.backends.models.catalog import ModelCatalog
from serve_app.backends.replicas.handle_backend import HandleBackend
from serve_app.clock import SystemClock
from serve_app.commands.check.model_source import task_of
from serve_app.config import LimitsConfig, model_id_of
from serve_app.gpu_shares import to_spec
from serve_app.images.fetcher import ImageFetcher

if TYPE_CHECKING:
    from serve_app.backends.replicas.handles import Handle

T = TypeVar("T")
ItemT = TypeVar("ItemT")

UNLIMITED: Final = LimitsConfig(
    first_token_timeout_s=None, stall_timeout_s=None, total_timeout_s=None
)
"""Without deadlines: no client waits. The bounds on one request stay, as memory has bounds."""

MAX_QUEUED: Final = 2**20
"""More requests than are ever made at once."""

NUM_TEXTS_AT_ONCE: Final = 256
"""Texts that a pooler is asked at once: enough to fill its micro-batches."""


class _Generator(TextGenerator):
    """A replica whose prompts are not gathered by Serve."""

    async def _encode(self, request: GenerationRequest) -> EncodedPrompt | RaystreamError:
        return await _encoded(self._encoding, self._encoder.encode, request)


class _Pooler(TextPooler):
    """A replica whose texts are not gathered by Serve."""

    async def _encode(self, request: PoolingRequest) -> EncodedTexts | RaystreamError:
        return await _encoded(self._encoding, self._encoder.encode, request)


async def _encoded(
    executor: Executor, encode: Callable[[list[ItemT]], list[T]], request: ItemT
) -> T:
    (encoded,) = await asyncio.get_running_loop().run_in_executor(executor, encode, [request])
    return encoded


class Engine:
    """One model, loaded into this process.

    Each method takes a list and returns a list of the same length and order. In place of an answer
    it holds a `RaystreamError` if that input was refused or has failed; the others go on.

    Attributes:
        id: The last part of the model's name, unless the settings have another.
        task: What it does.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        task: Task | None = None,
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        """Load a model.

        Args:
            source: A folder, or the id of a hub repository.
            task: What the model does: generate, classify or embed. None finds it from its files.
            progress: Whether to show a bar over each list; None shows it in a terminal and in a
                notebook.
            **settings: Other keys of a model's entry in serve_config.yaml, such as dtype, device,
                max_model_len or quantization. On a GPU, gpu_share is the part of its memory.

        Raises:
            ValueError: A setting is unknown or wrong.
            UnsupportedModelError: The model can't be loaded.
            DeviceMemoryError: The device has not enough memory for it.
        """
        task = task or task_of(str(source), settings.get("revision"))
        self.task = task
        spec = _spec_of(str(source), task, settings)
        self.id = spec.id
        self._progress = progress
        replica = _load(spec)
        self._num_at_once = (
            2 * replica.max_num_seqs if isinstance(replica, TextGenerator) else NUM_TEXTS_AT_ONCE
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="raystream-engine", daemon=True
        )
        self._thread.start()
        backend, catalog = asyncio.run_coroutine_threadsafe(
            _catalog_of(self.id, task, cast("Handle", LocalHandle(replica))), self._loop
        ).result()
        self._context = ApiContext(
            catalog,
            UNLIMITED,
            SystemClock(),
            ImageFetcher(UNLIMITED),
        )
        self._end = weakref.finalize(self, _close, replica, backend, self._loop, self._thread)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], /, **options: Any
    ) -> list[Completion | RaystreamError]:
        """Continue each prompt, without a chat template.

        Args:
            prompts: Texts, or their token ids.
            **options: Fields of POST /v1/completions, such as temperature, max_tokens, seed, stop
                or n; the same for each prompt.
        """
        fields = fields_of(options, model=self.id, prompt=None)

        async def complete(context: ApiContext, prompt: object, id_: str) -> Completion:
            body = read_body(CompletionRequest, {**fields, "prompt": listed(prompt)})
            return await (await OpenCompletion.of(context, body, id_)).whole()

        return self._each(
            "generate", complete, prompts, lambda answer: answer.usage.completion_tokens
        )

    def chat(
        self, conversations: Sequence[Messages], /, **options: Any
    ) -> list[ChatCompletion | RaystreamError]:
        """Answer each conversation.

        Args:
            conversations: Each one a user's message, or a list of messages as dictionaries.
            **options: Fields of POST /v1/chat/completions, such as temperature, max_tokens, tools
                or response_format; the same for each conversation.
        """
        fields = fields_of(options, model=self.id, messages=None)
        if any(isinstance(each, dict) for each in conversations):
            raise TypeError("chat takes a list of conversations: put the messages into one more []")

        async def answer(context: ApiContext, messages: Messages, id_: str) -> ChatCompletion:
            body = read_body(ChatRequest, {**fields, "messages": conversation(messages)})
            return await (await OpenChat.of(context, body, id_)).whole()

        return self._each(
            "generate", answer, conversations, lambda answer: answer.usage.completion_tokens
        )

    def classify(
        self, texts: Sequence[str], /, **options: Any
    ) -> list[ClassifiedText | RaystreamError]:
        """Return the labels and scores of each text.

        Args:
            texts: The texts.
            **options: Fields of POST /v1/classify: split, truncate and top_k.
        """
        fields = fields_of(options, model=self.id, input=None)

        async def classify(context: ApiContext, text: str, id_: str) -> tuple[ClassifiedText, int]:
            body = read_body(ClassifyBody, {**fields, "input": text})
            made, _ = await classified(context, body, id_)
            answer = made()
            return answer.data[0], answer.usage.total_tokens

        found = self._each("classify", classify, texts, lambda pair: pair[1])
        return [
            each
            if isinstance(each, RaystreamError)
            else each[0].model_copy(update={"index": index})
            for index, each in enumerate(found)
        ]

    def embed(
        self, texts: Sequence[str], /, **options: Any
    ) -> list[npt.NDArray[np.float32] | RaystreamError]:
        """Return the vector of each text, [width].

        Args:
            texts: The texts.
            **options: Fields of POST /v1/embeddings, such as dimensions or prompt_name.
        """
        fields = fields_of(options, model=self.id, input=None)

        async def embed(context: ApiContext, text: str, id_: str) -> EmbeddedTexts:
            body = read_body(EmbeddingsBody, {**fields, "input": text, **AS_NUMBERS})
            return await EmbeddedTexts.of(context, body, id_)

        found = self._each("embed", embed, texts, lambda answer: answer.num_tokens)
        return [
            each if isinstance(each, RaystreamError) else next(each.vectors()) for each in found
        ]

    def close(self) -> None:
        """Free the model's memory; closing twice is harmless."""
        self._end()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the model's memory."""
        self.close()

    def _each(
        self,
        task: Task,
        ask: Callable[[ApiContext, ItemT, str], Awaitable[T]],
        items: Sequence[ItemT],
        num_tokens_of: Callable[[T], int],
    ) -> list[T | RaystreamError]:
        """Ask about each item, many at once; return the answers and errors in order.

        An interrupt ends the requests that run.
        """
        if task != self.task:
            raise WrongTaskError(
                f"{self.id} was loaded with task={self.task!r}; load it by "
                f"Engine(..., task={task!r})."
            )
        if isinstance(items, str):
            raise TypeError("give a list of texts, not one string")
        if not self._end.alive:
            raise RuntimeError("the engine is closed")
        done: SimpleQueue[T | RaystreamError | None] = SimpleQueue()
        work = self._ask_each(ask, list(items), done.put)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda _: done.put(None))
        try:
            self._show(done, len(items), num_tokens_of)
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def _show(
        self,
        done: "SimpleQueue[T | RaystreamError | None]",
        num_items: int,
        num_tokens_of: Callable[[T], int],
    ) -> None:
        """Show a bar until all is done. A notebook draws it only from the thread that called."""
        is_hidden = None if self._progress is None else not self._progress
        num_tokens = 0
        with tqdm(total=num_items, desc=self.id, unit="input", disable=is_hidden) as bar:
            while (each := done.get()) is not None:
                if not isinstance(each, RaystreamError):
                    num_tokens += num_tokens_of(each)
                elapsed_s = bar.format_dict["elapsed"] if not bar.disable else 0.0
                if elapsed_s:
                    bar.set_postfix_str(f"{num_tokens / elapsed_s:.0f} tokens/s", refresh=False)
                bar.update()

    async def _ask_each(
        self,
        ask: Callable[[ApiContext, ItemT, str], Awaitable[T]],
        items: Sequence[ItemT],
        note: Callable[[T | RaystreamError], object],
    ) -> list[T | RaystreamError]:
        answers: dict[int, T | RaystreamError] = {}
        left = iter(enumerate(items))

        async def answer_some() -> None:
            for index, item in left:
                with working() as record:
                    try:
                        answers[index] = await ask(self._context, item, record.request_id)
                    except RaystreamError as error:
                        answers[index] = error
                    log_warnings(record)
                note(answers[index])

        num_at_once = min(self._num_at_once, len(items))
        answering = [asyncio.ensure_future(answer_some()) for _ in range(num_at_once)]
        try:
            await asyncio.gather(*answering)
        finally:
            for each in answering:
                each.cancel()
        return [answers[index] for index in range(len(items))]


def _spec_of(source: str, task: Task, settings: dict[str, Any]) -> ModelSpec:
    """Return what a replica needs to know, with the GPU that this process sees.

    Raises:
        ValueError: A setting is unknown or wrong.
    """
    entry = {"id": model_id_of(source), "source": source, "task": task}
    try:
        model = ModelConfig.model_validate({**entry, "max_queued_requests": MAX_QUEUED, **settings})
    except ValidationError as error:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for item in error.errors():  # a setting of several types has one for each
            name = "".join(f"{step}: " for step in item["loc"][:1])
            found[name].append(item["msg"].removeprefix("Value error, "))
        told = (f"{name}{', or: '.join(messages)}" for name, messages in found.items())
        raise ValueError("; ".join(told)) from None
    given = number(model.num_gpus)
    if given is None:
        has_gpu = model.device != "cpu" and torch.cuda.is_available()
        given = (number(model.gpu_share) or 1.0) if has_gpu else 0.0
    return to_spec(model, given)


def _open_device(spec: ModelSpec) -> MemoryDevice:
    """Open the device; Ray, if it runs, has assigned none to this process."""
    return open_device(spec.entry.device, has_gpu=spec.num_gpus > 0)


def _load(spec: ModelSpec) -> TextGenerator | TextPooler:
    kind: type[TextGenerator] | type[TextPooler]
    kind = _Generator if spec.entry.task == "generate" else _Pooler
    # Serve's loggers write to the terminal, and how long a start took is news only in a server.
    logger = logging.getLogger("ray.serve.raystream.replica")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        # Nothing of a failed engine may end the caller's process.
        return kind(spec, open_device=_open_device, end_process=lambda: None)
    finally:
        logger.setLevel(level)


async def _catalog_of(id_: str, task: Task, handle: "Handle") -> tuple[HandleBackend, ModelCatalog]:
    """Return the backend of the replica, which belongs to the running event loop, and a catalog."""
    backend = HandleBackend(handle)
    tasks = ("generate", "classify", "embed")
    generators, classifiers, embedders = ({id_: backend} if task == t else {} for t in tasks)
    return backend, ModelCatalog(generators, classifiers, embedders)


def _close(
    replica: TextGenerator | TextPooler,
    backend: HandleBackend,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
) -> None:
    """End the requests, the replica's threads, and the event loop with its thread."""
    if threading.current_thread() is thread:  # it has dropped the engine, and can't wait for itself
        threading.Thread(target=_close, args=(replica, backend, loop, thread)).start()
        return
    asyncio.run_coroutine_threadsafe(_end(replica, backend), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _end(replica: TextGenerator | TextPooler, backend: HandleBackend) -> None:
    ours = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in ours:
        task.cancel()
    await asyncio.gather(*ours, return_exceptions=True)
    await backend.aclose()
    replica.__del__()
