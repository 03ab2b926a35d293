"""FleetEngine: servers of vLLM that somebody else runs, with the face of a replica's engine.

It sends token ids to `/inference/v1/generate` of the server that has the fewest of its sequences,
and reads token ids back. All else is as with an engine of our own: prompts, detokenizing, stop
strings, tools, admission, keys, metrics. A server that dies, hangs, drains or sends what vLLM does
not loses its sequences to the others, which get the tokens so far as part of the prompt
(`moves.resubmit`). Servers that have come to serve another model, a shorter one, or another version
of vLLM get none: a version may draw or compute otherwise, so its text would be another.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Final

import aiohttp

from deployments.compute.model_files import read_generation, read_settings
from deployments.compute.tokenizer_files import load_tokenizer
from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.model_spec import ModelSpec, number
from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.contract.sampling_params import InvalidParameterError
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.detokenizing.detokenizer import UndecodableError
from deployments.engine.limits import EngineLimits
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.text_engine import AnyEngine, EngineFacts, Take
from deployments.plan.kv_layout import BLOCK_SIZE, KVLayout
from deployments.plan.replica_report import MemoryPlan
from deployments.vllm_engine.fleet.server import Output, Server, ServerLostError, open_session
from deployments.vllm_engine.moves import resubmit
from deployments.vllm_engine.requests import PROBE, UNDECODABLE, Codec, Deltas

logger = logging.getLogger("ray.serve.raystream.replica")

SEQS_PER_SERVER: Final = 256
"""Sequences that run at once on each server, unless the entry's `max_num_seqs` says how many run on
all; vLLM's default is the same."""

MAX_LOGPROBS: Final = 20
"""The most that a server gives, unless its `--max-logprobs` says otherwise."""


class FleetEngine(AnyEngine):
    """Runs sequences on a fleet of servers for the coroutines of one event loop."""

    def __init__(self, spec: ModelSpec, on_stats: Callable[[EngineStats], None]) -> None:
        """Prepare the engine; `start` asks the servers.

        Args:
            spec: The model; its entry names the servers.
            on_stats: Called on the event loop after each delta.
        """
        super().__init__()
        self._spec = spec
        self._on_stats = on_stats
        self._servers = [Server(url.rstrip("/")) for url in spec.entry.engine_urls]
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_steps = self._num_prompt_tokens = self._num_resumed = 0

    def start(self) -> EngineFacts:
        """Ask the servers what they serve, and load the model's tokenizer.

        Raises:
            UnsupportedModelError: A server has another model, or can't take token ids.
            ConnectionError: No server answers.
        """
        spec, entry = self._spec, self._spec.entry
        known = [found for each in self._servers if (found := each.ask(spec.id)) is not None]
        if not known:
            urls = ", ".join(each.url for each in self._servers)
            raise ConnectionError(f"no server of vLLM answers at {urls}")
        if len({found.name for found in known}) > 1:
            names = ", ".join(sorted({found.name for found in known}))
            raise UnsupportedModelError(f"the servers have different models: {names}")
        self._name = known[0].name
        self._version = self._chosen_version()
        max_model_len = min(found.max_model_len for found in known)
        max_model_len = min(max_model_len, number(entry.max_model_len) or max_model_len)
        tokenizer = load_tokenizer(spec.source, revision=entry.revision)
        settings = read_settings(spec.source, revision=entry.revision)
        generation = read_generation(spec.source, revision=entry.revision)
        named = None if generation is None else generation.eos_token_id
        named = tokenizer.eos_token_id if named is None else named
        ends = named if isinstance(named, list) else [] if named is None else [named]
        self._codec = Codec(tokenizer, frozenset(ends))
        max_num_seqs = number(entry.max_num_seqs) or SEQS_PER_SERVER * len(self._servers)
        limits = EngineLimits(max_num_seqs, max_model_len, max_model_len)
        layout = limits.layout((max_model_len,))
        self._facts = EngineFacts(
            tokenizer=tokenizer,
            processor=None,
            generation_config=generation,
            vocab_size=int(settings.get("vocab_size") or len(tokenizer)),
            limits=limits,
            layout=layout,
            memory=_no_memory(limits, layout),
            num_parameters=0,
            dtype="as its servers have it",
            num_threads=0,
            summary=(
                f"{len(known)} of {len(self._servers)} server(s) answer, vLLM {self._version}"
            ),
            versions={"engine": f"vllm {self._version} on servers", "model": self._name},
        )
        return self._facts

    def _chosen_version(self) -> str:
        """Return the version of vLLM that most servers have; of two level ones the first."""
        versions = {
            each.url: each.served.version for each in self._servers if each.served is not None
        }
        chosen = Counter(versions.values()).most_common(1)[0][0]
        for url, version in versions.items():
            if version != chosen:
                logger.warning(
                    "%s: %s gets no sequence: it has vLLM %s, and most servers have %s",
                    *(self._spec.id, url, version, chosen),
                )
        return chosen

    def stop(self) -> None:
        """Take no more sequences; those that run end with their blocks."""
        self._is_stopped = True
        if self._session is not None and self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._session.close(), self._loop)

    @property
    def _failed(self) -> str:
        return "no server of the model answers; try again"

    @property
    def stats(self) -> EngineStats:
        """The replica's own sequences; what else the servers run is not known."""
        return EngineStats(
            sum(each.num_running for each in self._servers),
            0,
            self._num_steps,
            self._num_prompt_tokens,
            num_resumed=self._num_resumed,
        )

    @property
    def is_alive(self) -> bool:
        """Whether it takes sequences; servers that are lost may come back."""
        return not self._is_stopped

    async def check_health(self) -> None:
        """Raise unless a server answers; those that don't get no sequence for a while.

        Raises:
            ReplicaUnavailableError: None does, or all have another model or another version of
                vLLM by now; the next replica takes that one, and has another fingerprint.
        """
        answers = await asyncio.gather(*(each.is_well(self._http) for each in self._servers))
        well = (each for each, is_well in zip(self._servers, answers, strict=True) if is_well)
        if not any(self._is_the_same(each) for each in well):
            raise ReplicaUnavailableError(self._failed)

    def _is_the_same(self, server: Server) -> bool:
        """Return whether a server has what the others have, by what it last said."""
        found = server.served
        return (
            found is not None
            and (found.name, found.version) == (self._name, self._version)
            and found.max_model_len >= self._facts.limits.max_model_len
        )

    async def ping(self) -> None:
        """Wait until a server has run a one-token sequence.

        Raises:
            ReplicaUnavailableError: None can.
        """
        probe = SequenceRequest(self.unique_id("ping"), (0,), PROBE)
        answer: asyncio.Future[TextDelta] = asyncio.get_running_loop().create_future()

        def take(delta: TextDelta) -> None:
            if delta.finish_reason is not None and not answer.done():
                answer.set_result(delta)

        with self.running(probe, take):
            last = await answer
        if last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise self._end_error()

    def validate(self, request: SequenceRequest) -> None:
        """Refuse a sequence that could not run; see `EngineLimits.check`.

        Raises:
            InvalidParameterError: Also what these servers can't do or can't stream.
        """
        self._facts.limits.check(request, self._facts.vocab_size)
        if request.params.prompt_logprobs is not None:
            raise InvalidParameterError(
                "this model's servers don't stream log-probabilities of prompts", "prompt_logprobs"
            )
        if request.params.needs_matcher:
            raise InvalidParameterError(
                "this model's servers know nothing of raystream's grammars, which response_format, "
                "a forced tool call and a bound of reasoning need; leave that out",
                "response_format",
            )

    def compile_grammar(self, request: SequenceRequest) -> SequenceRequest:
        """Return the request: `validate` has refused grammars."""
        return request

    @contextmanager
    def running(self, sequence: SequenceRequest, take: Take) -> Iterator[None]:
        """Run a sequence, and abort it if the block ends first; see `TextEngine.running`."""
        self.require_alive()
        if not sequence.is_return:
            self._num_prompt_tokens += len(sequence.prompt_token_ids)
            self._num_resumed += sequence.is_resumed
        task = asyncio.ensure_future(self._run(sequence, take))
        try:
            yield
        finally:
            task.cancel()  # which closes the connection, and vLLM aborts what it ran for it

    async def _run(self, sequence: SequenceRequest, take: Take) -> None:
        """Run a sequence to its end, on as many servers as it takes."""
        try:
            last = await self._follow(sequence, take)
        except UndecodableError:
            last = TextDelta((), "", FinishReason.ERROR, UNDECODABLE)
        except ServerLostError:
            last = self._aborted
        except Exception as error:
            logger.warning("%s failed", sequence.sequence_id, exc_info=error)
            last = TextDelta((), "", FinishReason.ERROR, f"the generation failed: {error}")
        take(last)
        self._on_stats(self.stats)

    async def _follow(self, sequence: SequenceRequest, take: Take) -> TextDelta:
        """Pass a sequence's deltas on, and return the last one.

        Raises:
            ServerLostError: No server is left.
        """
        deltas = Deltas(sequence, self._codec)
        given = list(sequence.generated_token_ids)
        failed: set[str] = set()
        while True:
            server = self._choose(failed)
            so_far = replace(sequence, generated_token_ids=tuple(given))
            try:
                async with aclosing(self._outputs(server, so_far)) as outputs:
                    async for output in outputs:
                        self.ready_s = time.monotonic()
                        self._num_steps += 1
                        if output.outputs[0].finish_reason == "abort":  # it drains
                            raise ServerLostError("it aborts what it runs")
                        for delta in deltas.of(output):
                            if delta.finish_reason is not None:
                                return delta
                            take(delta)
                        given += output.outputs[0].token_ids
                        if output.outputs[0].token_ids:
                            failed.clear()  # what has failed before may be well again
                        self._on_stats(self.stats)
                raise ServerLostError("the text has no end")
            except (ServerLostError, aiohttp.ClientError, TimeoutError) as error:
                logger.warning(
                    "%s: %s has lost %s: %r", self._spec.id, server.url, sequence.sequence_id, error
                )
                server.rest()
                failed.add(server.url)

    def _choose(self, failed: set[str]) -> Server:
        """Return the server with the fewest sequences; one that rests only if all do.

        Raises:
            ServerLostError: The sequence has been at each that is the same, and was lost.
        """
        same = filter(self._is_the_same, self._servers)
        left = [each for each in same if each.url not in failed]
        if not left or self._is_stopped:
            raise ServerLostError
        now_s = time.monotonic()
        return min(left, key=lambda each: (each.rests_until_s > now_s, each.num_running))

    def _outputs(self, server: Server, sequence: SequenceRequest) -> AsyncGenerator[Output, None]:
        """Return what a server generates for a sequence."""
        handed = resubmit(sequence, self._facts.limits.max_num_tokens(sequence))
        fields = self._codec.fields(sequence, handed)
        if (num_top := fields["logprobs"]) is not None:
            # A server lists the chosen token first, and cuts the likeliest off at this number.
            fields["logprobs"] = min(num_top + 1, MAX_LOGPROBS)
        body = {
            "request_id": self.unique_id(sequence.sequence_id),
            "model": self._name,
            "token_ids": handed.prompt_token_ids,
            "sampling_params": {name: each for name, each in fields.items() if each is not None},
            "stream": True,
        }
        return server.generate(self._http, body)

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._loop = asyncio.get_running_loop()
            self._session = open_session()
        return self._session


def _no_memory(limits: EngineLimits, layout: KVLayout) -> MemoryPlan:
    """Return the plan of a replica that holds no model."""
    return MemoryPlan(
        usable_bytes=0,
        weight_bytes=0,
        step_bytes=0,
        captured_bytes=0,
        kv_bytes=0,
        num_kv_tokens=layout.num_blocks[0] * BLOCK_SIZE,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
    )
