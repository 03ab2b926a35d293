"""Asks a server with OpenAI's API, and says in words what went wrong.

Any such server will do. raystream also sends comments, such as `moved`, and the number of
tokens so far in each chunk, if the request asks for that.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import aiohttp

from serve_app.client.event_reader import Comment, EventReader, OversizedEventError

CONNECT_S: Final = 10
SILENCE_S: Final = 300
"""Longer than any server that sends comments is silent: raystream sends one every 15 s."""

PING: Final = "ping"
DONE: Final = "[DONE]"

KEY_HINT: Final = "set RAYSTREAM_API_KEY, or give --api-key"
NO_ANSWER: Final = (
    "nothing answers at {url}; start a server by `raystream serve`, or name one by --url"
)
LOST: Final = "the connection was lost before the end of the answer"


class ChatError(Exception):
    """The server can't be asked, or does not answer; the message says what to do."""


class UnavailableError(ChatError):
    """The same request may succeed later: the server is starting, full, or was cut off."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request has taken."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What a chunk adds to an answer.

    Attributes:
        answer_id: The answer's id.
        text: More text.
        reasoning: More of the model's reasoning.
        finish_reason: Why the answer ends here; None if it goes on.
        usage: The tokens so far; None if the chunk does not tell.
    """

    answer_id: str
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """A comment of the server between two chunks, such as `moved`."""

    text: str


class ChatClient:
    """Asks one server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Address a server.

        Args:
            url: Where its API begins; without a path, `/v1` is added.
            api_key: Sent with each request.

        Raises:
            ChatError: The URL is none, or the key can't be one.
        """
        self.url = _api_url(url)
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ChatError("the API key has characters other than printable ASCII")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def first_generator(self) -> str:
        """Return the id of the first model that generates text.

        Raises:
            ChatError: There is none, or the server can't be asked.
        """
        listed = await self.get("/models")
        models = listed.get("data") or []
        # Servers other than raystream name no task.
        ids = [str(each["id"]) for each in models if each.get("task", "generate") == "generate"]
        if not ids:
            raise ChatError(f"no model at {self.url} generates text")
        return ids[0]

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object below a path.

        Raises:
            ChatError: There is none, or the server can't be asked.
        """
        async with self._requested("GET", path, None) as response:
            return await self._object(response)

    async def post(self, path: str, body: Mapping[str, Any] | aiohttp.FormData) -> dict[str, Any]:
        """Send JSON or a form below a path, and return the JSON object that is answered.

        Raises:
            ChatError: It was refused, or the server can't be asked.
        """
        async with self._requested("POST", path, body) as response:
            return await self._object(response)

    async def pieces(self, path: str) -> AsyncGenerator[bytes, None]:
        """Yield the contents below a path as they come.

        Raises:
            ChatError: There are none, or the server can't be asked.
        """
        async with self._requested("GET", path, None) as response:
            async for piece in response.content.iter_any():
                yield piece

    async def _object(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        try:
            found = json.loads(await response.read())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ChatError(f"{response.url} does not speak OpenAI's API")
        return found

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Delta | Notice, None]:
        """Ask for a chat completion; yield what it brings until it is complete.

        Args:
            body: The request; `stream` is added.

        Raises:
            ChatError: It was refused, or broke off.
        """
        reader = EventReader()
        async with self._requested(
            "POST", "/chat/completions", {**body, "stream": True}
        ) as response:
            if response.content_type != "text/event-stream":
                raise ChatError(f"{self.url} does not stream its answers")
            async for piece in response.content.iter_any():
                for each in reader.feed(piece):
                    if isinstance(each, Comment):
                        if each.text != PING:
                            yield Notice(each.text)
                    elif each.data == DONE:
                        return
                    else:
                        yield _delta(each.data)
        raise ChatError(LOST)

    @asynccontextmanager
    async def _requested(
        self, method: str, path: str, body: Mapping[str, Any] | aiohttp.FormData | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=SILENCE_S)
        sent: dict[str, Any] = (
            {"data": body} if isinstance(body, aiohttp.FormData) else {"json": body}
        )
        try:
            async with (
                # A connection for each request: a kept-alive one may be dead by the next.
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.request(method, f"{self.url}{path}", **sent) as response,
            ):
                if response.status != 200:
                    await self._refuse(response)
                yield response
        except aiohttp.ClientConnectorCertificateError as error:
            raise ChatError(f"the certificate of {self.url} is not valid: {error}") from error
        except aiohttp.ClientConnectorError as error:
            raise UnavailableError(NO_ANSWER.format(url=self.url)) from error
        except TimeoutError as error:
            raise UnavailableError(f"{self.url} does not answer in time") from error
        except OversizedEventError as error:
            raise ChatError(f"{self.url} sends {error}") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(LOST) from error

    async def _refuse(self, response: aiohttp.ClientResponse) -> NoReturn:
        message = _message_of(await response.text(errors="replace"))
        status, retry_after = response.status, response.headers.get("Retry-After")
        message = message or f"{response.url} answers with status {status}, {response.reason}"
        if status == 401:
            message += f" ({KEY_HINT})"
        elif retry_after is not None and f"{retry_after} s" not in message:
            message += f" (try again in {retry_after} s)"
        raise (UnavailableError if status == 429 or status >= 500 else ChatError)(message)


def _api_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ChatError(f"{url!r} is no URL; write one such as http://127.0.0.1:8000/v1")
    return url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"


def _message_of(text: str) -> str | None:
    """Return the message of an error in OpenAI's shape; None if the text is none."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return None
    return str(message)


def _delta(data: str) -> Delta:
    """Return what an event tells.

    Raises:
        ChatError: It is an error, or no chunk.
    """
    if (message := _message_of(data)) is not None:
        raise ChatError(message)
    try:
        chunk = json.loads(data)
        choice = chunk["choices"][0] if chunk["choices"] else {}
        told = choice.get("delta") or {}
        usage = chunk.get("usage")
        return Delta(
            answer_id=str(chunk.get("id", "")),
            text=told.get("content") or "",
            # vLLM has renamed the field.
            reasoning=told.get("reasoning_content") or told.get("reasoning") or "",
            finish_reason=choice.get("finish_reason"),
            usage=usage and Usage(usage["prompt_tokens"], usage["completion_tokens"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ChatError("the server sends events that are no chunks of an answer") from error
