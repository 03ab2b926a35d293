"""A server of vLLM that somebody else runs, as it is spoken to: questions, and streams of tokens.

Source: vllm/entrypoints/scale_out/token_in_token_out/{protocol,serving}.py of vLLM 0.32
"""

import asyncio
import json
import logging
import operator
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Final, Protocol
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import aiohttp
from aiohttp.http import HttpProcessingError

from deployments.contract.unsupported_model import UnsupportedModelError

logger = logging.getLogger("ray.serve.raystream.replica")

GENERATE: Final = "/inference/v1/generate"
MODELS: Final = "/v1/models"
HEALTH: Final = "/health"
VERSION: Final = "/version"
API_KEY: Final = "VLLM_API_KEY"
"""The variable that holds the servers' key, as it does for vLLM itself."""

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
NUM_TOKEN_IDS: Final = 2**31
"""More than any vocabulary has; vLLM's token ids are int32."""

REFUSALS: Final = {
    401: f"if the server has a key, set {API_KEY} in the environment of the replicas",
    403: f"if the server has a key, set {API_KEY} in the environment of the replicas",
    404: "name the address of a server of vLLM, without a path such as /v1",
}
"""What helps, by the statuses with which a server says that it will never answer this."""


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: another server would be given the key."""

    def redirect_request(self, *args: Any) -> None:
        return None


DIRECT: Final = build_opener(ProxyHandler({}), _NoRedirect)
"""Asks servers themselves, whatever proxy the environment names, as the streams do."""


class ServerLostError(Exception):
    """A server does not answer, or has ended a sequence that it had not finished."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself.

    Attributes:
        name: The model.
        max_model_len: The most tokens of prompt and text.
        version: Of vLLM.
    """

    name: str
    max_model_len: int
    version: str

    @classmethod
    def of(cls, models: Any, version: Any) -> "Served":
        """Read what a server answers to `MODELS` and `VERSION`.

        Raises:
            LookupError, TypeError, ValueError: It does not say that.
        """
        first = models["data"][0]
        return cls(str(first["id"]), int(first["max_model_len"]), str(version["version"]))


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
class Gained:
    """What `Deltas` reads of vLLM's CompletionOutput."""

    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Sequence[Mapping[int, _Logprob]] = ()

    @classmethod
    def of(cls, choice: Mapping[str, Any]) -> "Gained":
        """Read what an event says of a sequence.

        Raises:
            ArithmeticError, AttributeError, LookupError, TypeError, ValueError: It is no choice
                of vLLM's, so nothing of it may reach the text.
        """
        token_ids, reason = choice.get("token_ids") or (), choice.get("finish_reason")
        content = (choice.get("logprobs") or {}).get("content") or ()
        logprobs = [
            {
                each["token_id"]: _Ranked(float(each["logprob"]), _rank_of(each))
                for each in (*position["top_logprobs"], position)
            }
            for position in content
        ]
        if not all(type(each) is int and 0 <= each < NUM_TOKEN_IDS for each in token_ids):
            raise ValueError("a token id is no token id")
        if not isinstance(reason, str | None):
            raise TypeError("a finish reason is no text")
        if logprobs and not all(map(operator.contains, logprobs, token_ids)):
            raise ValueError("a token lacks its log-probability")
        if logprobs and len(logprobs) != len(token_ids):
            raise ValueError("there are log-probabilities of other tokens")
        return cls(token_ids, reason, choice.get("stop_reason"), logprobs)


@dataclass(frozen=True, slots=True)
class Output:
    """What `Deltas` reads of vLLM's RequestOutput; servers tell no more in a stream."""

    outputs: list[Gained]
    num_cached_tokens: int = 0
    metrics: None = None
    prompt_logprobs: Sequence[None] = field(default=())


@dataclass(slots=True)
class Server:
    """A server of vLLM.

    Attributes:
        url: Where it listens.
        num_running: The sequences that it runs for this replica.
        rests_until_s: When it may get sequences again, by the monotonic clock.
        served: What it last said of itself; None if it never has.
    """

    url: str
    num_running: int = 0
    rests_until_s: float = 0.0
    served: Served | None = None

    def rest(self) -> None:
        """Give it no sequence for a while."""
        self.rests_until_s = time.monotonic() + REST_S

    def ask(self, model_id: str) -> Served | None:
        """Return what it serves; None if it does not answer, and then it rests. Blocks.

        Args:
            model_id: The model that asks, for the log.

        Raises:
            UnsupportedModelError: It refuses to say.
        """
        try:
            self.served = Served.of(self._read(MODELS), self._read(VERSION))
            return self.served
        except HTTPError as error:
            error.close()  # it holds the connection
            if error.code in REFUSALS:
                raise UnsupportedModelError(
                    f"{error.url} answers with status {error.code}; {REFUSALS[error.code]}"
                ) from error
            why: Exception = error
        except (OSError, HTTPException, ValueError, TypeError, LookupError) as error:
            why = error
        logger.warning("%s: %s does not answer: %r", model_id, self.url, why)
        self.rest()
        return None

    def _read(self, path: str) -> Any:
        """Return the JSON that it answers a path with. Blocks."""
        request = Request(f"{self.url}{path}", headers=_headers())
        with DIRECT.open(request, timeout=CONNECT_S) as response:
            return json.load(response)

    async def is_well(self, http: aiohttp.ClientSession) -> bool:
        """Return whether it says that it is healthy; otherwise it rests.

        It may have been started again with another model or version, so these are read, too.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                async with http.get(f"{self.url}{HEALTH}", allow_redirects=False) as response:
                    is_well = response.status == 200
                told = []
                for path in (MODELS, VERSION):
                    async with http.get(f"{self.url}{path}", allow_redirects=False) as response:
                        told.append(await response.json())
                self.served = Served.of(*told)
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, LookupError):
            is_well = False
        if not is_well:
            self.rest()
        return is_well

    async def generate(
        self, http: aiohttp.ClientSession, body: Mapping[str, Any]
    ) -> AsyncGenerator[Output, None]:
        """Yield what it generates for a request. Closing the generator aborts that at the server.

        Raises:
            ServerLostError: It can't run the request now, or answers with what is no stream of
                vLLM's; another may.
            TimeoutError: It is silent for too long.
            aiohttp.ClientError: The connection is lost.
            ValueError: It refuses the request.
        """
        self.num_running += 1
        loop = asyncio.get_running_loop()
        until_s = loop.time() + FIRST_TOKEN_S
        try:
            # A redirect would take the key to another server.
            asked = http.post(f"{self.url}{GENERATE}", json=body, allow_redirects=False)
            async with AsyncExitStack() as stack:
                async with asyncio.timeout_at(until_s):  # one that hangs may not even begin
                    response = await stack.enter_async_context(asked)
                    await self._require_stream(response)
                while True:
                    async with asyncio.timeout_at(until_s):
                        line = await _next_line(response)
                    if not line:
                        return
                    if line.startswith(b"data: {"):
                        for gained in _gained(line):
                            yield Output([gained])
                        until_s = loop.time() + SILENCE_S
        finally:
            self.num_running -= 1

    async def _require_stream(self, response: aiohttp.ClientResponse) -> None:
        """Raise unless it streams what it was asked for; see `generate`."""
        if response.status == 200:
            return
        text = (await response.text(errors="replace"))[:500]
        if response.status in (400, 422):
            logger.warning("%s refuses a request: %s", self.url, text)
            raise ValueError(
                f"a server of the model refuses the request (status {response.status})"
            )
        if response.status == 404:
            text += f"; without {GENERATE}, start it with --tokens-only or --enable-scale-out"
        raise ServerLostError(f"status {response.status}: {text}")


def open_session() -> aiohttp.ClientSession:
    """Return a session for all servers, on the running event loop."""
    return aiohttp.ClientSession(
        headers=_headers(),
        # A connection for each sequence, as many as admission lets run.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        read_bufsize=LINE_BYTES,
    )


def _headers() -> dict[str, str]:
    key = os.environ.get(API_KEY)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def _next_line(response: aiohttp.ClientResponse) -> bytes:
    """Return the next line of a stream; none is left if it is empty.

    Raises:
        ServerLostError: The line is too long.
    """
    try:
        return await response.content.readline()
    except (HttpProcessingError, ValueError) as error:
        raise ServerLostError(f"an event has more than {LINE_BYTES} bytes") from error


def _gained(line: bytes) -> list[Gained]:
    """Return what an event says of sequences.

    Raises:
        ServerLostError: The connection has ended within the event, or it is none of vLLM's.
    """
    try:
        event = json.loads(line.removeprefix(b"data: "))
    except (ValueError, RecursionError) as error:
        raise ServerLostError("an event is cut off, or no JSON") from error
    try:
        return [Gained.of(choice) for choice in event.get("choices") or ()]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Without the error's message, which may hold what the model said.
        raise ServerLostError(f"an event is none of vLLM's ({type(error).__name__})") from error


def _rank_of(logprob: Mapping[str, Any]) -> int | None:
    return None if (rank := logprob.get("rank")) is None else int(rank)
