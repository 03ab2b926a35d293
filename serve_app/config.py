"""The configuration under `args:` in serve_config.yaml.

Every limit is defined here but those of a model's entry, which its replicas share
(`deployments.contract.model_spec`). An unknown key is refused, and the error suggests the nearest
known one. `make table` makes docs/configuration.md from the fields and the docstrings below them.
`serve_app.commands.check.check` checks Ray's own sections of the file.
"""

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deployments.contract.claims import PRIORITY_AGING_S
from deployments.contract.model_spec import ModelConfig
from deployments.contract.sampling_params import MAX_NUM_STOPS
from deployments.contract.strict_model import StrictModel
from deployments.contract.telemetry.tracing import TracingSettings

INGRESS_NAME = "Ingress"
"""The ingress's deployment in Ray."""

LEDGER_NAME = "KeyLedger"
"""The deployment that counts what each API key uses."""

MODELS_NAME = "ServedModels"
"""The deployment that describes the models of an application without an ingress of ours."""

Origin = Annotated[str, Field(max_length=1024, pattern=r"^(\*|https?://[^/?#@\s*]+)$")]
"""Where a web page comes from; `*` stands for anywhere."""

Domain = Annotated[
    str,
    Field(max_length=253, pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z][a-z0-9-]*[a-z0-9]$"),
]
"""A host's name in lower case, not an IP address."""

MAX_NUM_CHOICES = 16
"""The highest `max_num_choices`: each answer is a sequence of its own on a replica."""

MAX_NUM_TOOLS = 1024
"""The highest `max_num_tools`: longer lists are refused without being read."""

MAX_NUM_TEXTS = 8192
"""The highest `max_num_texts`: longer lists are refused without being read."""


MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
"""The bounds of a request's priority; lower runs first. vLLM takes 64 bits, too many for a time."""


def model_id_of(source: str, num_parts: int = 1) -> str:
    """Return an id that a model gets by its folder or hub repository.

    Args:
        source: The folder or the repository.
        num_parts: How many of the last parts of its path the id has.
    """
    # These raise nothing for a path that the system refuses, of which the check tells.
    folder = os.path.expanduser(source)
    path = Path(os.path.abspath(folder)) if os.path.isdir(folder) else Path(source)
    parts = [part for part in path.parts if part != "/"][-num_parts:]
    named = "/".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in parts)
    return named.strip("-._/")[:96] or "model"


class LimitsConfig(StrictModel):
    """The limits on one request. An error names the limit that was exceeded."""

    max_header_bytes: int = Field(default=16 * 2**10, ge=1024)
    """Size of all names and values of a request's headers together."""
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """Size of a request's body."""
    max_body_read_s: float = Field(default=30, gt=0, allow_inf_nan=False)
    """How long a client may take to send its body."""
    max_json_depth: int = Field(default=64, ge=8, le=256)
    """How deeply objects and lists may be nested."""
    max_prompt_bytes: int = Field(default=2**20, ge=1)
    """UTF-8 bytes of all prompts and messages, with the arguments of earlier calls, or of all texts
    or pieces of a request; counted before they are tokenized.
    """
    clamp_max_tokens: bool = True
    """Whether a `max_tokens` that is more than the prompt leaves of the model's length is lowered
    to that, as many clients expect; otherwise it is refused.
    """
    max_num_messages: int = Field(default=1024, ge=1)
    """Messages of one conversation."""
    max_num_choices: int = Field(default=MAX_NUM_CHOICES, ge=1, le=MAX_NUM_CHOICES)
    """Answers to one request (`n`)."""
    max_num_stops: int = Field(default=16, ge=0, le=MAX_NUM_STOPS)
    """Strings in `stop`."""
    max_stop_bytes: int = Field(default=1024, ge=1)
    """UTF-8 bytes of one string in `stop`."""
    max_num_images: int = Field(default=8, ge=0)
    """Images in one request."""
    max_image_bytes: int = Field(default=16 * 2**20, ge=1)
    """Bytes of one encoded image."""
    max_image_pixels: int = Field(default=16 * 2**20, ge=1)
    """Pixels of one image, checked before it is decoded."""
    allowed_image_domains: tuple[Domain, ...] = ()
    """Hosts from which images are fetched by https, each named exactly; if there are none, only
    `data:` URIs are accepted.
    """
    image_fetch_timeout_s: float = Field(default=5, gt=0, allow_inf_nan=False)
    """Most seconds from looking up an image's host to the last byte."""
    first_token_timeout_s: float | None = Field(default=600, gt=0, allow_inf_nan=False)
    """Most seconds from a request to the first token of each of its texts, including the wait for
    its turn; null sets no limit.
    """
    stall_timeout_s: float | None = Field(default=120, gt=0, allow_inf_nan=False)
    """Most seconds from one token to the next, without those for which the answer was parked or
    waited for another replica; null sets no limit.
    """
    total_timeout_s: float | None = Field(default=3600, gt=0, allow_inf_nan=False)
    """Most seconds from a request to the end of its answer; requests to classify, embed or rank
    texts have only this time limit. null sets no limit.
    """
    failover_timeout_s: float = Field(default=90, gt=0, allow_inf_nan=False)
    """Most seconds from the loss of an answer's replica until another goes on with it, or begins
    anew if nothing had come; or twice the slowest start of the model's replicas, if that is more.
    """
    priority_aging_s: float = Field(default=PRIORITY_AGING_S, gt=0, allow_inf_nan=False)
    """Seconds of waiting that are worth one step of priority: a request goes before those of a
    priority better by one that came more than so much later. So none waits for ever.
    """
    max_parked: int = Field(default=256, ge=0)
    """Answers of one model that have begun and wait at an ingress to go on, because others run that
    have a better priority, or a key with less than its share. Beyond it, new requests are refused,
    unless their priority is better than that of all these, or their key has less than its part.
    """
    slow_reader_timeout_s: float | None = Field(default=30, gt=0, allow_inf_nan=False)
    """Most seconds that a client may leave a stream unread while there is more to send; then it
    loses the stream. null waits forever.
    """
    max_sockets: int = Field(default=256, ge=0)
    """WebSockets that an ingress holds open; further ones are told to ask by HTTP. 0 speaks HTTP
    only.
    """
    max_socket_s: float = Field(default=3600, gt=0, allow_inf_nan=False)
    """Most seconds that a WebSocket stays open. An answer that runs then is finished."""
    max_num_tools: int = Field(default=128, ge=0, le=MAX_NUM_TOOLS)
    """Tools that one request may offer to the model."""
    max_tools_bytes: int = Field(default=64 * 2**10, ge=0)
    """Size of the names, descriptions and schemas of a request's tools together, as JSON."""
    max_schema_bytes: int = Field(default=2**16, ge=2, le=2**19)
    """Size of one JSON schema, regular expression, grammar or list of choices."""
    max_schema_depth: int = Field(default=32, ge=1, le=100)
    """How deeply the brackets of a schema may be nested; an object in an object takes two.
    `max_json_depth` also counts the brackets of the body around it.
    """
    max_schema_compile_s: int = Field(default=1, ge=1, le=60)
    """Seconds of CPU time that compiling one schema or grammar may take."""
    max_num_prompts: int = Field(default=64, ge=1)
    """Texts that one completions request may ask for: its prompts, each `n` times. Each is a
    sequence of its own.
    """
    max_num_texts: int = Field(default=2048, ge=1, le=MAX_NUM_TEXTS)
    """Texts of one request to classify, embed or rank them. OpenAI takes 2048."""
    max_num_pieces: int = Field(default=8192, ge=1)
    """Pieces that all texts of one classification request may be split into."""


class StructuredOutputsConfig(StrictModel):
    """How the schemas and grammars of requests are read."""

    closed_objects: bool = True
    """Whether an object that lists `properties`, and says nothing of others, has no others. By the
    standard it may have any, and models then write on.
    """


class Scope(StrEnum):
    """What a key may do besides using the models."""

    OPERATE = "operate"
    """See what all users of the server do; `serve_app.keys.access` checks it."""


Limit = Annotated[int | None, Field(ge=1)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]


class ApiKey(StrictModel):
    """One key."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")
    """Names the key in the access log and in metrics."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The key's SHA-256, in hexadecimal."""
    requests_per_minute: Limit = None
    """Limit on POST requests; null sets no limit, here and in the next two."""
    tokens_per_minute: Limit = None
    """Limit on tokens of prompts and answers together."""
    max_concurrent_streams: Limit = None
    """Limit on POST requests that run at the same time."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """The key's share of a busy model beside the others': a key of weight 3 gets three times the
    tokens of a key of weight 1.
    """
    priority: Priority = 0
    """The priority of requests that name none; lower runs first."""
    best_priority: Priority | None = None
    """The best priority that a request may name; null means `priority`."""
    scopes: tuple[Scope, ...] = ()
    """What the key may do besides using the models: `operate` sees what all users do."""

    @field_validator("best_priority")
    @classmethod
    def _check_best(cls, best: int | None, info: ValidationInfo) -> int | None:
        if best is not None and best > info.data.get("priority", best):
            raise ValueError("lower runs first, so it must not be more than priority")
        return best

    @field_validator("scopes", mode="before")
    @classmethod
    def _refuse_a_word(cls, scopes: Any) -> Any:
        if isinstance(scopes, str):
            raise ValueError(f"write a list: [{Scope.OPERATE}]")
        return scopes

    @property
    def is_limited(self) -> bool:
        """Whether the key has any limit."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent_streams)
        return limits != (None, None, None)


Objective = Annotated[str, Field(min_length=1, max_length=253)]
"""The name of an InferenceObjective."""


class AuthConfig(StrictModel):
    """Authentication. Without keys, the server must listen only on this machine."""

    api_keys: tuple[ApiKey, ...] = ()
    """Hashed keys, as in a file of keys. `raystream serve --api-key` writes one here."""
    api_keys_file: str | None = Field(default=None, min_length=1)
    """A YAML file of hashed keys. The environment variable `RAYSTREAM_API_KEYS` adds keys to it or
    takes its place: `name:sha256` pairs with commas between them, or one plain key.
    """
    allow_anonymous: bool = False
    """true serves every client that can reach the port, without keys. false refuses to start on
    another host than this machine unless there are keys.
    """
    allowed_hosts: tuple[Domain, ...] = ()
    """Names under which clients may ask a server that has no keys and listens only on this machine,
    such as that of a proxy in front which passes `Host` on. Otherwise only IP addresses, names
    without a dot and those that end in .localhost, .local or .internal: any other may be a web
    page's that was pointed at this machine.
    """
    trusted_gateway: bool = False
    """true takes a request's tenant and priority from the headers of a gateway: the fairness id
    and the objective of the Gateway API inference extension. Only for a server that no client
    reaches without that gateway, which must set or remove these headers.
    """
    objectives: dict[Objective, Priority] | None = None
    """The priority of each objective that the gateway may name; lower runs first, while the
    extension's higher numbers do. null names none; an objective without a priority changes nothing.
    """
    allow_unauthenticated_ray: bool = False
    """true starts even on a Ray that asks for no token, where anyone who can reach one of Ray's
    ports can run code on its nodes.
    """

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        for key in ("api_keys", "api_keys_file"):
            if getattr(self, key) and self.allow_anonymous:
                raise ValueError(
                    f"{key} and allow_anonymous: true contradict each other; leave one out"
                )
        if self.objectives and not self.trusted_gateway:
            raise ValueError("objectives have no effect without trusted_gateway: true")
        return self


class CorsConfig(StrictModel):
    """Which web pages may call the server from a browser (CORS); those of no other origin do."""

    allowed_origins: tuple[Origin, ...] = ()
    """Origins of pages, each named exactly, such as https://chat.example.org, or `*` alone for any
    page. Without keys, such a page can use the server of the user who opens it.
    """

    @model_validator(mode="after")
    def _check_star(self) -> Self:
        if "*" in self.allowed_origins and len(self.allowed_origins) > 1:
            raise ValueError("allowed_origins: '*' allows any page; leave the others out")
        return self


class TracingConfig(StrictModel):
    """Traces of requests, for an OpenTelemetry collector; off unless there is an endpoint."""

    otlp_endpoint: str | None = Field(
        default=None, max_length=2048, pattern=r"^https?://[^/?#@\s]+(/[^?#@\s]*)?$"
    )
    """The collector's URL for OTLP over HTTP, such as http://collector:4318; spans go to
    `/v1/traces` below it. Credentials come from the environment variable
    OTEL_EXPORTER_OTLP_HEADERS.
    """
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """The part of the requests that are traced, from 0 to 1. A request whose client sends a
    `traceparent` is traced if that says so, whatever the ratio.
    """

    @property
    def settings(self) -> TracingSettings | None:
        """The settings for each process; None if tracing is off."""
        if self.otlp_endpoint is None:
            return None
        return TracingSettings(self.otlp_endpoint, self.sample_ratio)


class JobsConfig(StrictModel):
    """Files, batches and responses that are kept on disk; off unless there is a folder."""

    folder: str | None = Field(default=None, min_length=1)
    """The folder for files, batches and responses, as an absolute path; its parent must exist.
    It holds prompts and answers, and only the server's user may enter it. All ingresses must run on
    one node. null keeps nothing on disk, and what needs the store is refused.
    """
    expires_after_s: float = Field(default=30 * 86400, ge=3600, le=3650 * 86400)
    """Seconds after which a file is erased, a batch that long after its end, and a response that
    long after it was created or another was asked to follow it.
    """
    store_responses_by_default: bool = True
    """Whether a response is stored whose request does not say `store`, as at OpenAI. Whoever must
    not keep prompts sets false: then only `store: true` stores one.
    """
    max_file_bytes: int = Field(default=200 * 2**20, ge=1024)
    """Size of one file that is uploaded."""
    max_stored_bytes: int = Field(default=4 * 2**30, ge=1024)
    """Size of all files and results of one API key, or of all clients without keys; so in the next
    four. A batch whose results have no room fails, and keeps those that it has.
    """
    max_num_files: int = Field(default=10_000, ge=1)
    """Files of one API key."""
    max_num_batches: int = Field(default=10_000, ge=1)
    """Batches of one API key, ended ones included."""
    max_num_responses: int = Field(default=100_000, ge=1)
    """Stored responses of one API key."""
    max_responses_bytes: int = Field(default=4 * 2**30, ge=1024)
    """Size of all stored responses of one API key, with their input and their events."""
    max_num_lines: int = Field(default=50_000, ge=1)
    """Requests of one batch."""
    max_running_lines: int = Field(default=64, ge=1, le=4096)
    """Requests of batches that each ingress runs at once. To fill a model alone, all ingresses
    together need as many as its `max_num_seqs`.
    """
    max_running_responses: int = Field(default=64, ge=1, le=4096)
    """Responses with `background: true` that each ingress runs at once; others are queued."""

    @field_validator("folder")
    @classmethod
    def _check_absolute(cls, folder: str | None) -> str | None:
        if folder is not None and not os.path.isabs(folder):
            raise ValueError("write an absolute path: Ray starts the ingresses in its own folders")
        return folder


class AppConfig(StrictModel):
    """Everything that the composition root needs."""

    models: tuple[ModelConfig, ...] = Field(min_length=1)
    """The models to serve. Requests without `model` go to the first that has the route's task."""
    limits: LimitsConfig = LimitsConfig()
    """The limits on one request."""
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()
    """How the schemas and grammars of requests are read."""
    auth: AuthConfig = AuthConfig()
    """The keys that clients need, or permission to do without."""
    cors: CorsConfig = CorsConfig()
    """Which web pages may call the server from a browser."""
    jobs: JobsConfig = JobsConfig()
    """Where files and batches are kept, and how much of them."""
    access_log: bool = True
    """Whether each request writes a line of JSON to the ingress's log file, without prompts and
    answers.
    """
    tracing: TracingConfig = TracingConfig()
    """Where traces of requests go."""

    @property
    def ongoing_requests(self) -> int:
        """Requests that an ingress replica must accept at once so that none waits outside it."""
        return sum(model.ongoing_requests() for model in self.models)

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        names = [model.deployment_name for model in self.models]
        if INGRESS_NAME in names:
            raise ValueError(f"model ids must differ: {INGRESS_NAME!r} is the ingress's own name")
        if LEDGER_NAME in names:
            raise ValueError(f"model ids must differ: {LEDGER_NAME!r} is the key ledger's own name")
        if MODELS_NAME in names:
            raise ValueError(f"model ids must differ: {MODELS_NAME!r} is raystream's own name")
        adapters = [each.id for model in self.models for each in model.adapters]
        ids = [*(model.id for model in self.models), *adapters]
        if shared := sorted({id_ for id_ in adapters if ids.count(id_) > 1}):
            raise ValueError(
                f"ids of models and adapters must differ; used twice: {', '.join(shared)}"
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            second = names.index(twice[0], names.index(twice[0]) + 1)
            raise PydanticCustomError(
                "used_twice",
                "model ids must differ; used twice: {names}",
                {"names": ", ".join(twice), "place": ("models", second, "id")},
            )
        return self
