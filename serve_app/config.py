"""The configuration under `args:` in serve_config.yaml.

Every limit is defined here. An unknown key is refused, and the error suggests the nearest known
one. `make table` makes docs/configuration.md from the fields and the docstrings below them.
`serve_app.commands.check.check` checks Ray's own sections of the file.
"""

import os
import re
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.contract.model_spec import MAX_AUTO_SEQS, Task
from deployments.contract.sampling_params import MAX_NUM_STOPS
from deployments.contract.tracing import TracingSettings

T = TypeVar("T")

INGRESS_NAME = "Ingress"
"""The ingress's deployment in Ray."""

LEDGER_NAME = "KeyLedger"
"""The deployment that counts what each API key uses."""

MODELS_NAME = "ServedModels"
"""The deployment that describes the models of an application without an ingress of ours."""

ONGOING_MARGIN = 64
"""Calls to a model's replica beyond those it admits: probes, and requests about to be refused."""

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


Auto = Literal["auto"]
"""The value of a setting that is chosen at the start."""


def number(value: Auto | T) -> T | None:
    """Return a setting's number; None if it is chosen at the start."""
    return None if value == "auto" else value


def unknown_key_message(key: str, known: list[str]) -> str:
    """Return a message with the unknown key and the nearest known key, or all of them."""
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r}: {hint}"


def deployment_name_of(model_id: str) -> str:
    """Return the name of a model's deployment in Ray, whose file names allow no slash."""
    return model_id.replace("/", "--")


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


class StrictModel(BaseModel):
    """A section of the configuration; unknown keys are errors with a hint."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = list(cls.model_fields)
            unknown = [str(key) for key in data if key not in known]
            if unknown:
                raise ValueError("; ".join(unknown_key_message(key, known) for key in unknown))
        return data


GENERATION_KEYS = (
    "quantization",
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "prefix_caching",
    "cuda_graphs",
    "tool_call_parser",
    "reasoning_parser",
)
"""Keys of a model's entry that are refused unless it generates."""


class ModelConfig(StrictModel):
    """One model: where it comes from, where it runs and how much it may hold."""

    id: str = Field(min_length=1, max_length=96, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """The name that clients use. The model's deployment has the same name, with each `/` written as
    `--`.
    """
    source: str = Field(min_length=1)
    """A local folder, or the id of a hub repository. `~` is the user's home. A relative folder
    starts from the folder of this file with `raystream serve`, `deploy`, `plan` and `download`,
    from the folder that Ray was started in with `serve run` and `serve deploy`, or else from the
    shipped models; what is no folder there is an id.
    """
    revision: str | None = None
    """A commit of the hub repository; null takes the newest."""
    task: Task = "generate"
    """Whether the model generates text, classifies texts or embeds them: turns them into vectors.
    A cross-encoder, which says how well two texts fit, classifies with one label. Unless the model
    generates, its limits on tokens count those of the texts, and `quantization`, `max_num_seqs`,
    `kv_cache_memory_bytes`, `prefix_caching`, `cuda_graphs` and the parsers are refused.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The weights' type on the device. auto keeps the files' type, but on a CPU float16 becomes
    float32, and so does every type if the CPU lacks AVX512_BF16.
    """
    quantization: Literal["int8", "int4"] | None = None
    """int8 and int4 hold the language model's linear layers in about a half and a quarter of
    bfloat16's bytes: decoding is faster, and texts differ from those of the original weights,
    slightly in int8 and visibly in int4. Only on a CPU. null leaves them as `dtype` says.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes. auto takes the GPU that Ray assigned, else the CPU."""
    num_gpus: Auto | float = "auto"
    """GPUs that Ray reserves for each replica: 0, or a share of one. auto is `gpu_share` if the
    cluster has GPUs when the file is deployed, else 0.
    """
    gpu_share: Auto | Annotated[float, Field(gt=0, le=1)] = "auto"
    """The share of a GPU that `num_gpus: auto` asks for; a replica allocates no more than it. auto
    is a whole GPU if there is one for each model of the file, else what the model needs beside the
    others. `raystream plan` shows it.
    """
    num_cpus: Auto | Annotated[float, Field(ge=0)] = "auto"
    """CPUs that Ray reserves for each replica. It decides where a replica fits and limits nothing.
    auto is 1, or less if all replicas of the file need less to fit on the nodes that the cluster
    has when the file is deployed. Where nodes are added with the load, write a number.
    """
    num_threads: Auto | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Threads that a model on a CPU computes with. auto takes all cores for large models, and all
    but one for small ones.
    """
    max_model_len: Auto | Annotated[int, Field(ge=2)] = "auto"
    """The most tokens of prompt and answer together. Unless the model generates, the most tokens of
    one text, special ones included, or as many as the model reads if that is less. auto, here and
    in the next two, lets each replica choose by its model and device: as many as the model can take
    and the memory holds. The replica's log tells the numbers.
    """
    max_num_seqs: Auto | Annotated[int, Field(ge=1)] = "auto"
    """The most sequences that run at once, if their tokens fit into the KV memory. auto is up to
    256 on a GPU, and up to 16 on a CPU.
    """
    max_batched_tokens: Auto | Annotated[int, Field(ge=1)] = "auto"
    """The most tokens of one engine step (decode rows and prefill chunks), or of one micro-batch of
    texts. auto is 2048, but 512 for steps on a CPU.
    """
    kv_cache_memory_bytes: Auto | Annotated[int, Field(ge=1)] = "auto"
    """The most memory that each replica takes for keys and values, which bounds how many sequences
    run at once, and how long they may be. On a CPU it is only reserved: memory is taken when
    sequences need it, and given back some seconds after it is free. auto is a quarter of the
    machine's memory, or of the container's limit, on a CPU, and all that the share leaves on a GPU;
    no number gives more than is free at the start.
    """
    max_queued_requests: int = Field(default=64, ge=0)
    """Sequences that may wait for their turn on each replica; each prompt counts once for each of
    its answers (`n`). Unless the model generates, HTTP requests that may wait for the device,
    whatever their number of texts. Further requests get a 503 with `Retry-After`. `user_config` of
    the model's deployment can change this limit, and `max_queued_tokens`, while the model runs.
    """
    max_queued_tokens: int | None = Field(default=None, ge=0)
    """Tokens that may wait on each replica: those of prompts, and those that may be generated.
    Without max_tokens a sequence counts with its default length: completions' 16, or the generation
    config's `max_new_tokens`, or all that `max_model_len` leaves. null limits only the number of
    sequences. At least `max_model_len`; one that the replica has chosen raises it to as much.
    """
    prefix_caching: bool = True
    """Whether the common beginning of prompts (a system prompt, earlier turns) is computed once.
    All clients share the cache, so from the time of its first token a client can tell whether
    another client's prompt began like its own; false prevents that.
    """
    cuda_graphs: bool = True
    """Whether decode steps on a GPU are captured and launched as a whole, which takes some memory;
    false launches them kernel by kernel. Has no effect on a CPU.
    """
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = "auto"
    """How the model writes tool calls. auto asks its chat template, none refuses tools; the names
    are vLLM's.
    """
    reasoning_parser: Literal["auto", "qwen3", "deepseek_r1", "none"] = "auto"
    """How the model marks its reasoning, which answers hold separately. auto asks its chat
    template, deepseek_r1 takes text without `<think>` for reasoning too, none leaves it in the
    content; the names are vLLM's.
    """

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.num_gpus != "auto" and not 0 <= self.num_gpus <= 1:
            raise ValueError("num_gpus must be 'auto', or from 0 to 1: a replica runs on one GPU")
        if self.task != "generate":
            self._check_pooler()
        if self.quantization is not None and self._runs_on_gpu:
            raise ValueError(
                f"quantization {self.quantization!r} runs only on a CPU; write `device: cpu` "
                "and `num_gpus: 0`, or `quantization: null`"
            )
        num_seqs, step_tokens = number(self.max_num_seqs), number(self.max_batched_tokens)
        if self.task == "generate" and num_seqs and step_tokens and step_tokens < num_seqs:
            raise ValueError(
                f"max_batched_tokens ({step_tokens}) must be at least max_num_seqs ({num_seqs}): "
                "each running sequence needs one token in every step"
            )
        if self.max_queued_tokens is not None and self.has_too_few_tokens(self.max_queued_tokens):
            message = self.too_few_tokens_message(self.max_queued_tokens)
            raise ValueError(f"max_queued_tokens: {message}")
        return self

    def _check_pooler(self) -> None:
        unusable = [key for key in GENERATION_KEYS if key in self.model_fields_set]
        if unusable:
            raise ValueError(f"task {self.task!r} has no {', '.join(unusable)}; leave that out")

    def has_too_few_tokens(self, max_queued_tokens: int) -> bool:
        """Return whether a single request of full length would exceed a limit on tokens.

        A length that the replica chooses is not known here; the replica then raises the limit to
        it.
        """
        max_model_len = number(self.max_model_len)
        return max_model_len is not None and max_queued_tokens < max_model_len

    def too_few_tokens_message(self, max_queued_tokens: int) -> str:
        """Return the message for a limit that a single request of full length would exceed."""
        return (
            f"{max_queued_tokens} is less than max_model_len ({self.max_model_len}), so the "
            "longest requests could never be queued; raise it, or write null"
        )

    def ongoing_requests(self, max_queued_requests: int | None = None) -> int:
        """Return how many calls a replica must accept at once so that none waits in Ray's router.

        Args:
            max_queued_requests: The value in `user_config`, if it replaces this entry's.
        """
        max_queued = (
            self.max_queued_requests if max_queued_requests is None else max_queued_requests
        )
        # A pooler's device takes the whole queue at once; then the queue may fill up again.
        num_running = self._most_seqs if self.task == "generate" else max_queued + 1
        return num_running + max_queued + ONGOING_MARGIN

    @property
    def _most_seqs(self) -> int:
        """The most sequences that run at once, whatever the replica chooses."""
        return number(self.max_num_seqs) or MAX_AUTO_SEQS

    @property
    def _runs_on_gpu(self) -> bool:
        """Whether the entry explicitly asks for a GPU; with only `auto` it may get one or not."""
        has_share = self.num_gpus != "auto" and self.num_gpus > 0
        return self.device == "cuda" or (self.device == "auto" and has_share)

    @property
    def max_num_admitted(self) -> int:
        """The most requests that one replica admits, running and waiting."""
        return self.max_queued_requests + (self._most_seqs if self.task == "generate" else 1)

    @property
    def deployment_name(self) -> str:
        """The name of the model's deployment in Ray."""
        return deployment_name_of(self.id)


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
    """Most seconds from one token to the next; null sets no limit."""
    total_timeout_s: float | None = Field(default=3600, gt=0, allow_inf_nan=False)
    """Most seconds from a request to the end of its answer; requests to classify, embed or rank
    texts have only this time limit. null sets no limit.
    """
    failover_timeout_s: float = Field(default=90, gt=0, allow_inf_nan=False)
    """Most seconds from the loss of an answer's replica until another goes on with it, or begins
    anew if nothing had come.
    """
    slow_reader_timeout_s: float | None = Field(default=30, gt=0, allow_inf_nan=False)
    """Most seconds that a client may leave a stream unread while there is more to send; then it
    loses the stream. null waits forever.
    """
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
    scopes: tuple[Scope, ...] = ()
    """What the key may do besides using the models: `operate` sees what all users do."""

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
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"model ids must differ; used twice: {', '.join(twice)}")
        return self
