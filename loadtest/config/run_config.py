"""A run's configuration: one strict model, filled from flags, a file, or both.

Fields have the names of the flags. Every form in which people write a value (`1,2,4`, `60s`,
`Name: value`) is parsed here, so flags and files accept the same.
"""

import json
import os
import re
from dataclasses import dataclass
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
from loadtest.config.values import (
    Counts,
    NotNegative,
    Positive,
    PositiveSeconds,
    Rates,
    Seconds,
    Texts,
)
from loadtest.results.redaction import secrets_of_body, secrets_of_url

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Flag:
    """How the command line's help writes a setting's flag: its value, and names besides its own."""

    metavar: str | None = None
    short: str | None = None
    other: str | None = None


class RunConfig(BaseModel):
    """The settings of a run; all durations are in seconds.

    The docstring of a setting is its flag's help, and their order is the help's. A text in
    parentheses at the end says what None or the default means.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    url: str
    """Where requests are sent."""
    queues: Annotated[Counts | None, Flag("N|1,2,4", "-q", "--concurrency")] = None
    """Concurrent users, each with one request at a time; a list is a sweep. (5)"""
    loops: Annotated[Positive | None, Flag("N", "-n")] = None
    """Requests per user. (20)"""
    requests: Annotated[Positive | None, Flag("N")] = None
    """Total requests."""
    duration: Annotated[PositiveSeconds | None, Flag("60s", "-d")] = None
    """How long to send requests."""
    grace: Annotated[Seconds, Flag("30s")] = 30.0
    """How long requests may take to finish after the last is sent. (30s)"""
    ramp: Annotated[Seconds, Flag("0s")] = 0.0
    """Time over which the load rises. (0s)"""
    warmup: Annotated[NotNegative, Flag("N")] = 1
    """Requests sent before each level and not counted. (1)"""
    interval: Annotated[Seconds, Flag("0s")] = 0.0
    """A user's pause between requests. (0s)"""
    repeat: Annotated[Positive, Flag("N")] = 1
    """How many times to run the sweep. (1)"""
    rate: Annotated[Rates | None, Flag("R|1,2,4")] = None
    """Requests sent per second, however slow the server; a list is a sweep."""
    arrival: Annotated[Arrival, Flag("poisson|constant")] = Arrival.POISSON
    """How requests are spaced. (poisson)"""
    max_inflight: Annotated[Positive | None, Flag("N")] = None
    """The most requests in flight at once."""
    data: Annotated[Path | None, Flag("FILE")] = None
    """File of questions: .json, .jsonl or .txt; ShareGPT's and OpenAI's batches, too.
    (100 built-in ones)"""
    order: Annotated[Order, Flag("random|shuffled|sequential")] = Order.RANDOM
    """Order of the questions. (random)"""
    seed: Annotated[int, Flag("N")] = 0
    """Seed of all random choices. (0)"""
    unique: bool = False
    """Give each question its own prefix, to defeat prefix caches."""
    images: Annotated[Path | None, Flag("DIR")] = None
    """Directory; one of its images is sent with each question."""
    users: Annotated[NotNegative, Flag("N")] = 100
    """How many different user names to send. (100)"""
    max_tokens: Annotated[Positive | None, Flag("N")] = None
    """Most tokens per answer."""
    temperature: Annotated[Annotated[float, Field(ge=0, allow_inf_nan=False)] | None, Flag("T")] = (
        None
    )
    """Sampling temperature."""
    api: Annotated[ApiName, Flag("NAME")] = ApiName.AUTO
    """auto, openai-chat, openai-completions, text-generation, classify or custom.
    (auto: from the URL's path)"""
    model: Annotated[str | None, Flag("NAME")] = None
    """Model to ask for. (the server's first)"""
    body: Annotated[dict[str, Any] | None, Flag("@t.json|JSON")] = None
    """For custom: the body, with {text}, {messages}, {user}, {index}, {image_url}.
    Otherwise: fields that override the body's."""
    text_path: Annotated[str | None, Flag("JMESPATH")] = None
    """For custom: path of the text in an event."""
    done: Annotated[str, Flag("TEXT")] = "[DONE]"
    """For custom: data of the last event; '' if the stream just ends. ('[DONE]')"""
    header: Annotated[Texts, Flag("'NAME: VALUE'", "-H")] = ()
    """Header to send with each request. Repeatable."""
    api_key_env: Annotated[str | None, Flag("NAME")] = None
    """Environment variable that holds the API key."""
    timeout: Annotated[PositiveSeconds, Flag("180s")] = 180.0
    """Time limit of a request. (180s)"""
    first_token_timeout: Annotated[PositiveSeconds | None, Flag("5s")] = None
    """Time limit to the first text."""
    stall_timeout: Annotated[PositiveSeconds | None, Flag("5s")] = None
    """Time limit between texts."""
    slo: Annotated[Texts, Flag("NAME:MS ...")] = ()
    """Objectives of a good request, in ms, such as ttft:2000 tpot:100 e2e:30000."""
    fail_if: Annotated[Texts, Flag("'ttft.p95>2000'")] = ()
    """Exit with 99 if this holds. Repeatable."""
    max_error_rate: Annotated[float, Field(ge=0, le=1), Flag("0..1")] = 0.0
    """Exit with 1 above this share of errors. (0)"""
    out: Annotated[Path | None, Flag("DIR")] = None
    """Directory of the results. (runs/<time>/)"""
    png: bool = False
    """Write the plots as PNG too."""
    gpu: Annotated[GpuSampling, Flag("auto|on|off")] = GpuSampling.AUTO
    """Sample this machine's GPUs. (auto)"""

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
            raise ValueError(f"{' and '.join(given)} can't be combined; give one of them")
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
            raise ValueError("the URL's user and an Authorization header can't be combined")

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
