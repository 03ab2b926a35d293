"""What a run is to do: one strict model, filled from flags, from a file, or from both.

The names are those of the flags. A value that could be a list is one; every other form in which
people write it (`1,2,4`, `60s`, `Name: value`) is read here, so that flags and files take the same.
"""

import json
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from yarl import URL

from loadtest.analysis.objectives import parse_objective
from loadtest.apis.by_path import ApiName, api_of_path
from loadtest.durations import PositiveSeconds, Seconds
from loadtest.load.asker import Order
from loadtest.redaction import secrets_of_body, secrets_of_url
from loadtest.thresholds import parse_threshold


class Arrival(StrEnum):
    """How the requests of a rate follow each other."""

    POISSON = "poisson"
    CONSTANT = "constant"


class GpuSampling(StrEnum):
    """Whether this machine's GPUs are watched."""

    AUTO = "auto"
    """Where there is an nvidia-smi."""
    ON = "on"
    OFF = "off"


def _listed(value: Any) -> Any:
    """Split `1,2,4`; a single value becomes a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list | tuple) or value is None else [value]


def _one_or_more(value: Any) -> Any:
    """Make a list of a single value, or of a mapping's pairs; expressions may hold commas."""
    if isinstance(value, Mapping):
        return [f"{name}: {each}" for name, each in value.items()]
    return [value] if isinstance(value, str) else value


_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_listed)]
Rates = Annotated[
    tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], BeforeValidator(_listed)
]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]


class RunConfig(BaseModel):
    """A whole run.

    Attributes:
        url: Where requests go.
        queues: Users at once, each with one request at a time; several make a sweep.
        loops: Requests of each queue.
        requests: Requests in all, instead.
        duration: How long requests are sent, instead.
        grace: How long what is under way then may go on.
        interval: A queue's pause between its requests.
        rate: Requests per second, whatever becomes of them; several make a sweep.
        arrival: How they follow each other.
        max_inflight: Requests under way at once, at most.
        ramp: Over how long the queues start, or the rate rises.
        warmup: Requests in front of each level that do not count.
        data: The questions; those that ship with the tool by default.
        order: How they are drawn.
        seed: Gives the same draws again.
        unique: Each question begins in its own way, so that no prefix is cached.
        images: A directory; one of its images goes along with each question.
        users: From how many users requests come.
        api: What kind of server it is.
        body: Fields laid over the body; for `custom` all of it.
        text_path: For `custom`: where the text is.
        done: For `custom`: the data of the last event; "" if the stream's end tells.
        model: None asks the server for its first one.
        max_tokens: None leaves it to the server.
        temperature: None leaves it to the server.
        header: Sent with each request, as `Name: value`.
        api_key_env: The environment variable that holds the key.
        timeout: For a whole request.
        first_token_timeout: For the first content.
        stall_timeout: For the next content.
        slo: What a request has to meet to be good, such as `ttft:2000`, in ms.
        fail_if: What makes the run fail, such as `ttft.p95>2000`.
        max_error_rate: The share of failed requests that is still fine.
        out: The directory of the results; it must not hold a run yet.
        repeat: How often the sweep is run.
        gpu: Whether this machine's GPUs are watched.
        png: Whether plots are written as PNG too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    url: str
    queues: Counts | None = None
    loops: Annotated[int, Field(ge=1)] | None = None
    requests: Annotated[int, Field(ge=1)] | None = None
    duration: PositiveSeconds | None = None
    grace: Seconds = 30.0
    interval: Seconds = 0.0
    rate: Rates | None = None
    arrival: Arrival = Arrival.POISSON
    max_inflight: Annotated[int, Field(ge=1)] | None = None
    ramp: Seconds = 0.0
    warmup: Annotated[int, Field(ge=0)] = 1
    data: Path | None = None
    order: Order = Order.RANDOM
    seed: int = 0
    unique: bool = False
    images: Path | None = None
    users: Annotated[int, Field(ge=0)] = 100
    api: ApiName = ApiName.AUTO
    body: dict[str, Any] | None = None
    text_path: str | None = None
    done: str = "[DONE]"
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    header: Texts = ()
    api_key_env: str | None = None
    timeout: PositiveSeconds = 180.0
    first_token_timeout: PositiveSeconds | None = None
    stall_timeout: PositiveSeconds | None = None
    slo: Texts = ()
    fail_if: Texts = ()
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    out: Path | None = None
    repeat: Annotated[int, Field(ge=1)] = 1
    gpu: GpuSampling = GpuSampling.AUTO
    png: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                near = get_close_matches(str(key), cls.model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown key {key!r}{hint}")
        return data

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parsed = URL(url)
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise ValueError(f"{url!r} is no URL such as http://127.0.0.1:8000/v1/chat/completions")
        return url

    @field_validator("body", mode="before")
    @classmethod
    def _read_body(cls, body: Any) -> Any:
        """Read JSON, or the file that `@name` names."""
        if not isinstance(body, str):
            return body
        try:
            return json.loads(Path(body[1:]).read_text() if body.startswith("@") else body)
        except (OSError, ValueError) as error:
            raise ValueError(f"neither JSON nor @FILE with JSON in it: {error}") from None

    @field_validator("header")
    @classmethod
    def _check_headers(cls, headers: tuple[str, ...]) -> tuple[str, ...]:
        for header in headers:
            name, colon, value = header.partition(":")
            if not colon or not _HEADER_NAME.fullmatch(name.strip()) or _CONTROL.search(value):
                raise ValueError("a header is written 'Name: value'")
        return headers

    @field_validator("slo", "fail_if")
    @classmethod
    def _check_expressions(cls, texts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for text in texts:
            if info.field_name == "slo":
                parse_objective(text)
            else:
                parse_threshold(text)
        return texts

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        limits = {"loops": self.loops, "requests": self.requests, "duration": self.duration}
        given = [name for name, value in limits.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other")
        if self.rate is not None and (self.queues is not None or self.loops is not None):
            raise ValueError("rate is an open loop, which has no queues and no loops of theirs")
        if self.rate is None and "arrival" in self.model_fields_set:
            raise ValueError("arrival means nothing without rate")
        if self.duration is not None and self.ramp >= self.duration:
            raise ValueError("ramp takes all of the duration")
        self._check_api()
        return self

    def _check_api(self) -> None:
        is_custom = self.resolved_api() is ApiName.CUSTOM
        if is_custom and self.body is None:
            raise ValueError("the api custom needs a body, such as --body @template.json")
        if self.text_path is not None and not is_custom:
            raise ValueError("text_path is for the api custom; say --api custom")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(f"the environment variable {self.api_key_env} is not set")
        url = URL(self.url)
        if (url.user or url.password) and "authorization" in map(str.lower, self.headers()):
            raise ValueError("the URL's user and an Authorization header exclude each other")

    def resolved_api(self) -> ApiName:
        """Return the kind of server, found by the URL's path if it is not given.

        Raises:
            ValueError: The path is none that is known.
        """
        return api_of_path(URL(self.url).path) if self.api is ApiName.AUTO else self.api

    def headers(self) -> dict[str, str]:
        """Return what is sent with each request, the key included."""
        parted = (header.partition(":") for header in self.header)
        headers = {name.strip(): value.strip() for name, _, value in parted}
        key = os.environ.get(self.api_key_env) if self.api_key_env is not None else None
        if key is None:
            return headers
        others = {name: v for name, v in headers.items() if name.lower() != "authorization"}
        return {**others, "Authorization": f"Bearer {key}"}

    def secrets(self) -> list[str]:
        """Return what must never be written down: values of headers, keys in URL and body."""
        values = [*self.headers().values(), *secrets_of_url(self.url), *secrets_of_body(self.body)]
        words = [word for value in values for word in (value, *value.split())]
        return sorted({word for word in words if len(word) >= 8}, key=len, reverse=True)
