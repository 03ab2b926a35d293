"""FleetEngine: servers of vLLM that somebody else runs, with the face of a replica's engine.

It sends token ids to `/inference/v1/generate` of the server that has the fewest of its sequences,
and reads token ids back. All else is as with an engine of our own: prompts, detokenizing, stop
strings, tools, admission, keys, metrics. A server that dies, hangs or drains loses its sequences to
the others, which get the tokens so far as part of the prompt (`moves.resubmit`).

Source: vllm/entrypoints/scale_out/token_in_token_out/{protocol,serving}.py of vLLM 0.32
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, Protocol
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import aiohttp
from transformers import GenerationConfig

from deployments.compute.model_files import read_settings
from deployments.compute.tokenizer_files import load_tokenizer
from deployments.contract.errors import (
    GenerationAbortedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.model_errors import UnsupportedModelError
from deployments.contract.model_spec import ModelSpec, number
from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.contract.sampling_params import InvalidParameterError
from deployments.engine.detokenizing.detokenizer import UndecodableError
from deployments.engine.limits import EngineLimits
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.text_engine import EngineFacts, Take
from deployments.plan.kv_layout import BLOCK_SIZE, KVLayout
from deployments.plan.replica_report import MemoryPlan
from deployments.vllm_engine.moves import resubmit
from deployments.vllm_engine.requests import PROBE, UNDECODABLE, Codec, Deltas

logger = logging.getLogger("ray.serve.raystream.replica")

GENERATE: Final = "/inference/v1/generate"
MODELS: Final = "/v1/models"
API_KEY: Final = "VLLM_API_KEY"
"""The variable that holds the servers' key, as it does for vLLM itself."""

SEQS_PER_SERVER: Final = 256
"""Sequences that run at once on each server, unless the entry's `max_num_seqs` says how many run on
all; vLLM's default is the same."""

CONNECT_S: Final = 2.0
FIRST_TOKEN_S: Final = 90.0
SILENCE_S: Final = 30.0
"""Seconds without a token after which a server is taken to hang. A long prompt may take as long
before its first; both are less than the ingress's `stall_timeout_s`, which would end the stream.
"""
KEEP_ALIVE_S: Final = 3.0
"""Seconds that an idle connection is kept: the servers close theirs after five."""
REST_S: Final = 5.0
"""Seconds for which a server that has failed gets no sequence, unless all have."""
LINE_BYTES: Final = 2**20
"""The longest event of a server."""

MAX_LOGPROBS: Final = 20
"""The most that a server gives, unless its `--max-logprobs` says otherwise."""

FAILED: Final = "no server of the model answers; try again"


REFUSALS: Final = (401, 403, 404)
"""Statuses by which a server says that it will never answer this."""


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: another server would be given the key."""

    def redirect_request(self, *args: Any) -> None:
        return None


DIRECT: Final = build_opener(ProxyHandler({}), _NoRedirect)
"""Asks servers themselves, whatever proxy the environment names, as the streams do."""


class ServerLostError(Exception):
    """A server does not answer, or has ended a sequence that it had not finished."""


@dataclass(slots=True)
class Server:
    """A server of vLLM.

    Attributes:
        url: Where it listens.
        num_running: The sequences that it runs for this replica.
        rests_until_s: When it may get sequences again, by the monotonic clock.
    """

    url: str
    num_running: int = 0
    rests_until_s: float = 0.0

    def rest(self) -> None:
        """Give it no sequence for a while."""
        self.rests_until_s = time.monotonic() + REST_S


class FleetEngine:
    """Runs sequences on a fleet of servers for the coroutines of one event loop.

    Attributes:
        ready_s: When the delta that is being taken was ready, by the monotonic clock.
    """

    def __init__(self, spec: ModelSpec, on_stats: Callable[[EngineStats], None]) -> None:
        """Prepare the engine; `start` asks the servers.

        Args:
            spec: The model; its entry names the servers.
            on_stats: Called on the event loop after each delta.
        """
        self.ready_s = 0.0
        self._spec = spec
        self._on_stats = on_stats
        self._servers = [Server(url.rstrip("/")) for url in spec.entry.engine_urls]
        key = os.environ.get(API_KEY)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._serial = count()
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False
        self._num_steps = self._num_prompt_tokens = self._num_resumed = 0

    def start(self) -> EngineFacts:
        """Ask the servers what they serve, and load the model's tokenizer.

        Raises:
            UnsupportedModelError: A server has another model, or can't take token ids.
            ConnectionError: No server answers.
        """
        spec, entry = self._spec, self._spec.entry
        known = [found for each in self._servers if (found := self._ask(each)) is not None]
        if not known:
            urls = ", ".join(each.url for each in self._servers)
            raise ConnectionError(f"no server of vLLM answers at {urls}")
        if len({found.name for found in known}) > 1:
            names = ", ".join(sorted({found.name for found in known}))
            raise UnsupportedModelError(f"the servers have different models: {names}")
        self._name = known[0].name
        max_model_len = min(found.max_model_len for found in known)
        max_model_len = min(max_model_len, number(entry.max_model_len) or max_model_len)
        tokenizer = load_tokenizer(spec.source, revision=entry.revision)
        settings = read_settings(spec.source, revision=entry.revision)
        generation = _generation_config(spec.source, revision=entry.revision)
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
            summary=f"{len(known)} of {len(self._servers)} server(s) of vLLM answer",
            versions={"engine": "vllm servers", "model": self._name},
        )
        return self._facts

    def _ask(self, server: Server) -> "_Served | None":
        """Return what a server serves; None if it does not answer."""
        request = Request(f"{server.url}{MODELS}", headers=self._headers)
        try:
            with DIRECT.open(request, timeout=CONNECT_S) as response:
                first = json.load(response)["data"][0]
            return _Served(str(first["id"]), int(first["max_model_len"]))
        except HTTPError as error:
            if error.code in REFUSALS:
                raise UnsupportedModelError(
                    f"{server.url}{MODELS} answers with status {error.code}; if the server has a "
                    f"key, set {API_KEY} in the environment of the replicas"
                ) from error
            why: Exception = error
        except (OSError, ValueError, TypeError, LookupError) as error:
            why = error
        logger.warning("%s: %s does not answer: %r", self._spec.id, server.url, why)
        server.rest()
        return None

    def stop(self) -> None:
        """Take no more sequences; those that run end with their blocks."""
        self._is_stopped = True
        if self._session is not None and self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._session.close(), self._loop)

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

    def require_alive(self) -> None:
        """Raise once it was stopped.

        Raises:
            GenerationAbortedError: It was stopped.
        """
        if self._is_stopped:
            raise self._end_error()

    def _end_error(self) -> RaystreamError:
        if self._is_stopped:
            return GenerationAbortedError("the engine was stopped; try again")
        return ReplicaUnavailableError(FAILED)

    async def check_health(self) -> None:
        """Raise unless a server answers; those that don't get no sequence for a while.

        Raises:
            ReplicaUnavailableError: None does.
        """
        answers = await asyncio.gather(*map(self._answers, self._servers))
        if not any(answers):
            raise ReplicaUnavailableError(FAILED)

    async def _answers(self, server: Server) -> bool:
        try:
            async with self._http.get(
                f"{server.url}/health",
                timeout=aiohttp.ClientTimeout(total=CONNECT_S),
                allow_redirects=False,
            ) as response:
                is_well = response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            is_well = False
        if not is_well:
            server.rest()
        return is_well

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

    def unique_id(self, name: str) -> str:
        """Return a unique name for a sequence, since clients may repeat a request id."""
        return f"{name}-{next(self._serial)}"

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
            why = None if self._is_stopped else FAILED
            last = TextDelta((), "", FinishReason.ABORT, why)
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
            ServerLostError: The sequence has been at each, and was lost.
        """
        left = [each for each in self._servers if each.url not in failed]
        if not left or self._is_stopped:
            raise ServerLostError
        now_s = time.monotonic()
        return min(left, key=lambda each: (each.rests_until_s > now_s, each.num_running))

    async def _outputs(
        self, server: Server, sequence: SequenceRequest
    ) -> "AsyncGenerator[_Output, None]":
        """Yield what a server generates for a sequence."""
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
        server.num_running += 1
        try:
            async with self._post(server, body) as response:
                await _require_stream(server, response)
                wait_s = FIRST_TOKEN_S
                while True:
                    async with asyncio.timeout(wait_s):
                        line = await response.content.readline()
                    if not line:
                        return
                    if line.startswith(b"data: {"):
                        for choice in _choices(line):
                            yield _Output([_Gained.of(choice)])
                        wait_s = SILENCE_S
        finally:
            server.num_running -= 1

    def _post(self, server: Server, body: Mapping[str, Any]) -> Any:
        # A redirect would take the key to another server.
        url = f"{server.url}{GENERATE}"
        return self._http.post(url, json=body, allow_redirects=False)

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._loop = asyncio.get_running_loop()
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                # A connection for each sequence, as many as admission lets run.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                read_bufsize=LINE_BYTES,
            )
        return self._session


@dataclass(frozen=True, slots=True)
class _Served:
    """What a server says of itself."""

    name: str
    max_model_len: int


class _Logprob(Protocol):
    @property
    def logprob(self) -> float: ...

    @property
    def rank(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Ranked:
    """See vLLM's Logprob."""

    logprob: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class _Gained:
    """What `Deltas` reads of vLLM's CompletionOutput."""

    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Sequence[Mapping[int, _Logprob]] = ()

    @classmethod
    def of(cls, choice: Mapping[str, Any]) -> "_Gained":
        content = (choice.get("logprobs") or {}).get("content") or ()
        return cls(
            choice.get("token_ids") or (),
            choice.get("finish_reason"),
            choice.get("stop_reason"),
            [
                {
                    each["token_id"]: _Ranked(each["logprob"], each.get("rank"))
                    for each in (*position["top_logprobs"], position)
                }
                for position in content
            ],
        )


@dataclass(frozen=True, slots=True)
class _Output:
    """What `Deltas` reads of vLLM's RequestOutput; servers tell no more in a stream."""

    outputs: list[_Gained]
    num_cached_tokens: int = 0
    metrics: None = None
    prompt_logprobs: Sequence[None] = field(default=())


async def _require_stream(server: Server, response: aiohttp.ClientResponse) -> None:
    """Raise unless a server streams what it was asked for.

    Raises:
        ServerLostError: It can't now; another may.
        ValueError: It refuses the request.
    """
    if response.status == 200:
        return
    text = (await response.text(errors="replace"))[:500]
    if response.status in (400, 422):
        logger.warning("%s refuses a request: %s", server.url, text)
        raise ValueError(f"a server of the model refuses the request (status {response.status})")
    if response.status == 404:
        text += f"; without {GENERATE}, start it with --tokens-only or --enable-scale-out"
    raise ServerLostError(f"status {response.status}: {text}")


def _choices(line: bytes) -> Sequence[Mapping[str, Any]]:
    """Return what an event says of sequences.

    Raises:
        ServerLostError: The connection has ended within the event.
    """
    try:
        return json.loads(line.removeprefix(b"data: ")).get("choices") or ()
    except ValueError as error:
        raise ServerLostError("an event is cut off") from error


def _generation_config(source: str, *, revision: str | None) -> GenerationConfig | None:
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    try:
        return GenerationConfig.from_pretrained(source, **options)
    except OSError:  # a model need not have one
        return None


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
