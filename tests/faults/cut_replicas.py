"""Two replicas in this process, whose streams are cut after chosen tokens.

The cut is made where a replica hands a sequence's deltas to the channel: what follows is never
sent, and the stream is told that the engine has failed or was stopped. Or the replica parks the
sequence there, or displaces it, as for others. Everything else is real: the application, the
channels, the replicas and their engines.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx

from deployments.contract.generation import GenerationRequest, Request
from deployments.contract.output import FinishReason, TextDelta
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.admission.permit import Permit
from deployments.generator.text_engine import Take
from deployments.generator_replica import GeneratorReplica
from serve_app.backends.replicas.backend import Backend
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.local_handle import local_backend
from tests.engines import EngineName
from tests.serve_app.local_replica import local_generator

if TYPE_CHECKING:
    from types import MethodType

Running = Callable[[SequenceRequest, Take], AbstractContextManager[None]]


@dataclass(frozen=True)
class Cut:
    """A loss once an answer has this many tokens, by its replica's death or by a graceful stop.

    Tokens of the prompt that come with their log-probabilities count, too.
    """

    num_tokens: int
    is_death: bool

    def make(self, generator: GeneratorReplica, take: Take) -> None:
        """Let a replica lose the sequence that gets its deltas by `take`."""
        take(self.last_delta)
        generator._channels.flush()

    @property
    def last_delta(self) -> TextDelta:
        return TextDelta((), "", FinishReason.ABORT, "cut" if self.is_death else None)


@dataclass(frozen=True)
class Park:
    """The replica's own parking of an answer, once it has this many tokens."""

    num_tokens: int

    def make(self, generator: GeneratorReplica, take: Take) -> None:
        """Park the sequence that gets its deltas by `take`."""
        generator._admission.park(permit_of(generator, take))


@dataclass(frozen=True)
class Displace:
    """A sequence that leaves the engine once it has this many tokens, and enters it again."""

    num_tokens: int

    def make(self, generator: GeneratorReplica, take: Take) -> None:
        """Displace the sequence that gets its deltas by `take`, for a moment."""
        displace(generator, permit_of(generator, take))


Loss = Cut | Park | Displace


def displace(generator: GeneratorReplica, permit: Permit) -> None:
    """Take a sequence out of the engine, and let it in again if there is room."""
    estimate, feed = generator._admission._estimate, generator._admission._feed
    estimate._stop(permit)
    permit.note_displaced(estimate._now_s())
    estimate._queue(permit)
    feed.update()
    estimate.settle()
    feed.update()


def permit_of(generator: GeneratorReplica, take: Take) -> Permit:
    """Return the permit of the sequence that gets its deltas by `take`."""
    run = cast("MethodType", take).__self__
    estimate = generator._admission._estimate
    permits: tuple[Permit, ...] = (*estimate._running, *estimate.queue)
    return next(each for each in permits if each.run is run)


class Cuts:
    """The cuts that are still to be made, for each sequence of the requests that are to be cut."""

    def __init__(self) -> None:
        self.num_made = 0
        self._planned: dict[str, tuple[Loss, ...]] = {}
        self._left: dict[tuple[str, int, tuple[int, ...]], list[Loss]] = {}

    def plan(self, request_id: str, cuts: Sequence[Loss]) -> None:
        """Cut each answer to this request."""
        self._planned[request_id] = tuple(cuts)

    def left_for(self, sequence: SequenceRequest) -> list[Loss]:
        """Return the cuts of the answer that a sequence is, or goes on with."""
        request_id = sequence.sequence_id.rpartition("-")[0]
        key = (request_id, sequence.params.seed, sequence.prompt_token_ids)
        return self._left.setdefault(key, list(self._planned.get(request_id, ())))

    def wrap(self, generator: GeneratorReplica) -> None:
        """Make the cuts in this replica."""
        original: Running = generator._engine.running

        @contextmanager
        def running(sequence: SequenceRequest, take: Take) -> Iterator[None]:
            left = self.left_for(sequence)
            num_tokens = sequence.num_prompt_logprobs + len(sequence.generated_token_ids)
            is_cut = False

            def cut_if_due() -> None:
                nonlocal is_cut
                if left and num_tokens >= left[0].num_tokens and not is_cut:
                    is_cut = True
                    self.num_made += 1
                    left.pop(0).make(generator, take)

            def take_until_cut(delta: TextDelta) -> None:
                nonlocal num_tokens
                if is_cut:
                    return
                take(delta)
                num_tokens += len(delta.token_ids) + sum(map(len, delta.prompt_logprobs))
                if delta.finish_reason is None:
                    cut_if_due()

            with original(sequence, take_until_cut):
                asyncio.get_running_loop().call_soon(cut_if_due)
                yield

        generator._engine.running = running  # type: ignore[method-assign]


class Router:
    """A model with several replicas, which take requests in turn.

    A test may replace `backends` while streams run.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = backends
        self._num_requests = 0

    async def send(self, request: Request[Any]) -> Any:
        if not isinstance(request, GenerationRequest):
            return await self.backends[0].send(request)
        self._num_requests += 1
        return await self.backends[self._num_requests % len(self.backends)].send(request)


@contextmanager
def two_replicas(
    folder: Path, cuts: Cuts, engine: EngineName = "raystream", **changes: object
) -> Iterator[list[GeneratorReplica]]:
    """Load a model twice; its streams are cut as planned."""
    with ExitStack() as stack:
        made = [stack.enter_context(local_generator(folder, engine, **changes)) for _ in range(2)]
        for generator in made:
            cuts.wrap(generator)
        yield made


@asynccontextmanager
async def client_of_all(
    generators: Sequence[GeneratorReplica], config: AppConfig
) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of the application over these replicas."""
    async with AsyncExitStack() as stack:
        backends = [
            await stack.enter_async_context(aclosing(local_backend(each))) for each in generators
        ]
        yield await stack.enter_async_context(client_of(Router(backends), config))


def client_of(model: Backend, config: AppConfig) -> httpx.AsyncClient:
    """Return a client of the application with this model as `m`."""
    app: Any = build_app(AppParts(config, {"m": model}))
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None)
