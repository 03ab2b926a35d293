"""A run's configuration: one strict model, filled from flags, a file, or both.

Fields have the names of the flags. Every form in which people write a value (`1,2,4`, `60s`,
`Name: value`) is parsed here, so flags and files accept the same.
"""

import json
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from yarl import URL

from loadtest.analysis.objectives import parse_objective
from loadtest.analysis.thresholds import parse_threshold
from loadtest.config.choices import ApiName, Arrival, GpuSampling, Order, api_of_path
from loadtest.config.values import Counts, PositiveSeconds, Rates, Seconds, Texts
from loadtest.results.redaction import secrets_of_body, secrets_of_url

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class RunConfig(BaseModel):
    """The settings of a run; all durations are in seconds.

    Attributes:
        url: Where requests are sent.
        queues: Concurrent users, each with one request at a time; several values make a sweep.
        loops: Requests that each queue sends.
        requests: Total requests per level; excludes `loops` and `duration`.
        duration: How long requests are sent; excludes `loops` and `requests`.
        grace: How long requests in flight may then take to finish.
        interval: A queue's pause between its requests.
        rate: Requests sent per second, however slow the server is; several values make a sweep.
        arrival: How the requests of a rate are spaced.
        max_inflight: The most requests in flight at once.
        ramp: The time over which the queues start, or the rate rises.
        warmup: Requests sent before each level and not counted.
        data: The file of questions; None uses the questions that ship with the tool.
        order: The order in which questions are asked.
        seed: The seed of all random choices.
        unique: Whether each question gets a prefix of its own, so that no prefix is cached.
        images: A directory; one of its images is sent with each question.
        users: How many different user names requests carry.
        api: The kind of server.
        body: Fields that override the request body; for `custom` the whole body.
        text_path: For `custom`: the JMESPath of the text.
        done: For `custom`: the data of the last event; "" if the end of the stream is the end.
        model: None asks the server for its first model.
        max_tokens: None leaves it to the server.
        temperature: None leaves it to the server.
        header: Headers sent with each request, as `Name: value`.
        api_key_env: The environment variable that holds the key.
        timeout: The time limit of a whole request.
        first_token_timeout: The time limit from sending to the first content.
        stall_timeout: The time limit from one content event to the next.
        slo: The objectives of a good request, such as `ttft:2000`, in ms.
        fail_if: Conditions that make the run fail, such as `ttft.p95>2000`.
        max_error_rate: The largest share of failed requests with which the run still passes.
        out: The directory of the results; it must not hold a run yet.
        repeat: How often the sweep is run.
        gpu: Whether this machine's GPUs are sampled.
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
            raise ValueError(
                f"{url!r} is not a URL such as http://127.0.0.1:8000/v1/chat/completions"
            )
        return url

    @field_validator("body", mode="before")
    @classmethod
    def _read_body(cls, body: Any) -> Any:
        """Parse JSON, or the file named by `@name`."""
        if not isinstance(body, str):
            return body
        try:
            return json.loads(Path(body[1:]).read_text() if body.startswith("@") else body)
        except (OSError, ValueError) as error:
            raise ValueError(f"neither JSON nor the @NAME of a JSON file: {error}") from None

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
            raise ValueError(f"{' and '.join(given)} exclude each other; give one of them")
        if self.rate is not None and (self.queues is not None or self.loops is not None):
            raise ValueError("rate sends an open loop, which has neither queues nor loops")
        if self.rate is None and "arrival" in self.model_fields_set:
            raise ValueError("arrival needs rate")
        if self.duration is not None and self.ramp >= self.duration:
            raise ValueError("ramp must be shorter than duration")
        self._check_api()
        return self

    def _check_api(self) -> None:
        is_custom = self.resolved_api() is ApiName.CUSTOM
        if is_custom and self.body is None:
            raise ValueError("the API custom needs a body, such as --body @template.json")
        if self.text_path is not None and not is_custom:
            raise ValueError("text_path needs the API custom; add --api custom")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(f"the environment variable {self.api_key_env} is not set")
        url = URL(self.url)
        if (url.user or url.password) and "authorization" in map(str.lower, self.headers()):
            raise ValueError("the URL's user and an Authorization header exclude each other")

    def resolved_api(self) -> ApiName:
        """Return the kind of server, taken from the URL's path if it is `auto`.

        Raises:
            ValueError: The path belongs to no known API.
        """
        return api_of_path(URL(self.url).path) if self.api is ApiName.AUTO else self.api

    def headers(self) -> dict[str, str]:
        """Return the headers sent with each request, including the key."""
        parted = (header.partition(":") for header in self.header)
        headers = {name.strip(): value.strip() for name, _, value in parted}
        key = os.environ.get(self.api_key_env) if self.api_key_env is not None else None
        if key is None:
            return headers
        others = {name: v for name, v in headers.items() if name.lower() != "authorization"}
        return {**others, "Authorization": f"Bearer {key}"}

    def secrets(self) -> list[str]:
        """Return the texts to keep out of all files: header values, keys in the URL and body."""
        values = [*self.headers().values(), *secrets_of_url(self.url), *secrets_of_body(self.body)]
        words = [word for value in values for word in (value, *value.split())]
        return sorted({word for word in words if len(word) >= 8}, key=len, reverse=True)
