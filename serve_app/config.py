"""The configuration that stands under `args:` in serve_config.yaml.

One way in: every limit has its owner here, every unknown key is refused with the nearest known one
named. Ray's own sections of the file are checked by `serve_app.check`.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.engine.sampling_params import MAX_NUM_STOPS

PROJECT_ROOT = Path(__file__).resolve().parent.parent
"""Relative paths are looked up in the working directory first, then here."""

INGRESS_NAME = "Ingress"
"""The ingress's deployment in Ray."""

LEDGER_NAME = "KeyLedger"
"""The deployment that counts what each API key uses."""

ONGOING_MARGIN = 64
"""Calls to a model's replica beside those it admits: requests on their way to a refusal, probes."""

Domain = Annotated[
    str,
    Field(max_length=253, pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z][a-z0-9-]*[a-z0-9]$"),
]
"""A host by its name, in small letters; never an address."""

MAX_NUM_CHOICES = 16
"""What `max_num_choices` may be at most: each answer is a sequence of its own on a replica."""

MAX_NUM_TOOLS = 1024
"""What `max_num_tools` may be at most: longer lists are not even looked at."""

MAX_NUM_TEXTS = 8192
"""What `max_num_texts` may be at most: longer lists are not even looked at."""


def unknown_key_message(key: str, known: list[str]) -> str:
    """Return a sentence that names the unknown key and, if one is near, the key that was meant."""
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r}: {hint}"


class StrictModel(BaseModel):
    """A section of the configuration; unknown keys are errors with a hint."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

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
    "prefix_caching",
    "cuda_graphs",
    "tool_call_parser",
)
"""Keys of a model's entry that mean nothing to a classifier."""


class ModelConfig(StrictModel):
    """One model: where it comes from, where it runs and how much it may hold.

    Attributes:
        id: The name that clients ask for. It names the Serve deployment too.
        source: A local folder, or the id of a hub repository.
        revision: A commit of the hub repository; None means its newest.
        task: What the model does: generate text, or classify it. For a classifier, a token is one
            of a text to classify; of the keys below, `GENERATION_KEYS` are refused.
        dtype: The weights' type on the device; auto keeps what the files have, except that a CPU
            without bfloat16 arithmetic gets float32.
        quantization: int8 holds the linear layers of the language model in half of bfloat16's
            bytes, on a CPU alone: decoding is faster, and texts differ a little from those of the
            weights as they are.
        device: auto takes the GPU that Ray assigned, else the CPU.
        num_gpus: What Ray reserves; auto means `gpu_share` where the cluster has GPUs, else 0;
            a number is 0, or a share of one GPU.
        gpu_share: The part of a GPU that auto asks for.
        num_cpus: CPUs that Ray reserves for each replica.
        num_threads: Threads that a CPU model computes with; auto chooses by the model's size (see
            `deployments.gpu.device.num_compute_threads`).
        max_model_len: Tokens of prompt and answer together. Of a classifier, tokens of one text;
            where the model has fewer positions, those.
        max_num_seqs: Sequences that run at once; each holds a KV slot.
        max_batched_tokens: Tokens in one engine step, or in one micro-batch of a classifier.
        max_queued_requests: Sequences that may wait for a slot, on each replica and whatever the
            number of ingress replicas; of a classifier, requests that may wait for the device.
            Beyond, requests are refused with a 503. `user_config` of the model's deployment changes
            it while the model runs, and `max_queued_tokens` too.
        max_queued_tokens: Tokens of those that wait: of their prompts, and what they may generate;
            a request without max_tokens counts as `max_model_len`. None counts requests alone.
        prefix_caching: Whether prompts that begin alike (a system prompt, the turns before) are
            computed once. The cache is shared by all clients, so one can tell by the time of its
            first token whether somebody's prompt began like its own; false closes that.
        cuda_graphs: Whether decode steps on a GPU are captured and launched as a whole, which takes
            some memory; false launches them kernel by kernel. A CPU knows no such thing.
        tool_call_parser: How the model writes the calls of tools: auto asks its chat template, none
            refuses tools; the names are vLLM's.
    """

    id: str = Field(min_length=1, max_length=96, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    source: str = Field(min_length=1)
    revision: str | None = None
    task: Literal["generate", "classify"] = "generate"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["int8"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_gpus: Literal["auto"] | float = "auto"
    gpu_share: float = Field(default=1.0, gt=0, le=1)
    num_cpus: float = Field(default=1, ge=0)
    num_threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    max_model_len: int = Field(default=4096, ge=2)
    max_num_seqs: int = Field(default=32, ge=1)
    max_batched_tokens: int = Field(default=2048, ge=1)
    max_queued_requests: int = Field(default=64, ge=0)
    max_queued_tokens: int | None = Field(default=None, ge=0)
    prefix_caching: bool = True
    cuda_graphs: bool = True
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = "auto"

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.num_gpus != "auto" and not 0 <= self.num_gpus <= 1:
            raise ValueError("num_gpus must be 'auto', or from 0 to 1: a replica runs on one GPU")
        if self.task == "classify":
            self._check_classifier()
        if self.quantization is not None and self._runs_on_gpu:
            raise ValueError(
                f"quantization {self.quantization!r} runs on a CPU alone; write `device: cpu` "
                "and `num_gpus: 0`, or `quantization: null`"
            )
        if self.task == "generate" and self.max_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence needs one token in every step"
            )
        max_tokens = self.max_queued_tokens
        if max_tokens is not None and max_tokens < self.max_model_len:
            raise ValueError(f"max_queued_tokens: {self.too_few_tokens_message(max_tokens)}")
        return self

    def _check_classifier(self) -> None:
        alien = [key for key in GENERATION_KEYS if key in self.model_fields_set]
        if alien:
            raise ValueError(f"task 'classify' has no {', '.join(alien)}; leave that out")

    def too_few_tokens_message(self, max_queued_tokens: int) -> str:
        """Return what is wrong with a limit that the longest request exceeds alone."""
        return (
            f"{max_queued_tokens} is less than max_model_len ({self.max_model_len}), so the "
            "longest requests could never wait; raise it, or write null"
        )

    def ongoing_requests(self, max_queued_requests: int | None = None) -> int:
        """Return how many calls a replica must take at once, so that none waits in Ray's router.

        Args:
            max_queued_requests: What `user_config` says in place of this entry.
        """
        max_queued = (
            self.max_queued_requests if max_queued_requests is None else max_queued_requests
        )
        # A classifier's device takes all that waits, and as many may wait then.
        num_running = self.max_num_seqs if self.task == "generate" else max_queued + 1
        return num_running + max_queued + ONGOING_MARGIN

    @property
    def _runs_on_gpu(self) -> bool:
        """Whether a GPU is asked for by name; `auto` alone may find one or not."""
        has_share = self.num_gpus != "auto" and self.num_gpus > 0
        return self.device == "cuda" or (self.device == "auto" and has_share)

    @property
    def deployment_name(self) -> str:
        """The model's deployment in Ray; Ray's file names allow no slash."""
        return self.id.replace("/", "--")


class LimitsConfig(StrictModel):
    """What one request may ask for; an error names the limit that refused.

    Attributes:
        max_header_bytes: Names and values of a request's headers together.
        max_body_bytes: Size of a request's body.
        max_body_read_s: How long a client may take to send its body.
        max_json_depth: Objects and lists inside one another.
        max_prompt_bytes: UTF-8 of all prompts and messages, with the arguments of earlier calls,
            and of all pieces to classify; counted before they are tokenized.
        max_num_messages: Messages of one conversation.
        max_num_choices: `n`, the answers to one request.
        max_num_stops: Strings in `stop`.
        max_stop_bytes: UTF-8 of one of them.
        max_num_images: Images in one request.
        max_image_bytes: One encoded image.
        max_image_pixels: Pixels of one image, checked before it is decoded.
        allowed_image_domains: Hosts from which images are fetched by https, each named exactly;
            with none, images come as `data:` URIs alone.
        image_fetch_timeout_s: From looking an image's host up to the image's last byte.
        first_token_timeout_s: Most seconds from a request to the first token of each of its texts,
            with the time that it waits for a slot; None sets no limit.
        stall_timeout_s: Most seconds from one token to the next; None sets no limit.
        total_timeout_s: Most seconds from a request to the end of its answer, which is the one
            limit where texts are classified; None sets no limit.
        slow_reader_timeout_s: Most seconds that a client may leave a stream unread while there is
            more to send; then it loses the stream. None waits for ever.
        max_num_tools: Tools that one request may offer to the model.
        max_tools_bytes: Size of all their names, descriptions and schemas together, as JSON.
        max_schema_bytes: Size of one JSON schema that an answer must be valid by.
        max_schema_depth: How deeply its brackets may be nested; an object in an object takes two.
            `max_json_depth` counts those of the body around it, too.
        max_schema_compile_s: Seconds of CPU that it may take to compile.
        max_num_prompts: Texts that one completions request may ask for: its prompts, each `n`
            times. Each is a sequence of its own.
        max_num_texts: Texts of one classification request.
        max_num_pieces: Pieces that they are split into, together.
    """

    max_header_bytes: int = Field(default=16 * 2**10, ge=1024)
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    max_body_read_s: float = Field(default=30, gt=0, allow_inf_nan=False)
    max_json_depth: int = Field(default=64, ge=8, le=256)
    max_prompt_bytes: int = Field(default=2**20, ge=1)
    max_num_messages: int = Field(default=1024, ge=1)
    max_num_choices: int = Field(default=MAX_NUM_CHOICES, ge=1, le=MAX_NUM_CHOICES)
    max_num_stops: int = Field(default=16, ge=0, le=MAX_NUM_STOPS)
    max_stop_bytes: int = Field(default=1024, ge=1)
    max_num_images: int = Field(default=8, ge=0)
    max_image_bytes: int = Field(default=16 * 2**20, ge=1)
    max_image_pixels: int = Field(default=16 * 2**20, ge=1)
    allowed_image_domains: tuple[Domain, ...] = ()
    image_fetch_timeout_s: float = Field(default=5, gt=0, allow_inf_nan=False)
    first_token_timeout_s: float | None = Field(default=600, gt=0, allow_inf_nan=False)
    stall_timeout_s: float | None = Field(default=120, gt=0, allow_inf_nan=False)
    total_timeout_s: float | None = Field(default=3600, gt=0, allow_inf_nan=False)
    slow_reader_timeout_s: float | None = Field(default=30, gt=0, allow_inf_nan=False)
    max_num_tools: int = Field(default=128, ge=0, le=MAX_NUM_TOOLS)
    max_tools_bytes: int = Field(default=64 * 2**10, ge=0)
    max_schema_bytes: int = Field(default=2**16, ge=2, le=2**19)
    max_schema_depth: int = Field(default=32, ge=1, le=100)
    max_schema_compile_s: int = Field(default=1, ge=1, le=60)
    max_num_prompts: int = Field(default=64, ge=1)
    max_num_texts: int = Field(default=1024, ge=1, le=MAX_NUM_TEXTS)
    max_num_pieces: int = Field(default=8192, ge=1)


class AuthConfig(StrictModel):
    """Who may come in. Without keys the server listens on this machine alone.

    Attributes:
        api_keys_file: A YAML file of hashed keys (see `serve_app.api_keys`); the environment
            variable RAYSTREAM_API_KEYS does instead of it, or beside it.
        allow_anonymous: Serve whoever reaches the port, without keys, on any host.
    """

    api_keys_file: str | None = Field(default=None, min_length=1)
    allow_anonymous: bool = False

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.api_keys_file is not None and self.allow_anonymous:
            raise ValueError(
                "api_keys_file and allow_anonymous: true contradict each other; leave one out"
            )
        return self


class AppConfig(StrictModel):
    """Everything that the composition root needs.

    Attributes:
        models: What is served; the first is the default.
        limits: What one request may ask for.
        auth: Who may come in.
        access_log: Whether each request leaves a line of JSON in the log; see
            `serve_app.access_log`.
    """

    models: tuple[ModelConfig, ...] = Field(min_length=1)
    limits: LimitsConfig = LimitsConfig()
    auth: AuthConfig = AuthConfig()
    access_log: bool = True

    @property
    def ongoing_requests(self) -> int:
        """Requests that an ingress replica must take at once, so that none waits in front of it."""
        return sum(model.ongoing_requests() for model in self.models)

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        names = [model.deployment_name for model in self.models]
        if INGRESS_NAME in names:
            raise ValueError(f"model ids must differ: {INGRESS_NAME!r} is the ingress's own name")
        if LEDGER_NAME in names:
            raise ValueError(f"model ids must differ: {LEDGER_NAME!r} is the key ledger's own name")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"model ids must differ; used twice: {', '.join(twice)}")
        return self
